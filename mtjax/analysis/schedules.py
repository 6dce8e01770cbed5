"""Pipeline schedules by formula: bubbles and microbatches in flight.

mtjax's stages run in lockstep, by a timetable (`mtjax.layout.timetable`); Megatron's wait for each other only, and
have fewer warm-up microbatches. The formulas for mtjax count ticks and slots of timetables without building them.

Symbols: p stages, m microbatches of a step, v chunks of layers per stage (interleaving), i a stage from 0.
"""

from mtjax.layout.timetable import ScheduleName, num_ticks

# --- mtjax's, in lockstep


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """Returns the ticks in which a stage is idle, over those in which it works.

    `(p-1)/(vm)` where m is a multiple of p or v is 1: that of arXiv 2104.04473.
    """
    return num_ticks(stages, microbatches, chunks) / (microbatches * chunks) - 1


def slots(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Returns the most chunks of microbatches in flight on the first stage; every stage has as many slots.

    GPipe: `mv`. Otherwise the first backward half is `pv + p - 2` ticks after the first forward half, and from then on
    as many begin as end: `pv + p - 1`, with one chunk `2p - 1`, unless there are fewer than two groups of p
    microbatches.
    """
    if schedule == "gpipe":
        return microbatches * chunks
    groups, remainder = divmod(microbatches, stages)
    if groups == 0:
        return microbatches * chunks
    return stages * chunks + (stages - 1 if groups > 1 else remainder)


def full_ticks(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> int:
    """Returns the ticks with both halves: then stage-boundary transfers of one half overlap with the other."""
    ticks = num_ticks(stages, microbatches, chunks)
    return 0 if schedule == "gpipe" else ticks - (stages * chunks - 1)


# --- Megatron's


def megatron_bubble(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Returns the idle time over the ideal time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved.

    Source: arXiv 2104.04473, section 2.2.
    """
    return (stages - 1) / (microbatches * (chunks if schedule == "interleaved" else 1))


def megatron_in_flight(
    schedule: ScheduleName, stages: int, microbatches: int, stage: int = 0, chunks: int = 1
) -> float:
    """Returns the most microbatches whose activations stage i holds, in units of all layers of a stage.

    GPipe: m. 1F1B: `min(m, p - i)`. Interleaved: the warm-up's `2(p-i-1) + (v-1)p` chunks and the current one, each 1/v
    of the stage; `p (1 + (p-1)/(pv))` on the first stage (arXiv 2205.05198, section 4.2.3).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b" or stages == 1:
        return min(microbatches, stages - stage)
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(microbatches, (warm_up + 1) / chunks)
