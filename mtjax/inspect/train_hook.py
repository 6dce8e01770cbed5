"""`mtjax train --inspect`: reports on the program before the first step."""

from rich.console import Console

from mtjax.config import Model
from mtjax.inspect import text
from mtjax.inspect.compiled import compile_program
from mtjax.inspect.report import Report, report
from mtjax.inspect.targets import running_target
from mtjax.train.step import TrainStep


def show_program(program: TrainStep, console: Console, teacher: Model | None = None) -> Report:
    """Compiles the program's step for the devices it is on, and prints what `mtjax inspect` prints.

    With jax's persistent cache on, the run reuses this compilation; otherwise its first step compiles once more.

    Args:
      program: of the run; its mesh holds real devices.
      console: where to print.
      teacher: the model of the config's teacher, whose weights are in memory during the step.

    Returns:
      The report; `report.verdict.holds` is whether the program meets its contract.
    """
    step = compile_program(program, running_target(program.mesh))
    text.show_note(step.note, console)
    result = report(step, teacher=teacher)
    text.show(result, console)
    return result
