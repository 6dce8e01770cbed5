"""Causes of memory-bound time, on operations small enough to name by hand, and on programs as XLA compiles them."""

import pytest

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OPTIMIZER
from mtjax.analysis.hardware import DGX_H100
from mtjax.inspect import causes, hlo
from mtjax.inspect.causes import by_cause, cause_of, memory_bound_by_cause
from mtjax.inspect.collectives import find_collectives
from mtjax.inspect.report import inspect
from mtjax.inspect.roofline import Roofline
from mtjax.inspect.targets import find_target
from mtjax.inspect.text import unrolling_line
from tests.inspect.steps import has_cudnn, needs_aot, tiny

PROGRAM = """HloModule m, is_scheduled=true

%put (p0: bf16[4,99], p1: bf16[99], p2: s32[]) -> bf16[4,99] {
  %p0 = bf16[4,99]{1,0} parameter(0)
  %p1 = bf16[99]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %one = s32[] constant(1)
  %next = s32[] add(%p2, %one)
  %row = bf16[1,99]{1,0} bitcast(%p1)
  ROOT %put.1 = bf16[4,99]{1,0} dynamic-update-slice(%p0, %row, %next, %one)
}

%cut (p0: f32[4,99], p1: s32[]) -> f32[1,99] {
  %p0 = f32[4,99]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %cut.1 = f32[1,99]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,99}
}

%cast (p0: f32[4,99], p1: s32[]) -> bf16[1,99] {
  %p0 = f32[4,99]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %cut.2 = f32[1,99]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,99}
  ROOT %cast.1 = bf16[1,99]{1,0} convert(%cut.2)
}

%fill (p0: bf16[]) -> bf16[4,99] {
  %zero = bf16[] constant(0)
  ROOT %fill.1 = bf16[4,99]{1,0} broadcast(%zero), dimensions={}
}

%join (p0: bf16[99], p1: bf16[99]) -> bf16[198] {
  %p0 = bf16[99]{0} parameter(0)
  %p1 = bf16[99]{0} parameter(1)
  ROOT %join.1 = bf16[198]{0} concatenate(%p0, %p1), dimensions={0}
}

%work (p0: bf16[99]) -> bf16[99] {
  %p0 = bf16[99]{0} parameter(0)
  ROOT %work.1 = bf16[99]{0} tanh(%p0)
}

ENTRY %main (s: bf16[4,99], t: f32[4,99], x: bf16[99], i: s32[]) -> bf16[198] {
  %s = bf16[4,99]{1,0} parameter(0)
  %t = f32[4,99]{1,0} parameter(1)
  %x = bf16[99]{0} parameter(2)
  %i = s32[] parameter(3)
  %a = bf16[4,99]{1,0} fusion(%s, %x, %i), kind=kLoop, calls=%put
  %b = f32[1,99]{1,0} fusion(%t, %i), kind=kLoop, calls=%cut
  %c = bf16[1,99]{1,0} fusion(%t, %i), kind=kLoop, calls=%cast
  %d = bf16[4,99]{1,0} fusion(), kind=kLoop, calls=%fill
  %e = bf16[198]{0} fusion(%x, %x), kind=kLoop, calls=%join
  %f = bf16[99]{0} fusion(%x), kind=kLoop, calls=%work
  ROOT %g = bf16[198]{0} copy(%e)
}
"""


@pytest.mark.parametrize(
    ("name", "phase", "in_loop", "cause"),
    [
        ("a", LAYER_FORWARD, True, causes.STACKS),
        ("a", LAYER_FORWARD, False, causes.CASTS),
        ("b", LAYER_BACKWARD, True, causes.STACKS),
        ("b", LAYER_BACKWARD, False, causes.CASTS),
        ("c", LAYER_RECOMPUTE, True, causes.CASTS),
        ("d", LAYER_FORWARD, False, causes.ZEROS),
        ("e", LAYER_BACKWARD, True, causes.SPLIT),
        ("e", OPTIMIZER, False, causes.UPDATE),
        ("f", LAYER_FORWARD, True, causes.FORWARD),
        ("f", LAYER_BACKWARD, False, causes.BACKWARD),
        ("f", LAYER_RECOMPUTE, True, causes.AGAIN),
        ("f", "loss forward", True, causes.ENDS),
        ("f", "parameters", False, causes.SUMS),
        ("f", "other", False, causes.REST),
        ("g", "other", False, causes.CASTS),
    ],
)
def test_what_a_kernel_does_and_where_say_its_cause(name, phase, in_loop, cause):
    module = hlo.parse(PROGRAM)
    assert cause_of(module, module.entry.by_name[name], phase, in_loop) == cause


def test_work_as_short_as_a_launch_has_a_cause_of_its_own_and_stacks_come_first():
    module = hlo.parse(PROGRAM)
    work, put = (module.entry.by_name[name] for name in "fa")
    assert cause_of(module, work, LAYER_BACKWARD, True, is_small=True) == causes.SMALL
    assert cause_of(module, put, LAYER_BACKWARD, True, is_small=True) == causes.STACKS


def test_causes_add_up_to_the_memory_bound_time_of_a_walk():
    module = hlo.parse(PROGRAM)
    roofline = Roofline(module, find_collectives(module, {"data": 1}, 8), DGX_H100)
    total = sum(spent.memory_bound for spent in roofline.run().phases.values())
    assert sum(sum(each.values()) for each in memory_bound_by_cause(roofline).values()) == pytest.approx(total)
    assert total == pytest.approx(7 * roofline.launch)


@needs_aot
def test_without_a_loop_over_layers_no_stacks_are_left_and_the_contract_holds():
    """The same small program with and without it: split sequences, ZeRO-1, two microbatches of layers that keep all."""
    run = {"mesh": "2x2", "recompute": "none", "attention": "xla", "sequence_parallel": True, "zero": 1}
    looped, unrolled = (inspect(tiny(**run, unroll_layers=unroll), find_target("h100x8")) for unroll in (False, True))
    stacks = []
    for report in (looped, unrolled):
        assert report.time is not None and report.verdict.violations == ()
        found = {cause: sum(phases.values()) for cause, phases in by_cause(report.time.causes).items()}
        assert sum(found.values()) == pytest.approx(report.time.memory_bound)
        stacks.append(found.get(causes.STACKS, 0.0) / report.time.memory_bound)
    assert stacks[0] > 0.15 and stacks[1] < 0.02
    assert unrolled.flops.counted == looped.flops.counted
    assert "--unroll-layers" in unrolling_line(looped) and unrolling_line(unrolled) == ""


@pytest.mark.skipif(not has_cudnn, reason="needs the extra aot-cudnn")
@needs_aot
def test_layers_without_a_loop_gather_ahead_and_copy_nothing():
    """ZeRO-3 with selective recompute: gathers and sums pass behind other layers, products write what attention and
    activations read, and compute gradients as they are sent."""
    # XLA joins gathers up to 30 MB: those of whole layers, were they narrower.
    width = {"hidden_size": 1024, "num_heads": 8, "sequence_length": 1024, "vocab_size": 2048, "num_layers": 4}
    llama = {"family": "llama", "position": "rope", "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False}
    run = {"mesh": "8x1", "global_batch_size": 16, "recompute": "selective", "zero": 3, "loss_chunk": 1024}
    report = inspect(tiny(**width, **llama, **run, bias=False, unroll_layers=True), find_target("h100x8"))
    assert report.time is not None and report.verdict.violations == ()
    gathers = [c for c in report.collectives if c.kind == "all-gather" and c.payload_bytes > 2**18]
    assert sum(c.count for c in gathers if not c.hidden_behind) <= 1
    by_phase = {cause: set(phases) for cause, phases in by_cause(report.time.causes).items()}
    assert causes.STACKS not in by_phase and causes.ZEROS not in by_phase
    assert LAYER_RECOMPUTE not in by_phase.get(
        causes.SPLIT, set()
    )  # queries and keys are saved as attention reads them
    found = [
        (i.opcode, a.dims) for c in report.step.module.computations.values() for i in c.instructions for a in i.arrays
    ]
    assert ("concatenate", (2, 1024, 3, 8, 128)) not in found  # one array of the gradients of query, key and value
