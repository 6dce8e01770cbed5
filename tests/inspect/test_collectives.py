"""Collectives, wherever they hide in a program, and where in the step they belong."""

import pytest

from mtjax.inspect import hlo
from mtjax.inspect.check import Entry
from mtjax.inspect.collectives import find_collectives, ring_factor
from mtjax.inspect.phases import phase_of
from tests.inspect import snippets

MESH = {"data": 2, "model": 4}


def found(text, per_server=8):
    return find_collectives(hlo.parse(text), MESH, per_server)


def test_a_loop_multiplies():
    (c,) = found(snippets.LOOP)
    assert (c.kind, c.axes, c.count, c.payload_bytes, c.phase) == ("all-reduce", ("model",), 6, 64, "layer forward")
    assert c.is_known
    assert c.wire_bytes == 64 * 2 * 3 / 4


def test_of_a_ragged_exchange_the_room_counts_and_what_is_expected_to_be_sent_with_where_it_goes():
    (c,) = find_collectives(hlo.parse(snippets.RAGGED), MESH, 8, ragged_share=0.25)
    assert (c.kind, c.axes, c.is_known, c.is_async) == ("ragged-all-to-all", ("model",), True, True)
    assert [str(array) for array in c.arrays] == ["bf16[16,8]"]
    assert c.wire_bytes == (0.25 * 16 * 8 * 2 + 4 * 8) * 3 / 4


def test_loops_in_loops_multiply():
    (c,) = found(snippets.NESTED)
    assert c.count == 30


def test_a_loop_of_unknown_length_is_said_to_be():
    (c,) = found(snippets.UNKNOWN_LENGTH)
    assert (c.count, c.is_exact, c.is_known) == (1, False, False)


def test_computation_between_start_and_done_hides():
    (c,) = found(snippets.LOOP)
    assert c.is_async
    assert c.hidden_behind == ("square",)


def test_an_async_wrapped_collective_is_seen_with_its_window():
    (c,) = found(snippets.ASYNC_WRAPPED)
    assert (c.kind, c.axes, c.phase) == ("reduce-scatter", ("data", "model"), "gradients")
    assert c.payload_bytes == 256  # the operand, not the scattered result
    assert c.hidden_behind == ("busy",)


def test_a_branch_counts_and_is_uncertain():
    (c,) = found(snippets.BRANCHES)
    assert (c.kind, c.axes, c.payload_bytes, c.is_exact) == ("all-gather", ("model",), 64, False)


def test_fusions_and_calls_are_entered():
    permute, swap = found(snippets.FUSED_AND_CALLED)
    assert (permute.kind, permute.axes, permute.wire_bytes) == ("collective-permute", ("data",), 16)
    assert (swap.kind, swap.axes) == ("all-to-all", ("data", "model"))


def test_arrays_that_are_packed_into_one_count_each_in_its_own_phase():
    (c,) = found(snippets.PACKED)
    assert [str(array) for array in c.arrays] == ["f32[1]", "f32[128]"]
    assert (c.phase, c.axes) == ("optimizer", ("data",))
    assert [(str(entry.array), entry.phase) for entry in Entry.of(c)] == [
        ("f32[1]", "optimizer"),
        ("f32[128]", "gradients"),
    ]


def test_what_makes_packed_arrays_tells_their_phases_where_their_sum_has_no_name():
    (c,) = found(snippets.PACKED_WITHOUT_NAME)
    assert (c.axes, c.has_own_name) == (("model",), False)
    assert [(str(entry.array), entry.phase) for entry in Entry.of(c)] == [
        ("f32[16]", "layer recompute"),
        ("f32[128]", "layer backward"),
    ]


def test_every_operand_counts_and_a_synchronous_start_hides_nothing():
    reduce, gather = found(snippets.SEVERAL_OPERANDS)
    assert (reduce.payload_bytes, reduce.axes, reduce.is_async) == (16 + 12, ("data", "model"), False)
    assert [str(a) for a in gather.arrays] == ["f32[16]", "bf16[8,3]"]


def test_unknown_operations_that_communicate_are_listed():
    kinds = [(c.kind, c.axes, c.is_known) for c in found(snippets.UNKNOWN_OPERATIONS)]
    assert kinds == [
        ("teleport", ("model",), False),
        ("custom-call xla.gpu.nvshmem_put", ("data", "model"), False),
        ("all-reduce", None, False),
        ("all-reduce", None, False),
    ]


def test_a_lost_name_is_the_nearest_one():
    (c,) = found(snippets.LOST_NAMES)
    assert (c.phase, c.op_name, c.has_own_name) == ("gradients", "jit(step)/gradients/neg", False)


def test_a_sum_moved_behind_a_loop_belongs_to_the_loop():
    (c,) = found(snippets.BEHIND_A_LOOP)
    assert (c.phase, c.has_own_name) == ("layer backward", False)


def test_an_output_of_a_fusion_has_the_name_of_what_computes_it():
    """XLA prints one name for them all: here the loss's, where the second is the embedding's rows."""
    (c,) = found(snippets.FUSED_OUTPUTS)
    assert (c.phase, c.op_name) == ("embedding forward", "jit(step)/jvp(embedding)/gather")


@pytest.mark.parametrize(("per_server", "servers"), [(8, 1), (4, 1), (2, 2)])
def test_crossing_servers(per_server, servers):
    assert found(snippets.LOOP, per_server)[0].servers == servers


@pytest.mark.parametrize(
    ("kind", "n", "factor"),
    [
        ("all-reduce", 8, 1.75),
        ("all-gather", 8, 0.875),
        ("reduce-scatter", 2, 0.5),
        ("send", 2, 1),
        ("all-reduce", 1, 0),
    ],
)
def test_ring_factors(kind, n, factor):
    assert ring_factor(kind, n) == factor


@pytest.mark.parametrize(
    ("op_name", "phase"),
    [
        ("jit(step)/jvp(embedding)/psum", "embedding forward"),
        ("jit(step)/transpose(jvp(embedding))/scatter-add", "embedding backward"),
        ("jit(step)/jvp(layers)/while/body/closed_call/attention/dot_general", "layer forward"),
        ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/dot", "layer recompute"),
        ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/mlp/dot_general", "layer backward"),
        ("jit(step)/jvp(loss)/pmax", "loss forward"),
        ("jit(step)/transpose(jvp(loss))/psum", "loss backward"),
        ("jit(step)/gradients/psum", "gradients"),
        ("jit(step)/optimizer/reduce_sum", "optimizer"),
        ("jit(step)/reduce_sum", None),
        ("state.optimizer[1].mu", None),
        ("jit(step)/lossless/mul", None),
        ("jit(step)/(shard_map/gradients/psum:shard_map/gradients/psum:optimizer/reduce_sum)", "gradients"),
        ("jit(step)/transpose(jvp(layers))/while/body/(mlp/dot_general:reduce_sum)", "layer backward"),
    ],
)
def test_phases(op_name, phase):
    assert phase_of(op_name) == phase
