"""Dropout of low-rank adapters: on what they read and on nothing else, and the same whatever the mesh."""

import jax
import numpy as np
import pytest

from mtjax.config.adapters import LoraConfig
from mtjax.layout.dropout import keep_share
from mtjax.layout.layouts import TENSOR
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import gather_sequence_shared
from mtjax.sharding.axes import use_rules
from tests.tiny import mesh_of, program_of, run_steps

RATE = 0.3


def test_an_adapter_reads_what_dropout_leaves_and_its_product_reads_all():
    x = 1 + jax.random.uniform(jax.random.key(0), (4, 64, 32))
    keys = jax.random.split(jax.random.key(1), 4)

    def read(x: jax.Array, keys: jax.Array | None, site: int) -> tuple[jax.Array, ...]:
        with use_rules(TENSOR.rules.over(("data", "model"))):
            return gather_sequence_shared(x, LoraConfig(4, 2.0, RATE), LayerContext(keys), site)

    with jax.set_mesh(mesh_of("1x1")):
        run = jax.jit(read, static_argnums=2)
        product, adapter = run(x, keys, 5)
        _, other = run(x, keys, 7)
        _, whole = run(x, None, 5)
    np.testing.assert_array_equal(product, x)
    np.testing.assert_array_equal(whole, x)
    kept = np.asarray(adapter) > 0
    np.testing.assert_allclose(np.asarray(adapter)[kept], np.asarray(x)[kept] / keep_share(RATE), rtol=1e-6)
    assert abs(kept.mean() - (1 - RATE)) < 0.03  # six deviations of 8192 draws
    assert (kept != (np.asarray(other) > 0)).mean() > 0.3
    assert len({kept[i].tobytes() for i in range(4)}) == 4


@pytest.mark.long
def test_masks_of_adapters_are_the_same_on_every_mesh():
    fields = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "lora_rank": 4, "lora_alpha": 32.0, "num_kv_heads": 4}
    losses = []
    for mesh, more in (("1x1", {}), ("2x4", {"sequence_parallel": True}), ("1x1", {"lora_dropout": 0.0})):
        _, metrics = run_steps(program_of(mesh, **fields | {"lora_dropout": RATE} | more), 4)
        losses.append([step["loss"] for step in metrics])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    assert abs(losses[0][-1] - losses[2][-1]) > 1e-4
