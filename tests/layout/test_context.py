"""Ranks that share the tokens of samples, by formula: what they send, hold and take."""

import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.flops import compiled_flops
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.memory import peak_stage_memory
from mtjax.analysis.timing import step_time
from mtjax.analysis.traffic import transfers
from mtjax.config import load, replace
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.timetable import num_ticks

GIB = 2**30


def plan_of(mesh, **fields):
    """Llama 3 8B with whole layers computed again, and sequences split over `model`."""
    base = {"mesh": mesh, "global_batch_size": 1, "recompute": "full", "sequence_parallel": True, "zero": 1}
    run = replace(load("llama3-8b"), **(base | fields))
    return anatomy_of(run.model), Plan.of(run, parse_mesh(mesh))


@pytest.mark.parametrize(
    ("context", "tokens", "method", "sent"),
    [
        (8, 32768, "ring", 2.19),
        (8, 32768, "all-gather", 1.75),
        (8, 131072, "ring", 8.75),
        (8, 131072, "all-gather", 7.00),
        (4, 131072, "ring", 7.50),
        (4, 131072, "all-gather", 6.00),
    ],
)
def test_bytes_over_context_are_those_of_programs_compiled_for_h100s(context, tokens, method, sent):
    """Measured on programs, of another implementation, in which all layers' keys were counted by hand."""
    anatomy, plan = plan_of(f"data=1,context={context},model=8", sequence_length=tokens, context_method=method)
    in_layers = [t for t in transfers(anatomy, plan) if t.axis == "context" and t.phase.startswith("layer")]
    assert round(sum(t.sent for t in in_layers) / GIB, 2) == sent


def test_zero_splits_over_data_and_context_together():
    """Two data ways share as much as two context ways."""
    states = []
    for mesh in ("8x8", "data=2,context=4,model=8", "data=1,context=8,model=8"):
        anatomy, plan = plan_of(mesh, global_batch_size=8)
        memory = peak_stage_memory(anatomy, plan)
        states.append(
            (memory.optimizer, [(t.phase, t.sent) for t in transfers(anatomy, plan) if t.phase == "gradients"])
        )
    assert states[0] == states[1] == states[2]


def test_causal_blocks_are_little_more_than_half_of_all():
    """Of c x c blocks a rank computes its own and half of the others': (c + 1) / 2c; without, XLA computes all."""
    (anatomy, whole), (_, shared) = (
        plan_of(mesh, attention="xla", recompute="none") for mesh in ("1x8", "data=1,context=4,model=8")
    )
    core = sum(stack.layers * part.scores.flops() for stack in anatomy.stacks for part in stack.parts if part.scores)
    # Backward, scores are computed again where ranks share samples, a fourth of what attention takes forward and back.
    difference = compiled_flops(anatomy, whole) - compiled_flops(anatomy, shared)
    assert difference == pytest.approx(3 * core - 3.5 * core * 5 / 8)


def test_stages_send_keys_in_every_tick_and_wait_for_them_as_often():
    """A stage sends its own layers' in every tick, idle or not; what of it counts is exposed as without stages."""
    fields = {"sequence_length": 32768, "global_batch_size": 8, "microbatch_size": 1}
    (anatomy, one), (_, two) = (
        plan_of(mesh, **fields) for mesh in ("data=1,context=4,model=8", "data=1,stage=2,context=4,model=8")
    )
    sent = [
        sum(t.sent for t in transfers(anatomy, plan) if t.axis == "context" and t.phase.startswith("layer"))
        for plan in (one, two)
    ]
    hops = 2 * 3 * 3 + 2 * 3 * 2 + 2 - 2  # forward, again and backward; sums in float32, and home; one hop serves both
    in_stages = hops + 2  # where a chunk's backward pass comes behind all of its forward pass, none does
    assert sent[1] / sent[0] == pytest.approx(num_ticks(2, 8, 1) / 8 / 2 * in_stages / hops)
    times = [step_time(anatomy, plan, DGX_H100) for plan in (one, two)]
    assert times[1].attention == pytest.approx(times[0].attention / 2)
    assert times[1].context_axis == pytest.approx(times[0].context_axis / 2, rel=0.1)
