"""Timetables of pipelines: walked like the executor walks them, by a ring of mailboxes and slots, without a device."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mtjax.layout.timetable import Timetable, forward_timetable, num_ticks, timetable

SIZES = {"stages": st.integers(1, 6), "microbatches": st.integers(1, 14), "chunks": st.integers(1, 4)}
TRAINING = {"schedule": st.sampled_from(["1f1b", "interleaved", "gpipe"]), **SIZES}

Piece = tuple[int, int]
"""A microbatch in a chunk of the model, both from 0."""


def halves(table: Timetable, which: str) -> Iterator[tuple[int, int, Piece]]:
    """(tick, stage, piece) of every turn in the forward or backward halves."""
    for tick, half in enumerate(getattr(table, which)):
        for stage, work in enumerate(half):
            if work is not None:
                yield tick, stage, (work.microbatch, work.chunk * table.stages + stage)


def ticks(table: Timetable, which: str) -> dict[Piece, int]:
    return {piece: tick for tick, _, piece in halves(table, which)}


def pieces(stages: int, microbatches: int, chunks: int) -> list[Piece]:
    return [(i, k) for i in range(microbatches) for k in range(stages * chunks)]


@dataclass
class Pipeline:
    """Stages as devices: what has arrived, and what is in each slot; every rule that is broken raises."""

    stages: int
    depth: int
    arrived: list[Piece | None] = field(init=False)
    gradients: list[Piece | None] = field(init=False)
    slots: list[dict[int, Piece]] = field(init=False)

    def __post_init__(self) -> None:
        self.arrived, self.gradients = [None] * self.stages, [None] * self.stages
        self.slots = [{} for _ in range(self.stages)]

    def forward(self, stage: int, piece: Piece, slot: int) -> None:
        microbatch, k = piece
        assert k == 0 or self.arrived[stage] == (microbatch, k - 1), "its input is not what has just arrived"
        assert slot == -1 or slot not in self.slots[stage], "a slot is overwritten while it is held"
        if slot != -1:
            self.slots[stage][slot] = piece

    def backward(self, stage: int, piece: Piece, slot: int) -> None:
        microbatch, k = piece
        assert k == self.depth - 1 or self.gradients[stage] == (microbatch, k + 1), "its gradient has not just arrived"
        assert self.slots[stage].pop(slot, None) == piece, "the slot holds something else"

    def send(self, into: list[Piece | None], sent: list[Piece | None], by: int) -> None:
        into[:] = [sent[(stage - by) % self.stages] for stage in range(self.stages)]


def walk(table: Timetable) -> tuple[list[int], Pipeline]:
    """Runs a table; the most that each stage ever held, and the pipeline afterwards."""
    pipeline = Pipeline(table.stages, table.stages * table.chunks)
    fullest, gradients = [0] * table.stages, [None] * table.stages
    for forward, backward in zip(table.forward, table.backward, strict=True):
        if any(backward):
            pipeline.send(pipeline.gradients, gradients, -1)
        if any(forward):
            turns = [None if w is None else (w.microbatch, w.chunk * table.stages + s) for s, w in enumerate(forward)]
            for stage, (work, piece) in enumerate(zip(forward, turns, strict=True)):
                if work is not None and piece is not None:
                    pipeline.forward(stage, piece, work.slot)
            fullest = [max(most, len(held)) for most, held in zip(fullest, pipeline.slots, strict=True)]
            pipeline.send(pipeline.arrived, turns, 1)
        if any(backward):
            turns = [None if w is None else (w.microbatch, w.chunk * table.stages + s) for s, w in enumerate(backward)]
            for stage, (work, piece) in enumerate(zip(backward, turns, strict=True)):
                if work is not None and piece is not None:
                    pipeline.backward(stage, piece, work.slot)
            gradients = turns
    return fullest, pipeline


@given(**TRAINING)
def test_every_microbatch_goes_once_forward_and_once_backward_through_every_chunk(
    schedule, stages, microbatches, chunks
):
    table = timetable(schedule, stages, microbatches, chunks)
    for which in ("forward", "backward"):
        found = Counter(piece for _, _, piece in halves(table, which))
        assert found == Counter(pieces(stages, microbatches, chunks))


@given(**TRAINING)
def test_a_chunk_is_one_tick_behind_the_one_it_reads_from(schedule, stages, microbatches, chunks):
    """What a permute at the end of a tick delivers is used in the next, or is lost."""
    table = timetable(schedule, stages, microbatches, chunks)
    forward, backward = ticks(table, "forward"), ticks(table, "backward")
    for i, k in pieces(stages, microbatches, chunks):
        if k:
            assert forward[i, k] == forward[i, k - 1] + 1
            assert backward[i, k - 1] == backward[i, k] + 1


@given(**TRAINING)
def test_the_backward_half_of_a_piece_is_not_before_its_forward_half(schedule, stages, microbatches, chunks):
    table = timetable(schedule, stages, microbatches, chunks)
    forward, backward = ticks(table, "forward"), ticks(table, "backward")
    assert all(forward[piece] <= backward[piece] for piece in forward)


@given(**SIZES)
def test_1f1b_turns_round_in_the_tick_of_the_last_chunk(stages, microbatches, chunks):
    table = timetable("interleaved", stages, microbatches, chunks)
    forward, backward = ticks(table, "forward"), ticks(table, "backward")
    last = stages * chunks - 1
    assert all(forward[i, last] == backward[i, last] for i in range(microbatches))


@given(**SIZES)
def test_gpipe_begins_backward_when_all_forward_is_done(stages, microbatches, chunks):
    table = timetable("gpipe", stages, microbatches, chunks)
    assert max(ticks(table, "forward").values()) < min(ticks(table, "backward").values())


@given(**TRAINING)
@example("1f1b", 4, 2, 1)  # fewer microbatches than stages
@example("interleaved", 4, 6, 2)  # the last group is smaller
def test_a_ring_of_mailboxes_and_slots_runs_the_table(schedule, stages, microbatches, chunks):
    """Also: no slot is overwritten while held, all are free at the end, and `slots` and `in_flight` count them."""
    table = timetable(schedule, stages, microbatches, chunks)
    fullest, pipeline = walk(table)
    assert not any(pipeline.slots)
    assert [table.in_flight(s) for s in range(stages)] == fullest
    assert table.slots == max(fullest)


@given(**TRAINING)
def test_as_many_forward_as_backward_ticks_as_the_formula_says(schedule, stages, microbatches, chunks):
    table = timetable(schedule, stages, microbatches, chunks)
    assert table.forward_ticks == table.backward_ticks == num_ticks(stages, microbatches, chunks)


@given(stages=st.integers(1, 6), groups=st.integers(1, 4), chunks=st.integers(1, 4), schedule=TRAINING["schedule"])
def test_the_bubble_is_the_published_one(schedule, stages, groups, chunks):
    """(p-1)/(m v), section 2.2 of arXiv 2104.04473, for microbatches in groups of as many as stages."""
    microbatches = groups * stages
    assert num_ticks(stages, microbatches, chunks) == microbatches * chunks + stages - 1
    bubble = timetable(schedule, stages, microbatches, chunks).bubble
    assert bubble == pytest.approx((stages - 1) / (microbatches * chunks))


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 20), schedule=st.sampled_from(["1f1b", "gpipe"]))
def test_with_one_chunk_any_number_of_microbatches_has_the_published_bubble(schedule, stages, microbatches):
    assert timetable(schedule, stages, microbatches).bubble == pytest.approx((stages - 1) / microbatches)


@given(**SIZES)
def test_a_smaller_last_group_costs_no_more_than_a_full_one(stages, microbatches, chunks):
    """And with several chunks no less than its microbatches' own work."""
    full = -(-microbatches // stages) * stages
    assert microbatches * chunks + stages - 1 <= num_ticks(stages, microbatches, chunks)
    assert num_ticks(stages, microbatches, chunks) <= num_ticks(stages, full, chunks)


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 20))
def test_in_lock_step_1f1b_keeps_two_for_each_stage_behind(stages, microbatches):
    table = timetable("1f1b", stages, microbatches)
    flying = [table.in_flight(s) for s in range(stages)]
    assert flying == [min(microbatches, 2 * (stages - s) - 1) for s in range(stages)]


@pytest.mark.long
@given(**SIZES)
def test_gpipe_keeps_everything(stages, microbatches, chunks):
    table = timetable("gpipe", stages, microbatches, chunks)
    assert {table.in_flight(s) for s in range(stages)} == {microbatches * chunks}


@given(**SIZES)
def test_a_forward_pass_alone_keeps_nothing(stages, microbatches, chunks):
    table = forward_timetable(stages, microbatches, chunks)
    assert table.backward_ticks == 0
    assert all(work.slot == -1 for half in table.forward for work in half if work is not None)
    fullest, _ = walk(table)
    assert table.slots == max(fullest) == 0
    assert ticks(table, "forward") == ticks(timetable("1f1b", stages, microbatches, chunks), "forward")
    assert len(table.forward) == len(table.backward) == num_ticks(stages, microbatches, chunks)


@given(stages=st.integers(1, 6), groups=st.integers(1, 4), chunks=st.integers(1, 4))
def test_the_bubble_of_a_forward_pass_alone(stages, groups, chunks):
    table = forward_timetable(stages, groups * stages, chunks)
    assert table.bubble == pytest.approx((stages - 1) / (groups * stages * chunks))


@given(**TRAINING)
def test_phases_are_the_ticks_in_runs_of_alike_ones(schedule, stages, microbatches, chunks):
    table = timetable(schedule, stages, microbatches, chunks)
    for before, after in zip(table.phases, table.phases[1:], strict=False):
        assert before.stop == after.start
        assert before[:2] != after[:2]
    covered = [phase[:2] for phase in table.phases for _ in range(phase.start, phase.stop)]
    assert covered == [(any(f), any(b)) for f, b in zip(table.forward, table.backward, strict=True)]
    assert (False, False) not in covered


def test_1f1b_of_four_stages_and_six_microbatches_as_drawn_by_hand():
    table = timetable("1f1b", 4, 6)

    def row(which: str, stage: int) -> str:
        turns = (half[stage] for half in getattr(table, which))
        return "".join("." if work is None else str(work.microbatch) for work in turns)

    assert [row("forward", s) for s in range(4)] == ["012345......", ".012345.....", "..012345....", "...012345..."]
    assert [row("backward", s) for s in range(4)] == ["......012345", ".....012345.", "....012345..", "...012345..."]
