"""Which dimension ZeRO splits, what a device then holds, and checkpoints between layouts."""

from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.counts import Counts, peak_stage_counts
from mtjax.layout.layouts import NOT_SHARDED, TENSOR_RULES, Layout, sharded_dimension
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.rules import DATA
from mtjax.models.named_parameters import replicated_names
from mtjax.train.step import TrainStep
from tests.tiny import batch_of, initial_state, program_of, run_steps, step_gradients

NAMES = st.lists(st.sampled_from(["embed", "mlp", "heads", "head_dim", "qkv"]), min_size=1, max_size=4, unique=True)


@given(
    names=NAMES, sizes=st.lists(st.integers(1, 64), min_size=5, max_size=5), ways=st.integers(1, 16),
    zero=st.integers(0, 3), stacked=st.booleans(),
)  # fmt: skip
@example(names=["embed", "head_dim"], sizes=[8, 16, 1, 1, 1], ways=4, zero=2, stacked=False)
def test_a_dimension_is_chosen_whenever_one_divides(names, sizes, ways, zero, stacked):
    names = (*(["layers"] if stacked else []), *names)
    shape = tuple(sizes[: len(names)])
    dim = sharded_dimension(names, shape, Layout(zero=zero), MeshShape(data=ways, model=2), ways)
    fits = [
        i
        for i, name in enumerate(names)
        if shape[i] % ways == 0 and not TENSOR_RULES.mesh_axes(name) and (name != "layers" or zero == 1)
    ]
    if not zero or ways == 1 or not fits:
        assert dim == NOT_SHARDED
    else:
        assert dim in fits
        inner = [i for i in fits if names[i] != "layers"]
        assert not inner or shape[dim] == max(shape[i] for i in inner)


def test_what_does_not_divide_takes_another_dimension_or_is_reported():
    program = program_of("4x2", zero=2, hidden_size=40)  # head_dim 5, embed 40, mlp 160 over model
    assert program.records["stack"]["layers"]["attention"]["qkv"]["weight"].grad_reduction.dim == 1
    assert replicated_names(program) == ["stack.layers.attention.qkv.bias", "stack.layers.mlp.up.bias"]
    assert replicated_names(program_of("4x2", zero=0)) == []


def counts_of(program: TrainStep) -> Counts:
    """What the theory says a device holds."""
    return peak_stage_counts(anatomy_of(program.config.model), Plan.of(program.config, program.mesh_shape))


def held(tree) -> int:
    """Elements of a tree on one device."""
    return sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(tree) if leaf.ndim)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_device_holds_its_part(zero):
    program = program_of("2x4", zero=zero)
    state = program.initialize(0)
    counts = counts_of(program)
    split = counts.replicated + (counts.all - counts.replicated) // 2
    assert held(state.parameters) == (split if zero else counts.all)
    assert held(state.optimizer) == 2 * (split if zero else counts.all)
    axes = {axis for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim for axis in leaf.sharding.spec}
    assert (DATA in axes) == (zero > 0)


@cache
def deep(zero: int) -> tuple[int, int]:
    """Bytes of all gradients of a model, and of its step's temporaries; each of 8 ranks has 2 microbatches."""
    fields = {"recompute": "full", "microbatch_size": 1, "global_batch_size": 16, "num_layers": 8, "hidden_size": 64}
    fields |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    program = program_of("8x1", zero=zero, **fields)
    return counts_of(program).all * 4, program.lower_step().compile().memory_analysis().temp_size_in_bytes


@pytest.mark.long
def test_full_gradients_never_live_with_zero_2():
    """Temporary memory of the compiled step falls by what the other half of the gradients takes."""

    (_, with_gradients), (whole, without) = deep(zero=1), deep(zero=2)
    assert with_gradients - without > whole / 2


def test_microbatches_add_to_one_sum_of_gradients():
    """A microbatch's own gradients, beside the sum and the gathered parameters, would take as much again."""
    whole, temporaries = deep(zero=1)
    assert 2 * whole < temporaries < 2.75 * whole


@pytest.mark.parametrize(
    ("zero", "fields"),
    [
        pytest.param(1, {"microbatch_size": 1}, id="four microbatches", marks=pytest.mark.long),
        pytest.param(2, {"microbatch_size": 4, "sequence_parallel": True}, id="one", marks=pytest.mark.long),
        pytest.param(1, {"microbatch_size": 1, "unroll_layers": True}, id="unrolled", marks=pytest.mark.long),
    ],
)
def test_gradients_by_matrices_gathered_in_16_bits_are_those_by_matrices_cast_in_use(zero, fields):
    """To the last bit: of the same products, widened before they are added up; and a sum of two ranks has one order."""
    found, expected = (gradients_of("2x2", compute_dtype="bfloat16", zero=z, **fields) for z in (zero, 0))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def gradients_of(mesh: str, **fields):
    program = program_of(mesh, hidden_dropout=0.0, attention_dropout=0.0, **fields)
    state, batch = initial_state(program), batch_of(program, 0)
    return jax.tree.map(np.asarray, step_gradients(program, state, batch)[2])


@pytest.mark.long
def test_gradients_are_clipped_by_the_norm_of_them_all():
    """A clip below the norm binds: every layout must then take the same step."""
    fields = {"clip_grad_norm": 0.05, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    expected = run_steps(program_of("1x1", **fields), 3)[1]
    found = run_steps(program_of("2x4", zero=3, sequence_parallel=True, **fields), 3)[1]
    assert all(m["grad_norm"] > 0.05 for m in expected)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[name] for m in found], [m[name] for m in expected], rtol=1e-5)
