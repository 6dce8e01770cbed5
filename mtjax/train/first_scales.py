"""What a run's first steps need beforehand, found with their batches: scales of FP8."""

from collections.abc import Callable

from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.train_state import State
from mtjax.train.observability.start_timer import SCALES
from mtjax.train.observability.step_clock import StepClock
from mtjax.train.step import TrainStep


class FirstScales:
    """Calls `Float8Step.with_first_scales` before each step of a run, until it has nothing more to do."""

    def __init__(self, program: TrainStep, say: Callable[[str], object], clock: StepClock | None = None) -> None:
        """Takes the program, what reports a line, and the clock of the steps, which leaves out the time of this."""
        self._program, self._say, self._clock = program, say, clock
        self._is_due = program.config.training.fp8 == "delayed"

    def __call__(self, state: State, batch: GlobalBatch, step: int = 1) -> State:
        """Returns the state for a step with this batch; `step` is its number."""
        if not self._is_due:
            return state
        if self._clock is not None:
            self._clock.pause(SCALES)
        from mtjax.train.float8 import Float8Step

        assert isinstance(self._program, Float8Step)
        state, done = self._program.with_first_scales(state, batch)
        # "" are gradients that are not finite: the next batch may give scales.
        self._is_due = done == ""
        if done:
            self._say(f"note    {done}")
        if self._clock is not None:
            self._clock.restart(step - 1)
        return state
