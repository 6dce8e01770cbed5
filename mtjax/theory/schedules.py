"""Pipeline schedules by formula: bubbles and microbatches in flight.

mtjax's stages work in lock step, by a timetable (`mtjax.theory.timetable`); Megatron's wait for each other only, and
begin with fewer microbatches. The formulas of the first count what timetables hold, without building them.

Symbols: p stages, m microbatches of a step, v chunks of layers per stage (interleaving), i a stage from 0.
"""

from mtjax.theory.timetable import ScheduleName, num_ticks

# --- mtjax's, in lock step


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Ticks in which a stage is idle, over those in which it works.

    `(p-1)/(vm)` where m is a multiple of p or v is 1: that of arXiv 2104.04473.
    """
    return num_ticks(stages, microbatches, chunks) / (microbatches * chunks) - 1


def slots(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Microbatches' chunks that the fullest stage, the first, keeps at a time; every stage has as many slots.

    GPipe: `mv`. Else the first backward half comes `pv + p - 2` ticks after the first forward half, and then as many
    begin as end: `pv + p - 1`, of one chunk `2p - 1`, but for a step of fewer than two groups of p microbatches.
    """
    if schedule == "gpipe":
        return microbatches * chunks
    groups, rest = divmod(microbatches, stages)
    if groups == 0:
        return microbatches * chunks
    return stages * chunks + (stages - 1 if groups > 1 else rest)


def full_ticks(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Ticks that have both halves: what a half sends then travels while the other computes."""
    ticks = num_ticks(stages, microbatches, chunks)
    return 0 if schedule == "gpipe" else ticks - (stages * chunks - 1)


# --- Megatron's


def megatron_bubble(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over the ideal time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved (arXiv 2104.04473, 2.2)."""
    return (stages - 1) / (microbatches * (chunks if schedule == "interleaved" else 1))


def megatron_in_flight(
    schedule: ScheduleName, stages: int, microbatches: int, stage: int = 0, chunks: int = 1
) -> float:
    """Microbatches whose activations stage i holds at its fullest, in units of all the layers of a stage.

    GPipe: m. 1F1B: `min(m, p - i)`. Interleaved: the warm-up's `2(p-i-1) + (v-1)p` chunks and the one at work, each 1/v
    of the stage; `p (1 + (p-1)/(pv))` on the first stage (arXiv 2205.05198, section 4.2.3).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b" or stages == 1:
        return min(microbatches, stages - stage)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(microbatches, (warm_up + 1) / chunks)
