"""A report for the terminal."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from rich.console import Console
from rich.table import Table

from mtjax.config import Config
from mtjax.config.sizes import describe_recompute, padded_vocab_size
from mtjax.inspect.causes import STACKS, by_cause
from mtjax.inspect.check import Line, Verdict
from mtjax.inspect.hlo import Array
from mtjax.inspect.measured import Measured, in_order
from mtjax.inspect.predict import TimeReport
from mtjax.inspect.report import Report, Row
from mtjax.inspect.stages import BACK, ONWARD, Permutes, StagesReport
from mtjax.plan import timeline
from mtjax.plan.units import si
from mtjax.theory.accuracy import accuracy_on
from mtjax.theory.contract import Contract
from mtjax.theory.divisibility import problems
from mtjax.train.xla_options import Chosen


def show(report: Report, console: Console) -> None:
    """Prints a report."""
    console.print(heading(report), highlight=False)
    console.print(collectives_table(report.rows))
    console.print(contract_table(report))
    for note in contract_notes(report):
        console.print(note, highlight=False, soft_wrap=True)
    if report.stages:
        show_stages(report.stages, console)
    console.print(memory_lines(report), highlight=False)
    console.print(time_lines(report), highlight=False)
    if report.time:
        console.print(causes_table(report.time))
        console.print(unrolling_line(report), highlight=False, end="")


def heading(report: Report) -> str:
    """What was compiled, for what, and how long that took."""
    step, plan, model = report.step, report.step.plan, report.config.model
    return (
        f"{model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, "
        f"sequence {model.sequence_length}, vocabulary {padded_vocab_size(model):,}; "
        f"{describe_types(step.config)}, {describe_recompute(step.config.training)}\n"
        f"mesh {step.mesh.description}, "
        f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} of {plan.microbatch_size} "
        f"samples on each data rank; target {step.target.name}\n"
        f"{asked_of_xla(step.program.xla)}"
        f"traced in {step.trace_seconds:.1f} s, compiled in {step.compile_seconds:.1f} s, "
        f"read in {report.analysis_seconds:.1f} s"
    )


def describe_types(config: Config) -> str:
    """The type in which a run computes, and that of gradients on the wire where it is not float32."""
    wire = config.parallel.grad_reduce_dtype
    return config.training.compute_dtype + (f", gradients sent in {wire}" if wire != "float32" else "")


def asked_of_xla(chosen: Chosen) -> str:
    """A line with the XLA options beyond its defaults; empty if there are none."""
    asked = ", ".join(f"{name}={str(value).lower()}" for name, value in chosen.options.items())
    unknown = f"; it does not know {', '.join(chosen.refused)}" if chosen.refused else ""
    return f"asked of XLA: {asked or 'nothing'}{unknown}\n" if asked or unknown else ""


def collectives_table(rows: Iterable[Row]) -> Table:
    """Every collective of a step."""
    table = Table(title="Collectives of a step", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("operation")
    table.add_column("over")
    table.add_column("count", justify="right")
    table.add_column("shape", overflow="fold")
    table.add_column("bytes each", justify="right")
    table.add_column("sent a step", justify="right")
    table.add_column("crosses")
    table.add_column("behind compute", justify="right")
    for row in rows:
        table.add_row(
            row.phase,
            row.kind + ("" if row.is_known else " (?)"),
            axes_text(row.axes),
            str(row.count),
            shapes_text(row.arrays),
            size(row.payload_bytes),
            size(row.wire_bytes * row.count),
            f"{row.servers} servers" if row.servers > 1 else "-",
            f"{row.hidden} of {row.count}" if row.is_async else "no",
        )
    return table


class Checked(Protocol):
    """A report on any compiled program."""

    @property
    def contract(self) -> Contract:
        """What it should send."""
        ...

    @property
    def verdict(self) -> Verdict:
        """Whether it does."""
        ...


def contract_table(report: Checked) -> Table:
    """Expected against compiled."""
    table = Table(title=f"Contract: {report.contract.name}", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("expected", overflow="fold")
    table.add_column("elements each", justify="right")
    table.add_column("compiled", justify="right")
    table.add_column("")
    for line in report.verdict.lines:
        asked = line.required.line
        what = f"{line.required.count} {asked.kind} over {asked.axis} ({asked.count})"
        table.add_row(asked.phase, what, f"{line.required.elements:,} ({asked.elements})", _compiled(line), _mark(line))
    return table


def contract_notes(report: Checked) -> list[str]:
    """The verdict, every difference explained, and what else is sent."""
    holds = "[green]the contract holds[/]" if report.verdict.holds else "[red]the contract is broken[/]"
    breaches = [f"[red]x[/] {_escape(v)}" for v in report.verdict.violations]
    return [holds, *breaches, *(f"also sent: {_escape(t)}" for t in report.verdict.tolerated)]


def _compiled(line: Line) -> str:
    if line.required.line.pooled:
        return f"{line.found_elements:,} in {line.found}"
    return str(line.found)


def _mark(line: Line) -> str:
    notes = "; ".join(_escape(n) for n in line.notes)
    return {"holds": f"ok {notes}", "missing": "[red]missing[/]", "differs": "[red]differs[/]"}[line.status].strip()


def show_stages(report: StagesReport, console: Console) -> None:
    """Prints the timetable, what it costs, and what stages send and hold."""
    table = report.table
    chunks = f", {table.chunks} chunks of layers on each" if table.chunks > 1 else ""
    console.print(f"[bold]Stages[/]  {report.schedule}, {table.stages} stages{chunks}", highlight=False)
    for line in timeline.lines(table, console.width - 2):
        console.print("  ", line, sep="", highlight=False, no_wrap=True)
    console.print(f"  {timeline.legend(table)}\n  {bubble_text(report)}", highlight=False)
    console.print(permutes_table(report))
    console.print(stages_table(report))


def bubble_text(report: StagesReport) -> str:
    """What idle halves cost, by the table and by the formula."""
    table = report.table
    return (
        f"bubble {table.bubble:.1%} of the work, counted: {table.forward_ticks} forward and {table.backward_ticks} "
        f"backward halves for {table.microbatches * table.chunks} of each with work; "
        f"(p-1)/(m v) = {table.stages - 1}/{table.microbatches * table.chunks} = {report.bubble_formula:.1%}"
    )


PERMUTE_HEADS: dict[str, str] = {
    "permutes of": "left",
    "to the stage": "left",
    "count": "right",
    "a tick": "right",
    "shape": "left",
    "bytes each": "right",
    "sent a step": "right",
    "behind products": "right",
    "behind": "left",
}
STAGE_HEADS: dict[str, str] = dict.fromkeys(
    ("stage", "layers", "slots used", "states", "activations", "logits", "together"), "right"
)
"""Heads of tables, and on which side their columns stand."""


def permutes_table(report: StagesReport) -> Table:
    """What stages send each other."""
    table = _table("Between stages", PERMUTE_HEADS)
    for permutes in report.permutes:
        table.add_row(*permutes_row(permutes, report))
    return table


def permutes_row(permutes: Permutes, report: StagesReport) -> list[str]:
    """Cells of a line of permutes; a tick is one with a half from which they leave."""
    halves = {ONWARD: report.table.forward_ticks, BACK: report.table.backward_ticks}
    ticks = halves.get(permutes.carries, sum(halves.values()))
    return [
        permutes.carries,
        {ONWARD: "after", BACK: "before"}.get(permutes.carries, "other"),
        f"{permutes.count:,}",
        f"{permutes.count / ticks:.3g}",
        shapes_text(permutes.arrays),
        size(permutes.payload_bytes),
        size(permutes.payload_bytes * permutes.count),
        f"{permutes.hidden} of {permutes.count}",
        ", ".join(f"{phase} {count}" for phase, count in permutes.behind.items()) or "-",
    ]


def stages_table(report: StagesReport) -> Table:
    """What stages hold; a slot is what a chunk keeps of a microbatch, and all stages have as many."""
    table = _table("On each stage, by formula", STAGE_HEADS)
    for number in timeline.abridged(range(len(report.stages)), timeline.MOST_STAGES):
        cells = [timeline.LEFT_OUT] * len(STAGE_HEADS) if number is None else stage_row(report, number)
        table.add_row(*cells)
    return table


def _table(title: str, heads: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for head, side in heads.items():
        table.add_column(head, justify="right" if side == "right" else "left")
    return table


def stage_row(report: StagesReport, number: int) -> list[str]:
    """Cells of a stage."""
    stage = report.stages[number]
    memory = stage.memory
    return [
        str(number),
        str(stage.layers),
        f"{stage.in_flight} of {report.table.slots}",
        *(size(n) for n in (memory.states, memory.kept + memory.working, memory.logits, memory.total)),
    ]


def memory_lines(report: Report) -> str:
    """Bytes per device."""
    m, f = report.memory, report.memory.formula
    verdict = ""
    if m.capacity is not None:
        word = "[green]fits[/]" if m.fits else "[red]does not fit[/]"
        verdict = f"  {word}: {size(m.peak + m.beside)} of {size(m.capacity)}"
    return (
        f"[bold]Memory of a device[/]{verdict}\n"
        f"  compiled: arguments {size(m.arguments)}, outputs {size(m.outputs)} ({size(m.aliased)} of them in place of "
        f"arguments), temporaries {size(m.temporaries)}, peak {size(m.peak)}\n"
        f"  of which: parameters {size(m.parameters)}, optimizer {size(m.optimizer)}, "
        f"gradients {size(m.gradients)} (counted), activations and workspace {size(m.activations)} (the rest)\n"
        f"  formula:  parameters {size(f.weights)}, optimizer {size(f.optimizer)}, gradients {size(f.gradients)}, "
        f"activations {size(f.kept + f.working)}, logits {size(f.logits)}, "
        + (f"of a teacher {size(f.teacher)}, " if f.teacher else "")
        + f"together {size(f.total)}"
        + (f"\n  beside it: {size(m.beside)} of a teacher's weights, by formula" if m.beside else "")
    )


def time_lines(report: Report) -> str:
    """FLOPs, and where the hardware is known the predicted time."""
    flops = report.flops
    lines = [
        "[bold]Work of a step[/]",
        f"  products {si(flops.counted, 'FLOP')} compiled, {si(flops.formula, 'FLOP')} by formula "
        f"({flops.difference:+.2%})"
        + (": XLA computes some of them again to save memory" if flops.difference > 0.01 else "")
        + (", with equal loads of all experts" if report.config.model.num_experts else ""),
    ]
    t = report.time
    if t is None:
        return "\n".join(lines)
    waits = ", ".join(f"{axes} {duration(s)}" for axes, s in t.exposed_by_axes.items() if s >= 1e-6)
    lines += [
        f"[bold]Predicted time[/] on {t.server.name} (a model, not a measurement)",
        f"  step {duration(t.seconds)}: products {duration(t.products)}, memory-bound {duration(t.memory_bound)}, "
        f"waiting for collectives {duration(t.exposed)} = {t.exposed_share:.1%} ({waits or 'none'}); "
        f"collectives behind compute {duration(t.hidden)}, which slow it down by {duration(t.contention)}",
        f"  between {duration(t.between[0])} and {duration(t.between[1])}: {accuracy_on(t.server).in_words}",
        f"  the planner's formulas: {duration(t.by_plan)} ({t.by_plan / t.seconds - 1:+.0%}), "
        f"{duration(t.copies_by_plan)} of them what loops over layers copy; "
        "they know the kernels of the model, and not what else this program copies, nor its order",
        f"  {t.tflops:.1f} TFLOP/s of the model per GPU, MFU {t.mfu:.1%}; "
        f"with recompute {t.hardware_tflops:.1f}, HFU {t.hfu:.1%}",
    ]
    return "\n".join(lines)


WORTH_UNROLLING = 0.03
"""Share of a step that stacks take, from which on `unrolling_line` speaks."""
CAUSE_HEADS: dict[str, str] = {"cause": "left", "time": "right", "of the step": "right", "in": "left"}


def causes_table(time: TimeReport) -> Table:
    """Where the memory-bound time goes."""
    table = _table(f"Memory-bound: {duration(time.memory_bound)}, by cause", CAUSE_HEADS)
    for cells in cause_rows(time):
        table.add_row(*cells)
    return table


def unrolling_line(report: Report) -> str:
    """Whether layers without a loop would save a good part of this step; empty where not, or where they can't."""
    plan = report.step.plan
    if report.time is None or plan.unrolled or any(problems(report.step.config.model, replace(plan, unrolled=True))):
        return ""
    share = sum(by_cause(report.time.causes).get(STACKS, {}).values()) / report.time.seconds
    if share < WORTH_UNROLLING:
        return ""
    stacks = f"{share:.0%} of the step are its stacks"
    return f"  --unroll-layers compiles layers without a loop: {stacks} (docs/notes/speed.md)\n"


def cause_rows(time: TimeReport, least: float = 0.001) -> list[list[str]]:
    """Cells of a row for every cause that takes at least this share of the step, and the phases in which it does."""
    rows = []
    for cause, phases in by_cause(time.causes).items():
        seconds = sum(phases.values())
        where = sorted(((s, phase) for phase, s in phases.items() if s >= least * time.seconds), reverse=True)
        if seconds >= least * time.seconds:
            shown = ", ".join(f"{phase} {duration(s)}" for s, phase in where)
            rows.append([cause, duration(seconds), f"{seconds / time.seconds:.1%}", shown])
    return rows


SENT_HEADS: dict[str, str] = {
    **dict.fromkeys(("phase", "operation", "over"), "left"),
    **dict.fromkeys(("count", "measured", "predicted"), "right"),
}


def show_measured(measured: Measured, console: Console) -> None:
    """Prints what a trace says of a step, beside what was predicted."""
    console.print(
        f"[bold]Measured time[/] in {_escape(str(measured.trace))}: {measured.steps} steps on {measured.devices} "
        f"devices, {duration(measured.seconds)} a step; collectives with their wait for the others",
        highlight=False,
        soft_wrap=True,
    )
    phases = _table("By phase", {"phase": "left", **dict.fromkeys(("computing", "sending", "predicted"), "right")})
    for phase, spent in in_order(measured):
        phases.add_row(phase, duration(spent.computing), duration(spent.sending), _or_unknown(spent.predicted))
    console.print(phases)
    causes = _table("By cause", {"cause": "left", **dict.fromkeys(("measured", "predicted"), "right")})
    for cause, each in measured.causes.items():
        causes.add_row(cause, duration(each.measured), _or_unknown(each.predicted))
    console.print(causes)
    sent = _table("By collective", SENT_HEADS)
    for (phase, kind, axes), each in measured.collectives.items():
        cells = (str(each.count), duration(each.measured), _or_unknown(each.predicted))
        sent.add_row(phase, kind, axes_text(axes), *cells)
    console.print(sent)


def _or_unknown(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def axes_text(axes: tuple[str, ...] | None) -> str:
    """ "model", "data+model", "nobody" for lone devices, "?" for groups that do not match any set of axes."""
    if axes is None:
        return "?"
    return "+".join(axes) or "nobody"


def show_note(note: str | None, console: Console) -> None:
    """Prints how a program was compiled, where that was not with the run's own options."""
    if note:
        console.print(f"note    {note}", highlight=False)


def shapes_text(arrays: tuple[Array, ...], most: int = 2) -> str:
    """The first arrays, and how many more."""
    shown = ", ".join(str(a) for a in arrays[:most])
    return shown + (f" and {len(arrays) - most} more" if len(arrays) > most else "")


def size(number: float) -> str:
    """Bytes in decimal units: 1.5 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= 0.9995 * scale:
            return f"{_three_digits(number / scale)} {unit}"
    return f"{number:.0f} B"


def duration(seconds: float) -> str:
    """Seconds in a unit that fits: 1.5 ms."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def _three_digits(number: float) -> str:
    return f"{number:,.0f}" if number >= 999.5 else f"{number:.3g}"


def _escape(text: str) -> str:
    return text.replace("[", r"\[")
