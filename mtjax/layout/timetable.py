"""Pipeline schedules as timetables: the work of each stage in each tick.

A tick has a forward and a backward half. In each half a stage processes one chunk of its layers for one microbatch, or
is idle; then all stages send activations to the next chunk and gradients to the previous one. So a chunk's forward
halves are one tick after those of the chunk before it, and its backward halves one tick after those of the chunk after
it.

The executor (`mtjax.sharding.pipeline.executor`) runs a timetable; the contract, the planner and the plots count
its ticks. Halves in which no stage has work are not run.

Stage s of p has the chunks s, p + s, 2p + s, ... of the model's v p, as in section 2.2 of arXiv 2104.04473.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]


class Work(NamedTuple):
    """Work of a stage in half a tick."""

    microbatch: int
    chunk: int
    """Index among the stage's chunks."""
    slot: int
    """Slot in which the stage saves activations for this microbatch's backward half; -1 where it saves none."""


Half = tuple[Work | None, ...]
"""By stage; None is idle."""


class Phase(NamedTuple):
    """Consecutive ticks that run the same halves."""

    forward: bool
    backward: bool
    start: int
    stop: int
    """The last tick plus one."""


@dataclass(frozen=True)
class Timetable:
    """A pipeline schedule, tick by tick."""

    stages: int
    microbatches: int
    chunks: int
    """Chunks of layers on each stage."""
    forward: tuple[Half, ...]
    """By tick."""
    backward: tuple[Half, ...]
    """By tick; as many as `forward`."""

    @property
    def slots(self) -> int:
        """Most chunks of microbatches in flight on any stage."""
        return max(map(self.in_flight, range(self.stages)))

    def in_flight(self, stage: int) -> int:
        """Returns the most chunks of microbatches in flight on a stage at a time."""
        return 1 + max((half[stage].slot for half in self.forward if half[stage]), default=-1)  # pyright: ignore

    @property
    def forward_ticks(self) -> int:
        """Ticks with a forward half."""
        return sum(map(any, self.forward))

    @property
    def backward_ticks(self) -> int:
        """Ticks with a backward half."""
        return sum(map(any, self.backward))

    @property
    def bubble(self) -> float:
        """Halves in which a stage is idle, over those in which it works."""
        work = self.microbatches * self.chunks * (2 if self.backward_ticks else 1)
        return (self.forward_ticks + self.backward_ticks) / work - 1

    @property
    def phases(self) -> list[Phase]:
        """The ticks grouped by the halves they run: warm-up, steady state, cool-down."""
        halves = [(any(f), any(b)) for f, b in zip(self.forward, self.backward, strict=True)]
        starts = [t for t, pair in enumerate(halves) if t == 0 or pair != halves[t - 1]]
        return [Phase(*halves[a], a, b) for a, b in zip(starts, [*starts[1:], len(halves)], strict=True)]


@cache
def timetable(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> Timetable:
    """Builds the timetable of a training step.

    1F1B begins each microbatch's backward pass as soon as its last chunk is done, GPipe (arXiv 1811.06965) after the
    last microbatch's. Microbatches run through the chunks in groups of as many as there are stages; where they are not
    a multiple of the stages, the last group is smaller, and with several chunks stages are idle in it.

    Args:
      schedule: the order; "interleaved" is 1F1B with several chunks.
      stages: at least 1.
      microbatches: of a data parallel rank in a step, at least 1.
      chunks: of layers on each stage.
    """
    depth = stages * chunks
    last = _forward_tick(microbatches - 1, stages, chunks)
    # Ticks from a microbatch's first forward half to its first backward half.
    # GPipe: after the last microbatch's last chunk. 1F1B: in the tick of a microbatch's own last forward half, whose
    # result the backward half of the same tick reads.
    delay = last + depth if schedule == "gpipe" else depth - 1
    forward = _forward_work(stages, microbatches, chunks)
    backward = _work(
        stages, microbatches, chunks, lambda i, k: _forward_tick(i, stages, chunks) + delay + depth - 1 - k
    )
    return _with_slots(stages, microbatches, chunks, forward, backward, 1 + max(tick for tick, _ in backward))


@cache
def forward_timetable(stages: int, microbatches: int, chunks: int = 1) -> Timetable:
    """Builds the timetable of a forward pass, as evaluation runs it."""
    forward = _forward_work(stages, microbatches, chunks)
    return _with_slots(stages, microbatches, chunks, forward, {}, 1 + max(tick for tick, _ in forward))


def num_ticks(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Returns the ticks with a forward half, which are as many as those with a backward half, in every schedule.

    `m v + p - 1` for m microbatches, a multiple of the p stages, or one chunk: the bubble of arXiv 2104.04473.
    """
    return _forward_tick(microbatches - 1, stages, chunks) + stages * chunks


_TickStage = tuple[int, int]
"""Tick and stage."""


def _forward_tick(microbatch: int, stages: int, chunks: int) -> int:
    """Returns the tick in which a microbatch enters the first chunk: groups of `stages` follow each other."""
    group, index = divmod(microbatch, stages)
    return index + group * stages * chunks


def _forward_work(stages: int, microbatches: int, chunks: int) -> dict[_TickStage, tuple[int, int]]:
    """Maps (tick, stage) to (microbatch, chunk) in the forward halves."""
    return _work(stages, microbatches, chunks, lambda i, k: _forward_tick(i, stages, chunks) + k)


def _work(
    stages: int, microbatches: int, chunks: int, tick: Callable[[int, int], int]
) -> dict[_TickStage, tuple[int, int]]:
    """Maps (tick, stage) to (microbatch, chunk), if the model's chunk k runs in `tick(microbatch, k)`."""
    # The model's chunk k is on stage k mod stages: with several chunks a microbatch goes around the stages.
    pairs = ((i, k) for i in range(microbatches) for k in range(stages * chunks))
    return {(tick(i, k), k % stages): (i, k // stages) for i, k in pairs}


def _with_slots(
    stages: int,
    microbatches: int,
    chunks: int,
    forward: dict[_TickStage, tuple[int, int]],
    backward: dict[_TickStage, tuple[int, int]],
    ticks: int,
) -> Timetable:
    """Builds the timetable: a forward half saves to the first free slot, which its backward half frees."""
    halves: tuple[list[list[Work | None]], ...] = tuple([[None] * stages for _ in range(ticks)] for _ in range(2))
    for stage in range(stages):
        held: dict[tuple[int, int], int] = {}
        for t in range(ticks):
            # The forward half first: it can't take the slot that a backward half of the same tick frees.
            if work := forward.get((t, stage)):
                slot = -1
                if backward:
                    # The first free slot, not the next one: stages have as many slots as are in use at a time.
                    used = set(held.values())
                    slot = held[work] = next(n for n in range(len(held) + 1) if n not in used)
                halves[0][t][stage] = Work(*work, slot)
            if work := backward.get((t, stage)):
                halves[1][t][stage] = Work(*work, held.pop(work))
    rows = [tuple(tuple(half) for half in of) for of in halves]
    return Timetable(stages, microbatches, chunks, *rows)
