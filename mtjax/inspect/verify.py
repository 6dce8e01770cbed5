"""`mtjax plan --verify`: errors of the planner's formulas against the program that `mtjax inspect` compiles."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from rich.console import Console
from rich.table import Table

from mtjax.analysis import memory, traffic
from mtjax.analysis.contract import JOINED
from mtjax.analysis.counts import parameters
from mtjax.analysis.timing import step_time
from mtjax.config import Config
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.text import show_note
from mtjax.layout.stages import layer_orders, order_of
from mtjax.plan.report import show, table
from mtjax.plan.units import gib, seconds, si
from mtjax.runtime.checkpoints.weights import shape_without_padding
from mtjax.sharding.param_specs import dotted


@dataclass(frozen=True)
class Check:
    """A figure by formula and of the compiled program."""

    name: str
    formula: float
    program: float
    unit: str
    note: str = ""

    @property
    def error(self) -> float:
        """Relative error of the formula; 0 when both are 0."""
        return self.formula / self.program - 1 if self.program else 0.0 if not self.formula else float("inf")


def counted_parameters(step: CompiledStep) -> int:
    """Returns the number of parameters in the model's abstract tree, without slots of stages that hold no layer."""
    # Stages with fewer layers than others have empty slots, which are parameters of the program and not of the model.
    orders = layer_orders(step.config.model, step.config.parallel)
    leaves = jax.tree_util.tree_flatten_with_path(step.program.abstract_parameters)[0]
    return sum(math.prod(shape_without_padding(leaf, order_of(dotted(path), orders))) for path, leaf in leaves)


def compare(report: Report) -> list[Check]:
    """Compares every formula that has a counterpart in the compiled program."""
    step = report.step
    checks = [
        Check("parameters", parameters(step.anatomy), counted_parameters(step), "", "counted"),
        Check("FLOPs of a step", report.flops.formula, report.flops.counted, "FLOP", "matmuls of the program"),
        *_memory(report),
        *_traffic(report),
    ]
    if report.time is not None:
        server = report.time.server
        planned = step_time(step.anatomy, step.plan, server).total
        note = "simulated from the program: a model too"
        checks.append(Check("step time", planned, report.time.seconds, "s", note))
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
        yield Check(f"sent, {traffic.axis_name(axis)} parallel", formula, sent, "B", "per GPU and step")


def verification_table(checks: list[Check]) -> Table:
    """Builds the table of figures by formula, compiled ones, and errors."""
    result = table("Verified against the compiled program", "", "formula", "compiled", "error", "")
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
    """Compiles a run's step and prints the error of each formula.

    Raises:
      UserError: this machine can't compile for the target, XLA fails to compile the step, or the mesh does not fit.
    """
    console.print("\nCompiling ...", style="dim")
    report = inspect(run, find_target(target))
    show_note(report.step.note, console)
    result = verification_table(compare(report))
    result.caption = f"compiled in {report.step.compile_seconds:.0f} s for {report.target.name}; nothing was run"
    show(console, result)
