"""`--profile 10:13`: profiles some steps, for XProf, Perfetto and `mtjax inspect --measured`."""

import re
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import jax

from mtjax.errors import UserError
from mtjax.runtime import xla_options
from mtjax.train.step import TrainStep

FOLDER = "profile"
T = TypeVar("T")


def parse_steps(text: str | None) -> range:
    """Parses "10:13" as steps 10 to 13 inclusive, "10" as one step, None as none.

    Raises:
      UserError: the text has another format.
    """
    if text is None:
        return range(0)
    match = re.fullmatch(r"(\d{1,12})(?::(\d{1,12}))?", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or match[1]) if match else 0
    if not 1 <= first <= last:
        raise UserError(f"--profile {text!r}: give the first and the last step to trace, like 10:13")
    return range(first, last + 1)


def named_steps(text: str | None, program: TrainStep) -> range:
    """Parses the steps to trace; if there are any, has the program compiled so that a trace names its operations."""
    if steps := parse_steps(text):
        program.xla = xla_options.traced(program.xla, program.mesh.local_devices[0])
    return steps


class Profile:
    """Profiles steps of the first process into the run's folder; use as a context manager around the steps.

    Args:
      steps: steps to profile; those that this start does not run are ignored.
      folder: of the run.
      say: called with a sentence when the profile is written.
    """

    def __init__(self, steps: range, folder: Path, say: Callable[[str], object]) -> None:
        self._steps, self._folder, self._say = steps, folder / FOLDER, say
        self._running = self._done = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self._stop()
        elif self._steps and not self._done and kind is None and jax.process_index() == 0:
            self._say(f"note    nothing is traced: this start did none of steps {self._steps[0]} to {self._steps[-1]}")

    def run(self, step: int, results: Any, do: Callable[[], tuple[T, dict[str, Any]]]) -> tuple[T, dict[str, Any]]:
        """Runs a step; while it is profiled, the devices run nothing else.

        Args:
          step: its number.
          results: results of the step before, for which profiling waits before it begins.
          do: dispatches the step; returns the new state and the results.
        """
        if step not in self._steps or jax.process_index() != 0:
            return do()
        if not self._running:
            jax.block_until_ready(results)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # Python calls would fill the trace
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            state, new = do()
        if step == self._steps[-1]:
            # The step runs asynchronously: without the wait the trace would end before it.
            jax.block_until_ready(new)
            self._stop()
        return state, new

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._running, self._done = False, True
        self._say(f"profile steps {self._steps[0]} to {self._steps[-1]} are traced in {self._folder}")
