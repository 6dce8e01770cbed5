"""Global batch size as a function of the samples consumed: constant, or Megatron's `--rampup-batch-size`.

All functions are pure: the position of a run is one number, the samples consumed so far.
"""

import bisect
from dataclasses import dataclass

from mtjax.config import Training
from mtjax.errors import UserError

MOST_SIZES = 1000
"""Sizes that a ramp may have."""


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes of a run.

    Attributes:
      starts: consumed samples from which each size holds, ascending, the first 0.
      sizes: global batch size from there on, ascending.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def batch_size(self, consumed: int) -> int:
        """Returns the global batch size of the step that begins after `consumed` samples."""
        return self.sizes[self._phase(consumed)]

    def advance(self, consumed: int, steps: int) -> int:
        """Returns the samples consumed after `steps` more steps."""
        while steps:
            size, left = self._steps_left(consumed)
            taken = steps if left is None else min(steps, left)
            consumed, steps = consumed + taken * size, steps - taken
        return consumed

    def steps_between(self, consumed: int, limit: int) -> int:
        """Returns the number of complete steps from `consumed` samples on that end at or before `limit`."""
        steps = 0
        while True:
            size, left = self._steps_left(consumed)
            fit = max(0, limit - consumed) // size
            if left is None or fit < left:
                return steps + fit
            consumed, steps = consumed + left * size, steps + left

    def batch_sizes(self) -> tuple[int, ...]:
        """Returns every batch size that can occur, ascending: each is a shape to compile."""
        return self.sizes

    def _phase(self, consumed: int) -> int:
        return bisect.bisect_right(self.starts, consumed) - 1

    def _steps_left(self, consumed: int) -> tuple[int, int | None]:
        """Returns the batch size at `consumed`, and how many steps it lasts: None when it never changes."""
        phase = self._phase(consumed)
        size = self.sizes[phase]
        if phase + 1 == len(self.sizes):
            return size, None
        # Rounded up: the step that begins before the next size is reached still has this size, and may end beyond.
        return size, -(-(self.starts[phase + 1] - consumed) // size)


def constant(batch_size: int) -> BatchSchedule:
    """Returns the schedule of a run whose batch size never changes."""
    return BatchSchedule((0,), (batch_size,))


def batch_schedule(training: Training) -> BatchSchedule:
    """Returns the batch-size schedule that a config describes.

    With `rampup_batch_size` (START, INCREMENT, SAMPLES) the batch grows by INCREMENT every
    SAMPLES / ((global_batch_size - START) / INCREMENT) samples, and reaches `global_batch_size` after SAMPLES.

    Raises:
      UserError: the numbers don't describe a ramp.
    """
    size = training.global_batch_size
    if training.rampup_batch_size is None:
        return constant(size)
    start, increment, samples = training.rampup_batch_size
    if not (0 < start <= size and increment > 0 and samples >= 0):
        raise UserError(
            f"rampup_batch_size {start} {increment} {samples} is not a ramp up to global_batch_size {size}: START must "
            "be between 1 and it, INCREMENT at least 1, SAMPLES at least 0"
        )
    if (size - start) % increment:
        raise UserError(
            f"rampup_batch_size can't go from {start} to global_batch_size {size} in steps of {increment}: "
            f"{size - start} is not divisible by {increment}"
        )
    increments = (size - start) // increment
    if increments == 0 or samples < increments:  # nothing to ramp, or less than a sample for each size
        return constant(size)
    if increments > MOST_SIZES:
        raise UserError(
            f"rampup_batch_size {start} {increment} {samples} has {increments + 1} sizes, each a program to compile, "
            f"and may have {MOST_SIZES}: take a larger INCREMENT"
        )
    starts = (0, *(_reaches(k, samples, increments) for k in range(1, increments + 1)))
    return BatchSchedule(starts, tuple(start + k * increment for k in range(increments + 1)))


def _reaches(increment: int, samples: int, increments: int) -> int:
    """Returns the fewest consumed samples after `increment` increments: floor(consumed / (samples/increments))."""

    def passed(consumed: int) -> int:
        # In floating point, as Megatron divides: both change the size at the same sample.
        return increments if consumed > samples else int(consumed / (samples / increments))

    # In integers: where `passed` rounds, the result is a few samples away.
    guess = samples * increment // increments
    while passed(guess) >= increment:
        guess -= 1
    while passed(guess) < increment:
        guess += 1
    return guess


def train_samples(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Returns the number of samples that the run consumes from its beginning to its end.

    Args:
      training: its batch sizes from now on, and its end, by steps or by samples.
      step: steps that it has done already, perhaps with other batch sizes.
      consumed: samples that these have consumed.
    """
    left = max(0, train_steps(training, step, consumed) - step)
    return batch_schedule(training).advance(consumed, left)


def train_steps(training: Training, step: int = 0, consumed: int = 0) -> int:
    """Returns the steps of the run from its beginning to its end: full global batches of `train_samples`, else `steps`.

    Args:
      training: its batch sizes from now on, and its end.
      step: steps that it has done already, perhaps with other batch sizes.
      consumed: samples that these have consumed.

    Raises:
      UserError: fewer samples than one batch.
    """
    if training.train_samples is None:
        return training.steps
    schedule = batch_schedule(training)
    steps = step + schedule.steps_between(consumed, training.train_samples)
    if steps == 0:
        raise UserError(
            f"train_samples {training.train_samples} is less than the first global batch, {schedule.batch_size(0)}"
        )
    return steps
