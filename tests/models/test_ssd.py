"""The scan of Mamba-2 beside its recurrence in float64, in bfloat16 and in float32."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape
from mtjax.models.kernels.ssd import ScanInputs, scan
from mtjax.sharding.axes import use_rules
from tests.parity.compare import relative
from tests.tiny import mesh_of, tiny_config

SIZES = (2, 300, 2, 3, 4, 5)
"""Samples, tokens, groups, heads of a group, their width, and that of a state."""


def drawn(dtype: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs in the numbers of a type, with heads that forget within a few tokens and within thousands."""
    b, s, u, h, p, n = SIZES
    random = np.random.default_rng(0)
    rate = np.exp(random.uniform(np.log(0.001), np.log(0.1), (b, s, u, h)))
    found = {"x": random.normal(size=(b, s, u, h, p)), "rate": rate}
    found |= {name: random.normal(size=(b, s, u, n)) for name in ("b", "c")}
    rounded = {name: np.asarray(jnp.asarray(v, jnp.float32 if name == "rate" else dtype)) for name, v in found.items()}
    return rounded, -np.linspace(0.5, 16, u * h).reshape(u, h).astype(np.float32)


def recurrence(inputs: dict[str, np.ndarray], a: np.ndarray) -> np.ndarray:
    """Token by token."""
    x, rate, b, c = (inputs[name].astype(np.float64) for name in ("x", "rate", "b", "c"))
    state, outputs = np.zeros((*x.shape[:1], *x.shape[2:], b.shape[-1])), []
    for t in range(x.shape[1]):
        read = (rate[:, t, ..., None] * x[:, t])[..., None] * b[:, t, :, None, None]
        state = np.exp(rate[:, t] * a)[..., None, None] * state + read
        outputs.append((state * c[:, t, :, None, None]).sum(-1))
    return np.stack(outputs, 1)


ROUNDING = 2.0**-9
"""Of bfloat16, relative to a number."""


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-6), (jnp.bfloat16, 4 * ROUNDING)])
def test_errors_are_a_few_roundings_also_after_many_chunks(dtype: Any, bound: float) -> None:
    """Relative to the largest number: measured were 5e-7 and 2.7 roundings, of 300 tokens and of the last 32."""
    inputs, a = drawn(dtype)
    expected = recurrence(inputs, a)
    with jax.set_mesh(mesh_of("1x1")), use_rules(layout_of(tiny_config().model, MeshShape()).rules):
        for chunk, at_once in ((32, 100), (64, 1)):
            y, _ = jax.jit(lambda own, size=chunk, m=at_once: scan(ScanInputs(**own), jnp.asarray(a), size, m))(inputs)
            assert y.dtype == dtype
            found = np.asarray(y, np.float64)
            assert relative(found, expected) < bound
            assert relative(found[:, -32:], expected[:, -32:]) < bound
