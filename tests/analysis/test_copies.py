"""What loops over layers copy: by hand for a small layout, and beside a compiled program."""

import dataclasses
from collections import Counter

import pytest

from mtjax.analysis import copies as theory
from mtjax.analysis.anatomy import anatomy_of, gpt
from mtjax.analysis.copies import copies
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.machine import Constants, Machine
from mtjax.analysis.software import MEGATRON_CORE, MTJAX
from mtjax.analysis.timing import step_time
from mtjax.inspect.causes import CASTS, STACKS, ZEROS, by_cause, memory_bound_by_cause
from mtjax.inspect.report import inspect
from mtjax.inspect.roofline import Roofline
from mtjax.inspect.targets import find_target
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import MTJAX_BF16_WIRE, Plan
from tests.inspect.steps import tiny

H, S, LAYERS, HEADS, VECTORS = 32, 64, 3, 4, 13
"""Hidden size, tokens, layers, heads; a GPT-2 layer's vectors in units of H: two norms, and biases of 3, 1, 4 and 1."""
MATRICES = 12 * H * H
"""Elements of a layer's."""
SMALL = gpt(LAYERS, H, HEADS, S, 256)
PLAN = Plan(parse_mesh("1x1"), 8, 2, flash_attention=True, dropout=False)
"""Four microbatches of two samples, nothing computed again."""
KEPT = 2 * S * (2 * (H + 3 * H + H + H + 4 * H) + 4 * HEADS)
"""Bytes that a layer keeps of two samples: its input, query, key and value, attention's output, the stream behind it
and the MLP's first product in two bytes each, and attention's statistics in four."""


def by_kind(plan: Plan, anatomy=SMALL) -> dict[str, float]:
    found: Counter[str] = Counter()
    for copy in copies(anatomy, plan):
        found[copy.kind] += copy.total  # pyright: ignore[reportArgumentType]
    return {kind: total for kind, total in found.items() if total}


def changed(**settings) -> Plan:
    return dataclasses.replace(PLAN, **settings)


def test_bytes_by_hand():
    """In turns of a layer and a microbatch, of which there are 12."""
    turns, all_gradients = 4 * LAYERS, MATRICES + VECTORS * H
    assert by_kind(PLAN) == {
        theory.SAVED: turns * 4 * KEPT,
        theory.ZEROS: turns * KEPT + LAYERS * 4 * all_gradients,
        theory.CASTS: turns * 2 * 6 * MATRICES,
        theory.SUMS: turns * (10 * MATRICES + 12 * VECTORS * H),
    }


def test_full_recompute_keeps_the_stream_alone():
    found = by_kind(changed(recompute="full"))
    assert found[theory.SAVED] == 4 * LAYERS * 4 * (2 * S * 2 * H)
    assert found[theory.SUMS] == by_kind(PLAN)[theory.SUMS]


def test_one_microbatch_adds_nothing_up():
    found = by_kind(changed(global_batch_size=2))
    assert found[theory.CASTS] == LAYERS * (6 + 8) * MATRICES
    assert found[theory.SUMS] == LAYERS * 8 * (MATRICES + VECTORS * H)


def test_layers_without_a_loop_have_no_stacks():
    """What is left is made once a step, however many microbatches there are."""
    found = by_kind(changed(unrolled=True))
    casts, stacked = LAYERS * 6 * MATRICES, LAYERS * 8 * (MATRICES + VECTORS * H)
    assert found == {theory.CASTS: casts, theory.SUMS: stacked}
    assert found == by_kind(changed(unrolled=True, global_batch_size=2))


def test_zero_copies_parts():
    """Of two ranks. Stage 1 adds up whole gradients, stages 2 and 3 parts, which leave at once. Stages 1 and 2 gather
    matrices in two bytes, once, into stacks, out of which each pass copies them.
    """
    plan = changed(mesh=parse_mesh("2x1"), global_batch_size=16)
    turns, split = 4 * LAYERS, MATRICES + VECTORS * H
    none, first, second, third = (by_kind(dataclasses.replace(plan, zero=zero)) for zero in range(4))
    assert none == by_kind(PLAN)
    gathered = LAYERS * ((6 / 2 + 4) * MATRICES + 8 * VECTORS * H)
    stacked = {theory.ZEROS: none[theory.ZEROS] + LAYERS * 2 * MATRICES, theory.CASTS: turns * 2 * 4 * MATRICES}
    assert first == none | stacked | {theory.SHARDS: gathered + LAYERS * 16 * split}
    assert second[theory.SUMS] == third[theory.SUMS] == turns * 12 * split / 2
    assert second[theory.SENT] == third[theory.SENT] == turns * 6 * MATRICES
    assert second[theory.SHARDS] == gathered
    assert 2 * third[theory.CASTS] == none[theory.CASTS] and second[theory.CASTS] == first[theory.CASTS]
    assert theory.SHARDS not in third
    assert theory.SENT not in by_kind(dataclasses.replace(plan, zero=2, precision=MTJAX_BF16_WIRE))
    # Without a loop ZeRO-3 casts a rank's parts once, and products compute gradients as they are sent.
    unrolled = by_kind(dataclasses.replace(plan, zero=3, unrolled=True))
    assert unrolled == {theory.CASTS: LAYERS * 6 * MATRICES / 2, theory.SUMS: LAYERS * 8 * split / 2}


def test_gradients_that_are_all_reduced_are_joined():
    """One microbatch of two ranks without ZeRO: into one array of a layer, and out of it."""
    alone, several = changed(global_batch_size=2), changed(mesh=parse_mesh("2x1"), global_batch_size=4)
    assert theory.SENT not in by_kind(alone)
    assert by_kind(several)[theory.SENT] == LAYERS * 16 * (MATRICES + VECTORS * H)
    assert theory.SENT not in by_kind(dataclasses.replace(several, global_batch_size=8))  # after the last microbatch


def test_small_kernels_of_a_loop():
    """Of GPT-2's eight vectors, of which four are of two norms; more where there is dropout, and with recompute."""

    def launches(**settings) -> float:
        found = copies(SMALL, changed(**settings))
        return sum(copy.times for copy in found if copy.kind == theory.LAUNCHES) / LAYERS

    none = 8 + 4 + 6 + 2
    assert launches() == 4 * none and launches(dropout=True) == 4 * (none + 2)
    assert launches(recompute="full", dropout=True) == 4 * (none + 2 + 4 + 2)
    assert launches(recompute="full", global_batch_size=2) == none + 4 + 4
    assert launches(unrolled=True) == 0
    mesh = parse_mesh(f"data=1,stage={LAYERS},model=1")  # chunks of one layer, which are in no loop
    assert launches(recompute="none", mesh=mesh) == 4 * (none - 4) / LAYERS


def test_experts_are_split_over_the_ranks_that_have_the_same():
    """Eight experts over four of eight ranks: ZeRO-3 splits them in two, what is not an expert's in eight."""
    run = tiny(family="llama", norm="rmsnorm", num_experts=8, experts_top_k=2, mesh="data=2,expert=4,model=1")
    anatomy = anatomy_of(run.model)
    plan = changed(mesh=parse_mesh("data=2,expert=4,model=1"), global_batch_size=64, zero=3)
    matrices = [w for p in anatomy.stacks[0].parts for w in p.weights if len(w.shape) > 1 and "routes" not in w.names]
    experts = sum(w.size for w in matrices if "expert" in w.names)
    shared = sum(w.size for w in matrices) - experts
    casts = by_kind(plan, anatomy)[theory.CASTS]
    assert casts == 4 * 3 * 2 * 6 * (experts / 4 / 2 + shared / 8)


@pytest.mark.parametrize(("recompute", "casts", "kept"), [("full", 3, 4), ("none", 2, 8)])
def test_stages_cast_once_more_or_copy_into_slots(recompute, casts, kept):
    plan = changed(mesh=parse_mesh("data=1,stage=3,model=1"), recompute=recompute)
    found, turns = by_kind(plan, gpt(2 * LAYERS, H, HEADS, S, 256)), 4 * 2
    assert found[theory.CASTS] == turns * casts * 6 * MATRICES
    assert found[theory.SAVED] == turns * kept * KEPT
    assert found[theory.SUMS] == turns * (18 * MATRICES + 20 * VECTORS * H)
    assert by_kind(plan).get(theory.SAVED, 0) == 4 * (kept - 4) * KEPT  # a chunk of one layer needs no stack


def test_seconds_are_bytes_at_the_memorys_speed_and_launches():
    big = gpt(4, 4096, 32, 2048, 1024)
    free = Constants(launch=0)
    copied = step_time(big, PLAN, DGX_H100, MTJAX, free).copies
    assert copied == pytest.approx(sum(by_kind(PLAN, big).values()) / (3.35e12 * 0.9 * 0.795), rel=0.01)
    # Of eight vectors, which are added up, and as many sums; counters, reads of vectors, and statistics of two norms.
    launches = (8 + 8 + 4 + 6 + 2) * 4 * 4 * Machine(DGX_H100).constants.launch
    assert step_time(big, PLAN, DGX_H100).copies == pytest.approx(copied + launches, rel=0.01)
    assert step_time(big, PLAN, DGX_H100, MEGATRON_CORE).copies == 0


@pytest.mark.aot
def test_stacks_of_a_compiled_program():
    """Layers as wide as GPT-2 1.2B's; XLA's attention casts and makes zeros of its own."""
    sizes = {"hidden_size": 1536, "num_heads": 16, "sequence_length": 1024, "num_layers": 4, "loss_chunk": 1024}
    batch = {"mesh": "1x1", "global_batch_size": 16, "microbatch_size": 8}
    report = inspect(tiny(**sizes, **batch, attention="xla", recompute="selective"), find_target("h100x8"))
    assert report.time is not None
    roofline = Roofline(report.step.module, [], DGX_H100, Constants(launch=0))
    second = roofline.machines[2].passes(1)
    compiled = {c: sum(s.values()) / second for c, s in by_cause(memory_bound_by_cause(roofline)).items()}
    found = by_kind(report.step.plan, report.step.anatomy)
    assert compiled[STACKS] == pytest.approx(found[theory.SAVED] + found[theory.SUMS], rel=0.02)
    # Of the two stacks of norms' inputs one is copied from the other's zeros.
    like_another = 2 * 2 * 4 * 8 * 1024 * 1536
    assert compiled[ZEROS] == pytest.approx(found[theory.ZEROS] - like_another, rel=0.02)
    assert compiled[CASTS] > found[theory.CASTS]
