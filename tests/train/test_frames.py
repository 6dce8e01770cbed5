"""How far a step's first matrix product is from `lower_step`: in functions of mtjax, which a reader passes through."""

import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mtjax
from mtjax.train.step import make_train_step
from tests.tiny import mesh_of, tiny_config

HOME = str(Path(mtjax.__file__).parent)


def test_the_first_product_is_at_most_15_functions_from_the_step(monkeypatch: pytest.MonkeyPatch):
    einsum, frames = jnp.einsum, []

    def spy(*arguments: Any, **named: Any) -> jax.Array:
        found = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(HOME)]
        frames.append(found[found.index("lower_step") :])
        return einsum(*arguments, **named)

    step = make_train_step(tiny_config(num_layers=1), mesh_of("1x1"))
    monkeypatch.setattr(jnp, "einsum", spy)
    step.lower_step()
    assert frames[0][-2:] == ["project", "product"]
    assert len(frames[0]) <= 15
