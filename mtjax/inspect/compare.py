"""Comparisons of reports: `--vs` another config, mesh or setting, and `--sweep` over all meshes of a number of GPUs."""

import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from mtjax import config
from mtjax.analysis.contract import PHASES
from mtjax.config import Config
from mtjax.config.run import section_by_setting
from mtjax.config.sizes import divisors
from mtjax.errors import UserError
from mtjax.inspect.report import CollectiveRow, Report
from mtjax.inspect.text import duration, size
from mtjax.layout.divisibility import check_config
from mtjax.layout.layouts import TENSOR_RULES
from mtjax.layout.mesh import MeshShape, parse_mesh


def other_config(base: Config, words: Sequence[str]) -> Config:
    """Returns the run of `--vs`: each word is a mesh ("8x8"), SETTING=VALUE, or a config file or shipped config.

    Raises:
      UserError: a word is not one of these.
    """
    for word in words:
        if _is_mesh(word):
            base = config.replace(base, mesh=word)
        elif "=" in word:
            name, _, value = word.partition("=")
            base = config.replace(base, **{name.strip("-").replace("-", "_"): _value(base, name, value)})
        else:
            mesh = base.parallel.mesh
            base = config.load(word)
            # Shipped configs that name no mesh have the default, and would compare a whole mesh with one GPU.
            base = config.replace(base, mesh=mesh) if base.parallel.mesh == "1x1" else base
    config.validate(base)
    return base


def _is_mesh(word: str) -> bool:
    try:
        parse_mesh(word)
    except UserError:
        return False
    return True


def _value(base: Config, name: str, value: str) -> object:
    """Returns a setting's value, parsed as TOML."""
    field = name.strip("-").replace("-", "_")
    group = section_by_setting().get(field)
    if group is None:
        return value  # config.replace names the nearest
    try:
        table = tomllib.loads(f"{field} = {value}")
    except (ValueError, RecursionError):  # not TOML, or more digits or brackets than Python reads
        table = {field: value}
    # As from a file, so that a wrong type is the same error.
    checked = config.from_dict({group: table}, base, source="--vs")
    return getattr(getattr(checked, group), field)


@dataclass(frozen=True)
class Measure:
    """A number by which two reports are compared."""

    name: str
    of: Callable[[Report], float | None]
    show: Callable[[float], str]


def measures(reports: Sequence[Report]) -> Iterator[Measure]:
    """Yields the numbers to compare: bytes sent by axes and phase, memory, time."""
    for axes, phase in sorted({(_axes(r), r.phase) for x in reports for r in x.rows}, key=lambda k: PHASES.index(k[1])):
        yield Measure(f"sent over {axes}, {phase}", lambda r, a=axes, p=phase: sent_bytes(r, a, p), size)
    yield Measure("sent per device, total", lambda r: sent_bytes(r), size)
    yield Measure("peak memory", lambda r: r.memory.peak, size)
    yield Measure("  parameters", lambda r: r.memory.parameters, size)
    yield Measure("  optimizer", lambda r: r.memory.optimizer, size)
    yield Measure("  temporaries", lambda r: r.memory.temporaries, size)
    yield Measure("TFLOP of matmuls, all devices", lambda r: r.flops.counted / 1e12, lambda x: f"{x:,.2f}")
    if all(r.time for r in reports):
        yield Measure("predicted step", lambda r: r.time and r.time.seconds, duration)
        yield Measure("  exposed communication", lambda r: r.time and r.time.exposed, duration)
        yield Measure("model TFLOP/s per GPU", lambda r: r.time and r.time.tflops, lambda x: f"{x:.1f}")
        yield Measure("MFU", lambda r: r.time and r.time.mfu, lambda x: f"{x:.1%}")


def sent_bytes(report: Report, axes: str | None = None, phase: str | None = None) -> float:
    """Returns the bytes that a device sends in a step; only over the given axes and in the given phase, if any."""
    return sum(
        row.wire_bytes * row.count for row in report.rows if axes in (None, _axes(row)) and phase in (None, row.phase)
    )


def _axes(row: CollectiveRow) -> str:
    return "+".join(row.axes) if row.axes is not None else "?"


def comparison_table(first: Report, second: Report) -> Table:
    """Builds the table of two reports and their difference."""
    table = Table(title="Comparison", title_justify="left", title_style="bold")
    table.add_column("")
    for report in (first, second):
        table.add_column(_title(report), justify="right")
    table.add_column("difference", justify="right")
    for measure in measures((first, second)):
        a, b = measure.of(first) or 0.0, measure.of(second) or 0.0
        # What the first program does not have has no ratio.
        change = "same" if a == b else f"{b / a - 1:+.1%}" if a else "new"
        table.add_row(measure.name, measure.show(a), measure.show(b), change)
    for name, of in (("contract", _holds), ("memory", _fits)):
        table.add_row(name, of(first), of(second), "")
    return table


def _title(report: Report) -> str:
    model, plan = report.config.model, report.step.plan
    shape = f"{model.num_layers} x {model.hidden_size} on {report.step.mesh}"
    return f"{shape}\nrecompute {plan.recompute}, {plan.microbatches} x {plan.microbatch_size}"


def _holds(report: Report) -> str:
    return "holds" if report.verdict.holds else "violated"


def _fits(report: Report) -> str:
    return {True: "fits", False: "does not fit", None: "capacity unknown"}[report.memory.fits]


# --- all meshes of a number of devices


@dataclass(frozen=True)
class Try:
    """One mesh of a sweep."""

    mesh: MeshShape
    report: Report | None
    why_not: str = ""


def sweep_configs(base: Config, devices: int) -> Iterator[tuple[MeshShape, Config | UserError]]:
    """Yields every (data, model) mesh of `devices` devices with its config, or with the error why it does not fit.

    A microbatch too large for a data parallel rank's batch is reduced to the largest that divides it.
    """
    for model in divisors(devices):
        mesh = MeshShape(data=devices // model, model=model)
        share, remainder = divmod(base.training.global_batch_size, mesh.degree(TENSOR_RULES.batch))
        largest = min(base.training.microbatch_size or share, share)
        micro = max((n for n in divisors(share) if n <= largest), default=None) if share else None
        run = config.replace(base, mesh=str(mesh), microbatch_size=None if remainder else micro)
        try:
            check_config(run, mesh)
        except UserError as e:
            yield mesh, e
        else:
            yield mesh, run


def sweep_table(tries: Sequence[Try]) -> Table:
    """Builds the table of memory, communication and time of every mesh."""
    table = Table(title="Meshes (data x model)", title_justify="left", title_style="bold")
    for name in ("mesh", "microbatches", "peak memory", "", "sent per step", "between servers"):
        table.add_column(name, justify="right")
    timed = any(t.report and t.report.time for t in tries)
    for name in ("predicted step", "exposed", "TFLOP/s per GPU", "MFU") if timed else ():
        table.add_column(name, justify="right")
    table.add_column("contract")
    best = min((t.report for t in tries if t.report), key=rank, default=None)
    for tried in tries:
        if tried.report is not None:
            table.add_row(*_sweep_row(tried.report, tried.report is best))
    return table


def rank(report: Report) -> tuple[bool, float]:
    """Returns the sort key of preference: fits first, then predicted time, or peak memory where no time is known."""
    return report.memory.fits is False, report.time.seconds if report.time else float(report.memory.peak)


def sweep_notes(tries: Sequence[Try]) -> list[str]:
    """Returns notes on the fastest mesh that fits, and on those that were not compiled."""
    best = min((t.report for t in tries if t.report), key=rank, default=None)
    notes = [f"* fastest that fits: {best.step.mesh}"] if best and best.time and best.memory.fits else []
    return notes + [f"{t.mesh} was not compiled: {t.why_not}" for t in tries if t.report is None]


def _sweep_row(report: Report, is_best: bool) -> list[str]:
    plan, t = report.step.plan, report.time
    crossing = sum(r.wire_bytes * r.count for r in report.rows if r.servers > 1)
    cells = [
        str(report.step.mesh),
        f"{plan.microbatches} of {plan.microbatch_size}",
        size(report.memory.peak),
        {True: "fits", False: "[red]does not fit[/]", None: ""}[report.memory.fits],
        size(sent_bytes(report)),
        size(crossing),
    ]
    if t:
        star = " *" if is_best and report.memory.fits else ""
        cells += [duration(t.seconds) + star, f"{t.exposed_share:.1%}", f"{t.tflops:.1f}", f"{t.mfu:.1%}"]
    return [*cells, _holds(report)]
