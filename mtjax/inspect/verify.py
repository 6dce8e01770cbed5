"""Formulas against the compiled program: compiled as `mtjax inspect` does, with the error of each."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from mtjax.config import Config
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.text import show_note
from mtjax.plan.report import show, table
from mtjax.plan.units import gib, seconds, si
from mtjax.theory import memory, traffic
from mtjax.theory.contract import JOINED
from mtjax.theory.counts import parameters
from mtjax.theory.timing import step_time


@dataclass(frozen=True)
class Check:
    """A formula's figure and the program's."""

    name: str
    formula: float
    program: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        """Formula over program, minus 1; 0 when both are 0."""
        return self.formula / self.program - 1 if self.program else 0.0 if not self.formula else float("inf")


def counted_parameters(step: CompiledStep) -> int:
    """Parameters of the model's abstract tree."""
    leaves = jax.tree.leaves(step.program.abstract_parameters)
    return sum(leaf.size for leaf in leaves)


def compare(report: Report) -> list[Check]:
    """Every formula that the compiled program can verify."""
    step = report.step
    checks = [
        Check("parameters, whole model", parameters(step.anatomy), counted_parameters(step), "", "counted"),
        Check("FLOPs of a step", report.flops.formula, report.flops.counted, "FLOP", "products of the program"),
        *_memory(report),
        *_traffic(report),
    ]
    if report.time is not None:
        server = report.time.server
        walk = step_time(step.anatomy, step.plan, server).total
        checks.append(Check("step time", walk, report.time.seconds, "s", "a walk over the program: also a model"))
    return checks


def _memory(report: Report) -> Iterator[Check]:
    formula, compiled = memory.stage_memory(report.step.anatomy, report.step.plan), report.memory
    yield Check("weights", formula.weights, compiled.parameters, "B")
    yield Check("optimizer", formula.optimizer, compiled.optimizer, "B", "and Adam's step counter")
    temporaries = formula.total - formula.weights - formula.optimizer
    note = "gradients, activations, workspace, logits"
    yield Check("temporaries", temporaries, compiled.temporaries, "B", note)
    yield Check("peak", formula.total, compiled.peak, "B")


def _traffic(report: Report) -> Iterator[Check]:
    by_axis = traffic.sent_by_axis(traffic.transfers(report.step.anatomy, report.step.plan))
    for axis, formula in by_axis.items():
        sent = sum(c.wire_bytes * c.count for c in report.collectives if c.axes == tuple(axis.split(JOINED)))
        yield Check(f"sent over {traffic.axis_name(axis)}", formula, sent, "B", "per GPU and step")


def verification_table(checks: list[Check]) -> Table:
    """Formula, program, error."""
    result = table("Verified against the compiled program", "", "model", "compiled", "error", "")
    for c in checks:
        error = "exact" if c.formula == c.program else f"{c.error:+.2%}"
        result.add_row(c.name, _amount(c.formula, c.unit), _amount(c.program, c.unit), error, c.note)
    return result


def _amount(value: float, unit: str) -> str:
    if unit == "B":
        return gib(value)
    if unit == "s":
        return seconds(value)
    return f"{value:,.0f}" if not unit else si(value, unit)


def print_verification(console: Console, run: Config, target: str) -> None:
    """Compiles and prints the error of each formula.

    Raises:
      UserError: the target can't be compiled for here, XLA can't compile it, or the mesh does not fit.
    """
    console.print("\nCompiling ...", style="dim")
    report = inspect(run, find_target(target))
    show_note(report.step.note, console)
    result = verification_table(compare(report))
    result.caption = f"compiled in {report.step.compile_seconds:.0f} s for {report.target.name}; nothing was run"
    show(console, result)
