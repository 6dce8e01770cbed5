"""The parser, on HLO written for it."""

import pytest

from mtjax.errors import UserError
from mtjax.inspect import hlo
from mtjax.inspect.collectives import computes
from mtjax.inspect.hlo import Array
from mtjax.inspect.traffic import bytes_moved
from tests.inspect import snippets


def test_reads_instructions_shapes_and_attributes():
    module = hlo.parse(snippets.LOOP)
    assert (module.is_scheduled, module.num_partitions, module.entry.name) == (True, 8, "main")
    start = module.computations["body"].by_name["start"]
    assert start.opcode == "all-reduce-start"
    assert start.operands == ("x",)
    assert start.arrays == (Array("bf16", (4, 8)),)
    assert start.bytes == 64
    assert start.op_name == "jit(step)/jvp(layers)/while/body/mlp/dot_general"
    loop = module.entry.root
    assert (loop.name, loop.trip_count) == ("loop", 6)
    assert [c.name for c in module.callees(loop)] == ["condition", "body"]


def test_tuples_of_tuples_give_their_leaves_in_order():
    start = hlo.parse(snippets.SEVERAL_OPERANDS).entry.by_name["g"]
    assert [str(a) for a in start.arrays] == ["f32[4]", "bf16[2,3]", "f32[16]", "bf16[8,3]"]


def test_quoted_brackets_do_not_end_an_instruction():
    text = hlo.parse(snippets.UNKNOWN_OPERATIONS).entry.by_name["text"]
    assert text.attribute("custom_call_target") == "topk (fast)"
    assert text.op_name == 'jit(step)/a "quoted) name'


def test_unknown_operations_are_kept():
    assert hlo.parse(snippets.UNKNOWN_OPERATIONS).entry.by_name["plain"].attribute("strength") == "3"


def test_a_fusion_with_a_start_and_a_done_is_one_where_it_starts():
    """As XLA of jax 0.12 prints a copy out of a stack that runs beside other work; its start has more results."""
    text = f"""{snippets.HEADER}
%slice (stack: bf16[32,4,8], i: s32[]) -> bf16[1,4,8] {{
  %stack = bf16[32,4,8]{{2,1,0}} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = bf16[1,4,8]{{2,1,0}} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={{1,4,8}}
}}

ENTRY %main (stack.1: bf16[32,4,8], i.1: s32[]) -> bf16[1,4,8] {{
  %stack.1 = bf16[32,4,8]{{2,1,0}} parameter(0)
  %i.1 = s32[] parameter(1)
  %start = ((bf16[32,4,8], s32[]), bf16[1,4,8], u32[]) fusion-start(%stack.1, %i.1), kind=kLoop, calls=%slice
  %other = bf16[32,4,8]{{2,1,0}} multiply(%stack.1, %stack.1)
  ROOT %done = bf16[1,4,8]{{2,1,0}} fusion-done(%start)
}}
"""
    module = hlo.parse(text)
    start, done = (module.entry.by_name[name] for name in ("start", "done"))
    assert (start.opcode, start.arrays, start.called) == ("fusion", done.arrays, ("slice",))
    assert not computes(done) and bytes_moved(module, module.entry, start) == 2 * done.bytes + 4


def test_operands_without_percent_signs():
    text = "HloModule m\n\nENTRY main {\n  p = f32[2]{0} parameter(0)\n  ROOT s = f32[2]{0} add(f32[2]{0} p, p)\n}\n"
    assert hlo.parse(text).entry.root.operands == ("p", "p")


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [("pred", (3,), 3), ("bf16", (2, 2), 8), ("f8e4m3fn", (5,), 5), ("s4", (3,), 2), ("c64", (), 8), ("token", (), 0)],
)
def test_sizes_of_types(dtype, dims, size):
    assert Array(dtype, dims).bytes == size


def test_bounded_dimensions_count_as_their_bound():
    assert hlo.parse_arrays("(f32[<=4,8]{1,0:T(8,128)}, s32[])") == (Array("f32", (4, 8)), Array("s32", ()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "not HLO text"),
        ("HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0\n}\n", "never closed"),
        ("HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {\n  what is this\n}\n", "line 4"),
        ("HloModule m\n\nENTRY %e (p: f32[]) -> f32[] {\n  %p = f32[] parameter(0)\n", "cut off"),
    ],
)
def test_broken_text_is_refused_with_the_place(text, message):
    with pytest.raises(UserError, match=message):
        hlo.parse(text)
