"""Gradients summed over ranks in bfloat16, beside sums in float64 of what each rank has.

Rounding to bfloat16 changes a number by at most `U` of it. A rank's gradient is rounded when it is sent, and a sum when
it is sent on: on a GPU that is after every rank of the ring, on CPUs, where XLA adds up in float32, once at the end. So
n ranks' sum is off by at most `U * (n * sum of |gradients|)` there and `U * (sum of |gradients| + |sum|)` here.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.layout.layouts import NOT_SHARDED
from mtjax.layout.rules import DATA
from mtjax.sharding.param_comm import GradReduction, reduce_gradient
from tests.tiny import batch_of, host_batch, initial_state, mesh_of, program_of

U = 2.0**-8


def rounded(x: Any) -> np.ndarray:
    """To the nearest number of bfloat16."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def around_the_ring(parts: np.ndarray) -> np.ndarray:
    """The sum of rounded parts, rounded after each."""
    total = rounded(parts[0])
    for part in parts[1:]:
        total = rounded(total + rounded(part))
    return total


@pytest.mark.parametrize("dim", [NOT_SHARDED, 1])
def test_a_sum_rounds_what_is_sent_and_what_arrives(dim):
    ranks, split = 8, dim != NOT_SHARDED
    parts = np.random.default_rng(0).standard_normal((ranks, 64, 40)).astype(np.float32)
    total = GradReduction((DATA,), dim, (DATA,) if split else (), ranks if split else 1, "bfloat16")
    place = P(None, None)
    mapped = jax.shard_map(
        lambda a: reduce_gradient(a[0], place, total),
        in_specs=P(DATA),
        out_specs=P(None, DATA) if split else place,
        axis_names={DATA},
    )
    mesh = mesh_of("8x1")
    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(mapped)(jax.device_put(parts, NamedSharding(mesh, P(DATA)))))
    exact, size = parts.astype(np.float64).sum(0), np.abs(parts).sum(0)
    np.testing.assert_array_equal(found, rounded(rounded(parts).sum(0)))
    assert (np.abs(found - exact) <= U * (size + np.abs(exact)) * (1 + U)).all()
    assert (np.abs(around_the_ring(parts) - exact) <= U * ranks * size * (1 + U) ** ranks).all()
    assert np.abs(found - exact).max() > 0.2 * U * np.abs(exact).max()


# --- whole programs


@cache
def of_one_sample() -> list[Any]:
    """Each sample's own part of the global batch's gradient, in float64, from a program on one device."""
    program = program_of("1x1", recompute="none", microbatch_size=None)
    parameters, batch = initial_state(program).parameters, host_batch(program.config, 0)
    mask = batch["loss_mask"]

    @jax.jit
    def differentiate(parameters: Any, loss_mask: Any) -> Any:
        gradients = program.gradients(parameters, batch | {"loss_mask": loss_mask}, None)[2]
        return jax.tree.map(lambda g: g * loss_mask.sum() / mask.sum(), gradients)

    samples = [np.where(np.arange(len(mask))[:, None] == i, mask, 0).astype(np.float32) for i in range(len(mask))]
    parts = [program.on_mesh(differentiate, parameters, sample) for sample in samples]
    return [jax.tree.map(lambda g: np.asarray(g, np.float64), part) for part in parts]


@pytest.mark.parametrize(
    ("mesh", "settings", "at_once"),
    [
        ("4x2", {"sequence_parallel": True, "microbatch_size": 1}, 2),
        pytest.param("2x2x2", {"zero": 2, "microbatch_size": 1}, 1, marks=pytest.mark.long),
        pytest.param("4x2", {"zero": 1, "microbatch_size": None}, 2, marks=pytest.mark.exhaustive),
        pytest.param("2x4", {"zero": 3, "sequence_parallel": True, "microbatch_size": 2}, 2, marks=pytest.mark.long),
        pytest.param("2x2x2", {"zero": 0, "microbatch_size": 1}, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_gradients_are_within_two_roundings_whatever_the_layout(mesh, settings, at_once):
    """`at_once` samples of a rank, next to each other in the batch, are added up in float32 before they are sent."""
    program = program_of(mesh, grad_reduce_dtype="bfloat16", **settings)
    batch = batch_of(program, 0)
    state = initial_state(program)
    found = program.on_mesh(jax.jit(lambda p, b: program.gradients(p, b, None)[2]), state.parameters, batch)
    samples = of_one_sample()
    sends = [range(first, first + at_once) for first in range(0, len(samples), at_once)]
    names = jax.tree.map(lambda record: record.name, program.records)
    several = len(sends) > program.mesh_shape.data  # a sum for each microbatch, added up in float32

    def compare(name: str, gradient: Any, *parts: np.ndarray) -> None:
        gradient, exact = np.asarray(gradient), sum(parts)
        size = sum(np.abs(sum(parts[i] for i in send)) for send in sends)
        noise = 1e-5 * sum(np.abs(part) for part in parts) + 1e-9
        limit = U * (size + (size if several else np.abs(exact)))
        if program.stages > 1 and not name.startswith("stack.layers"):
            # First and last stage add up what their uses of a table make of it: that may cancel, and is rounded again.
            limit = 2 * limit.max()
        assert (np.abs(gradient - exact) <= limit * (1 + U) + noise).all(), name
        if not several:
            np.testing.assert_array_equal(gradient, rounded(gradient), err_msg=name)

    jax.tree.map(compare, names, found, *samples)
    wrong = jax.tree.map(
        lambda g, *parts: np.abs(np.asarray(g) - sum(parts)).max() / np.abs(sum(parts)).max(), found, *samples
    )
    assert max(jax.tree.leaves(wrong)) > 0.2 * U
    assert all(jnp.asarray(g).dtype == jnp.float32 for g in jax.tree.leaves(found))
