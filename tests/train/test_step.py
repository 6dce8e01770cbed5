"""One step, any mesh, the same numbers."""

import itertools
from functools import cache

import jax
import numpy as np
import pytest

from tests.same_numbers import assert_same
from tests.tiny import batch_of, initial_state, program_of, run_steps

MESHES = ("1x1", "1x2", "8x1", "1x8", "2x4")
MORE_MESHES = ("2x1", "2x2", "4x2")
RECOMPUTE = ("none", "full")
MICROBATCH = (None, 1)
# Programs that other tests run as well, and both options together without ZeRO and split sequences; the full product,
# on more meshes, is exhaustive.
COVERING = [(mesh, "none", None) for mesh in ("1x1", "1x8", "2x4")] + [(mesh, "full", 1) for mesh in ("1x1", "2x4")]
PRODUCT = [case for case in itertools.product(MESHES + MORE_MESHES, RECOMPUTE, MICROBATCH) if case not in COVERING]
CASES = COVERING + [pytest.param(*case, marks=pytest.mark.exhaustive) for case in PRODUCT]

# (mesh, sequence_parallel, zero, recompute, microbatch): every two values meet, but for what one way rules out.
LAYOUTS = [
    ("2x4", True, 1, "none", None),
    ("2x4", False, 2, "full", 1),
    ("2x4", True, 3, "full", 1),
    ("4x2", True, 2, "none", None),
    ("4x2", False, 3, "none", None),
    ("4x2", True, 0, "full", 1),
    ("8x1", False, 1, "full", 1),
    ("8x1", False, 3, "full", None),
    ("1x8", True, 0, "none", 1),
    ("data=1,context=4,model=2", True, 1, "full", 1),
]
LONG = [LAYOUTS[number] for number in (0, 1, 4, 5, 6, 7, 8)]
ALL_LAYOUTS = [
    case
    for case in itertools.product(("2x4", "4x2", "8x1", "1x8"), (False, True), (0, 1, 2, 3), RECOMPUTE, MICROBATCH)
    if case not in LAYOUTS
]
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MASKED = (LAYOUTS[2],)
"""Dropout more than doubles what a program takes to compile: only this one and the exhaustive ones have it."""
LAYOUT_CASES = [pytest.param(*case, marks=[pytest.mark.long] if case in LONG else []) for case in LAYOUTS]
LAYOUT_CASES += [pytest.param(*case, marks=pytest.mark.exhaustive) for case in ALL_LAYOUTS]


def flat(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def agree(losses, expected, rtol):
    np.testing.assert_allclose([m["loss"] for m in losses], [m["loss"] for m in expected], rtol=rtol)


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in ("8x1", "1x8")), "2x4"]
)
def test_ten_losses_with_dropout_agree_on_every_mesh(mesh):
    expected = run_steps(program_of("1x1"), 10)[1]
    found = run_steps(program_of(mesh), 10)[1]
    agree(found, expected, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in found], [m["grad_norm"] for m in expected], rtol=1e-4)
    assert len({m["loss"] for m in expected}) == 10


@pytest.mark.parametrize(("mesh", "recompute", "micro"), CASES)
def test_layouts_accumulation_and_recompute_change_nothing(mesh, recompute, micro):
    """After three steps with dropout: the same losses, and the same parameters, as one device in one piece."""
    assert_like_one_device(program_of(mesh, recompute=recompute, microbatch_size=micro))


@pytest.mark.parametrize(("mesh", "sequence", "zero", "recompute", "micro"), LAYOUT_CASES)
def test_split_sequences_and_zero_change_nothing(mesh, sequence, zero, recompute, micro):
    options = {"sequence_parallel": sequence, "zero": zero, "recompute": recompute, "microbatch_size": micro}
    plain = (mesh, sequence, zero, recompute, micro) in set(LAYOUTS) - set(MASKED)
    assert_like_one_device(program_of(mesh, **options | (PLAIN if plain else {})))


@cache
def one_device(dropout=0.1):
    """Parameters after three steps on one device in one piece, and the losses."""
    fields = {"hidden_dropout": dropout, "attention_dropout": dropout}
    state, losses = run_steps(program_of("1x1", recompute="none", microbatch_size=None, **fields), 3)
    return flat(state.parameters), losses


def assert_like_one_device(program):
    state, losses = run_steps(program, 3)
    there, expected = one_device(program.config.model.hidden_dropout)
    agree(losses, expected, rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in losses], [m["grad_norm"] for m in expected], rtol=1e-5)
    here = flat(state.parameters)
    for name, value in there.items():
        # Adam divides by the root of the square: elements whose gradient is rounding noise may take any step.
        assert np.abs(here[name] - value).mean() < 1e-5 * max(1.0, np.abs(value).max()), name
    rates = {name: getattr(program.config.model, name) for name in PLAIN}
    assert_same(program, program_of("1x1", recompute="none", microbatch_size=None, **rates))


def test_dropout_is_on_and_its_keys_follow_the_sample():
    program = program_of("2x4")
    state = initial_state(program)
    batch = batch_of(program, 0)
    shifted = batch | {"sample_index": batch["sample_index"] + np.uint32(1000)}
    losses = [float(program.step(initial_state(program), b)[1]["loss"]) for b in (batch, batch, shifted)]
    assert losses[0] == losses[1] != losses[2]
    off = program_of("2x4", **PLAIN)
    loss = float(off.step(initial_state(off), batch)[1]["loss"])
    total, tokens = program.evaluation(state.parameters, batch)["loss"]
    np.testing.assert_allclose(loss, float(total) / float(tokens), rtol=1e-6)
    assert loss != losses[0]


def test_masked_tokens_do_not_count():
    program = program_of("2x4")
    batch = batch_of(program, 0)
    mask = np.asarray(batch["loss_mask"])
    labels = np.where(mask > 0, np.asarray(batch["labels"]), 3).astype(np.int32)
    other = batch | {"labels": jax.device_put(labels, batch["labels"].sharding)}
    first, second = (program.step(initial_state(program), b)[1] for b in (batch, other))
    assert float(first["loss"]) == float(second["loss"]) and float(first["tokens"]) == mask.sum()


def test_bfloat16_with_everything_split_computes_in_16_bits_and_keeps_the_rest_in_32():
    fields = {"compute_dtype": "bfloat16", "sequence_parallel": True, "recompute": "full", "microbatch_size": 1}
    program = program_of("2x4", zero=3, **fields, **PLAIN)
    state, losses = run_steps(program, 3)
    agree(losses, one_device(dropout=0.0)[1], rtol=2e-2)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.parameters, state.optimizer)) if leaf.ndim} == {
        np.dtype("float32")
    }
    assert "bf16[" in program.lower_step().as_text("hlo")


def test_state_is_donated():
    program = program_of("2x4")
    state = initial_state(program)
    program.step(state, batch_of(program, 0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.parameters))


def test_nothing_is_summed_over_a_single_data_rank():
    """XLA would copy every gradient for it, on CPUs; with two ranks there is something to sum."""

    def sums(mesh):
        text = program_of(mesh).lower_step().compile().as_text() or ""
        return sum("all-reduce(" in line and "/gradients/" in line for line in text.splitlines())

    assert sums("1x2") == 0 < sums("2x4")


def test_learning_goes_down_on_one_batch():
    program = program_of("2x4", **PLAIN)
    state, losses = initial_state(program), []
    for _ in range(20):
        state, metrics = program.step(state, batch_of(program, 0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 1.0
