"""What a run's first steps need beforehand, found with their batches: scales of FP8."""

from collections.abc import Callable

from mtjax.models.sharded_model import Batch
from mtjax.runtime.train_state import State
from mtjax.train.step import TrainStep


class FirstScales:
    """Calls `TrainStep.with_first_scales` before each step of a run, until it has nothing more to do.

    Attributes:
      is_due: whether it may have something to do.
    """

    def __init__(self, program: TrainStep, say: Callable[[str], object]) -> None:
        """Takes the program, and what reports a line."""
        self._program, self._say = program, say
        self.is_due = program.config.training.fp8 == "delayed"

    def __call__(self, state: State, batch: Batch) -> State:
        """Returns the state for a step with this batch."""
        if not self.is_due:
            return state
        state, done = self._program.with_first_scales(state, batch)
        self.is_due = done == ""
        if done:
            self._say(f"note    {done}")
        return state
