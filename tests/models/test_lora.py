"""Dropout of low-rank adapters: on what they read and on nothing else, and the same whatever the mesh."""

from functools import reduce
from operator import getitem
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config.adapters import LoraConfig
from mtjax.layout.dropout import keep_share
from mtjax.layout.layouts import TENSOR
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import gather_sequence_shared
from mtjax.sharding.axes import use_rules
from mtjax.train.step import TrainStep
from tests.tiny import batch_of, mesh_of, program_of, run_steps

RATE = 0.3


def test_an_adapter_reads_what_dropout_leaves_and_its_product_reads_all():
    x = 1 + jax.random.uniform(jax.random.key(0), (4, 64, 32))
    keys = jax.random.split(jax.random.key(1), 4)

    def read(x: jax.Array, keys: jax.Array | None, site: int) -> tuple[jax.Array, ...]:
        with use_rules(TENSOR.rules.restricted_to(("data", "model"))):
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


EXPERTS = {"family": "llama", "num_experts": 4, "experts_top_k": 2, "expert_size": 24, "num_kv_heads": 4}
EXPERTS |= {"shared_expert_size": 16, "expert_bias": True, "first_dense_layers": 1, "num_layers": 3}
PRODUCTS = {
    ("up",): ("lehgr", "legrm", "lehgm"),
    ("down",): ("lemr", "lerh", "lemh"),
    ("shared", "up"): ("lhgr", "lgrm", "lhgm"),
    ("shared", "down"): ("lmr", "lrh", "lmh"),
}
"""Modules of experts -> dimensions of A, B and the matrix: layers, experts, hidden states, gate, inner width, rank."""


def module_of(parameters: Any, path: tuple[str, ...]) -> dict[str, Any]:
    return reduce(getitem, path, parameters["stack"]["layers"]["experts"])


def gradients_of(program: TrainStep, parameters: Any) -> tuple[Any, Any]:
    run = jax.jit(lambda p, b: program.gradients(p, b, None))
    loss, _, gradients = program.on_mesh(run, parameters, batch_of(program, 0))
    return float(loss), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("data=2,expert=2,model=2", {"sequence_parallel": True}, marks=pytest.mark.long),
        pytest.param("data=2,expert=2,model=2", {"expert_dispatch": "all-to-all", "zero": 3}, marks=pytest.mark.long),
        pytest.param("1x1", {"capacity_factor": 1.0, "expert_bias": False}, marks=pytest.mark.exhaustive),
    ],
)
def test_adapters_of_experts_change_their_matrices_by_a_product(mesh, more):
    """Loss and gradients are those of experts with the matrices W + scale A B, whose gradient G gives those of A and B:
    scale G B' and scale A' G."""
    adapted, scale = program_of(mesh, **EXPERTS | more, lora_rank=3, lora_alpha=6.0), 2.0
    plain = program_of("1x1", **EXPERTS | {n: more[n] for n in ("capacity_factor", "expert_bias") if n in more})
    parameters, merged = (program.initialize(0).parameters for program in (adapted, plain))
    factors = {}
    for number, (path, (a, b, whole)) in enumerate(PRODUCTS.items()):
        lora, matrix = module_of(parameters, path)["lora"], module_of(merged, path)
        drawn = 0.1 * np.random.default_rng(number).normal(size=lora["b"].shape).astype(np.float32)
        lora["b"], factors[path] = jax.device_put(drawn, lora["b"].sharding), (np.asarray(lora["a"]), drawn)
        change = scale * np.einsum(f"{a},{b}->{whole}", *factors[path])
        matrix["weight"] = jax.device_put(np.asarray(matrix["weight"]) + change, matrix["weight"].sharding)

    (loss, found), (expected, full) = gradients_of(adapted, parameters), gradients_of(plain, merged)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for path, (a, b, whole) in PRODUCTS.items():
        of_matrix, (down, up) = scale * module_of(full, path)["weight"], factors[path]
        lora = module_of(found, path)["lora"]
        for gradient, known in (
            (lora["a"], np.einsum(f"{whole},{b}->{a}", of_matrix, up)),
            (lora["b"], np.einsum(f"{a},{whole}->{b}", down, of_matrix)),
        ):
            np.testing.assert_allclose(gradient, known, atol=1e-5 * np.abs(known).max())
