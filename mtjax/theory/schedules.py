"""Pipeline schedules by formula: bubbles and microbatches in flight.

Symbols: p stages, m microbatches of a step, v chunks of layers per stage (interleaving), i a stage from 0.
Source: section 2.2 of arXiv 2104.04473.
"""

from mtjax.theory.timetable import ScheduleName


def bubble(schedule: ScheduleName, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over the ideal time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved."""
    return (stages - 1) / (microbatches * (chunks if schedule == "interleaved" else 1))


def in_flight(schedule: ScheduleName, stages: int, microbatches: int, stage: int = 0, chunks: int = 1) -> float:
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
