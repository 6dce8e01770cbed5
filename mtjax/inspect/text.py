"""Reports as text for the terminal."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from rich.console import Console, OverflowMethod
from rich.table import Table

from mtjax.analysis.accuracy import accuracy_on
from mtjax.analysis.contract import Contract
from mtjax.config import Config
from mtjax.config.sizes import describe_recompute, padded_vocab_size
from mtjax.inspect.causes import LABELS, STACKS, by_cause
from mtjax.inspect.check import ContractLine, Verdict
from mtjax.inspect.hlo import Array
from mtjax.inspect.kernels.show import KERNEL_HEADS, guessed_text, kernel_notes, kernel_rows
from mtjax.inspect.kinds import kinds_text
from mtjax.inspect.predict import TimeReport
from mtjax.inspect.report import CollectiveRow, Report
from mtjax.inspect.stages import BACK, ONWARD, Permutes, StagesReport
from mtjax.inspect.units import duration, size
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.plan import timeline
from mtjax.plan.units import gib, si
from mtjax.runtime.xla_options import Chosen


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
    if report.unread:
        console.print(f"  {escape(report.unread)}", highlight=False, soft_wrap=True)
    if report.time and report.time.kernels:
        table = new_table("Kernels, by their machine code", KERNEL_HEADS, overflow="fold")
        for cells in kernel_rows(report.time.kernels):
            table.add_row(*map(escape, cells))
        console.print(table)
        for note in kernel_notes(report.time.kernels):
            console.print(f"  {escape(note)}", highlight=False, soft_wrap=True)


def heading(report: Report) -> str:
    """Returns the heading: model, mesh, target, XLA options, and compile time."""
    step, plan, model = report.step, report.step.plan, report.config.model
    return (
        f"{model.num_layers} layers x {model.hidden_size}, {model.num_heads} heads, "
        f"sequence {model.sequence_length}, vocabulary {padded_vocab_size(model):,}; "
        f"{describe_types(step.config)}, {describe_recompute(step.config.training)}\n"
        f"mesh {step.mesh.description}, "
        f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} of {plan.microbatch_size} "
        f"samples per data parallel rank; target {step.target.name}\n"
        f"{xla_options_line(step.program.xla)}"
        f"traced in {step.trace_seconds:.1f} s, compiled in {step.compile_seconds:.1f} s, "
        f"analyzed in {report.analysis_seconds:.1f} s"
    )


def describe_types(config: Config) -> str:
    """Returns the compute dtype, and the dtype of gradient reductions where it is not float32."""
    dtype = config.parallel.grad_reduce_dtype
    return config.training.compute_dtype + (f", gradients reduced in {dtype}" if dtype != "float32" else "")


def xla_options_line(chosen: Chosen) -> str:
    """Returns a line with the XLA options that differ from its defaults; empty if there are none."""
    options = ", ".join(f"{name}={str(value).lower()}" for name, value in chosen.options.items())
    unknown = f"; unknown to this XLA: {', '.join(chosen.refused)}" if chosen.refused else ""
    return f"XLA options: {options or 'none'}{unknown}\n" if options or unknown else ""


def collectives_table(rows: Iterable[CollectiveRow]) -> Table:
    """Builds the table of all collectives of a step."""
    table = Table(title="Collectives of a step", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("operation")
    table.add_column("over")
    table.add_column("count", justify="right")
    table.add_column("shape", overflow="fold")
    table.add_column("bytes each", justify="right")
    table.add_column("sent per step", justify="right")
    table.add_column("spans")
    table.add_column("overlapped", justify="right")
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
        """The contract."""
        ...

    @property
    def verdict(self) -> Verdict:
        """The result of the check."""
        ...


def contract_table(report: Checked) -> Table:
    """Builds the table of expected and compiled collectives."""
    table = Table(title=f"Contract: {report.contract.name}", title_justify="left", title_style="bold")
    table.add_column("phase")
    table.add_column("expected", overflow="fold")
    table.add_column("elements each", justify="right")
    table.add_column("compiled", justify="right")
    table.add_column("")
    for line in report.verdict.lines:
        expected = line.required.line
        what = f"{line.required.count} {expected.kind} over {expected.axis} ({expected.count})"
        elements = f"{line.required.elements:,} ({expected.elements})"
        table.add_row(expected.phase, what, elements, _compiled(line), _mark(line))
    return table


def contract_notes(report: Checked) -> list[str]:
    """Returns the verdict, its violations, and the tolerated collectives."""
    verdict = "[green]the contract holds[/]" if report.verdict.holds else "[red]the contract is violated[/]"
    violations = [f"[red]x[/] {escape(v)}" for v in report.verdict.violations]
    return [verdict, *violations, *(f"tolerated: {escape(t)}" for t in report.verdict.tolerated)]


def _compiled(line: ContractLine) -> str:
    if line.required.line.pooled:
        return f"{line.found_elements:,} in {line.found}"
    return str(line.found)


def _mark(line: ContractLine) -> str:
    notes = "; ".join(escape(n) for n in line.notes)
    return {"holds": f"ok {notes}", "missing": "[red]missing[/]", "differs": "[red]differs[/]"}[line.status].strip()


def show_stages(report: StagesReport, console: Console) -> None:
    """Prints the timetable and its bubble, the stage-boundary permutes, and the memory of stages."""
    table = report.table
    chunks = f", {table.chunks} chunks of layers per stage" if table.chunks > 1 else ""
    console.print(f"[bold]Pipeline[/]  {report.schedule}, {table.stages} stages{chunks}", highlight=False)
    for line in timeline.lines(table, console.width - 2):
        console.print("  ", line, sep="", highlight=False, no_wrap=True)
    console.print(f"  {timeline.legend(table)}\n  {bubble_text(report)}", highlight=False)
    console.print(permutes_table(report))
    console.print(stages_table(report))


def bubble_text(report: StagesReport) -> str:
    """Returns the bubble of the timetable and by formula."""
    table = report.table
    return (
        f"bubble {table.bubble:.1%} of the work: {table.forward_ticks} forward and {table.backward_ticks} backward "
        f"ticks, {table.microbatches * table.chunks} of each with work on a stage; "
        f"(p-1)/(m v) = {table.stages - 1}/{table.microbatches * table.chunks} = {report.bubble_formula:.1%}"
    )


PERMUTE_HEADS: dict[str, str] = {
    "permutes of": "left",
    "to stage": "left",
    "count": "right",
    "per tick": "right",
    "shape": "left",
    "bytes each": "right",
    "sent per step": "right",
    "overlapped": "right",
    "overlapped with matmuls of": "left",
}
STAGE_HEADS: dict[str, str] = dict.fromkeys(
    ("stage", "layers", "slots used", "states", "activations", "logits", "total"), "right"
)
"""Column head -> alignment."""


def permutes_table(report: StagesReport) -> Table:
    """Builds the table of stage-boundary permutes."""
    table = new_table("Stage boundaries", PERMUTE_HEADS)
    for permutes in report.permutes:
        table.add_row(*permutes_row(permutes, report))
    return table


def permutes_row(permutes: Permutes, report: StagesReport) -> list[str]:
    """Returns the cells of a row of permutes; only ticks with a half that sends them are counted."""
    halves = {ONWARD: report.table.forward_ticks, BACK: report.table.backward_ticks}
    ticks = halves.get(permutes.carries, sum(halves.values()))
    return [
        permutes.carries,
        {ONWARD: "next", BACK: "previous"}.get(permutes.carries, "both"),
        f"{permutes.count:,}",
        f"{permutes.count / ticks:.3g}",
        shapes_text(permutes.arrays),
        size(permutes.payload_bytes),
        size(permutes.payload_bytes * permutes.count),
        f"{permutes.hidden} of {permutes.count}",
        ", ".join(f"{phase} {count}" for phase, count in permutes.behind.items()) or "-",
    ]


def stages_table(report: StagesReport) -> Table:
    """Builds the table of stages; a slot has a chunk's saved activations of a microbatch, all stages have as many."""
    table = new_table("Memory of each stage, by formula", STAGE_HEADS)
    for number in timeline.abridged(range(len(report.stages)), timeline.MOST_STAGES):
        cells = [timeline.LEFT_OUT] * len(STAGE_HEADS) if number is None else stage_row(report, number)
        table.add_row(*cells)
    return table


def new_table(title: str, heads: Mapping[str, str], overflow: OverflowMethod = "ellipsis") -> Table:
    """Builds a table without rows from its column heads and their alignment."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for head, alignment in heads.items():
        table.add_column(head, justify="right" if alignment == "right" else "left", overflow=overflow)
    return table


def stage_row(report: StagesReport, number: int) -> list[str]:
    """Returns the cells of a stage's row."""
    stage = report.stages[number]
    memory = stage.memory
    return [
        str(number),
        str(stage.layers),
        f"{stage.in_flight} of {report.table.slots}",
        *(size(n) for n in (memory.states, memory.kept + memory.working, memory.logits, memory.total)),
    ]


def memory_lines(report: Report) -> str:
    """Returns the lines on memory per device."""
    m, f = report.memory, report.memory.formula
    verdict = ""
    if m.capacity is not None and m.usable is not None:
        fits = "[green]fits[/]" if m.fits else "[red]does not fit[/]"
        # In GiB, too: mtjax plan has its memory in these.
        needed = m.peak + m.beside
        verdict = (
            f"  {fits}: {size(needed)} ({gib(needed)}) of {size(m.usable)} ({gib(m.usable)}), {USABLE_MEMORY:.0%} of "
            f"the device's {size(m.capacity)}"
        )
    return (
        f"[bold]Memory per device[/]{verdict}\n"
        f"  compiled: arguments {size(m.arguments)}, outputs {size(m.outputs)} ({size(m.aliased)} aliased to "
        f"arguments), temporaries {size(m.temporaries)}, peak {size(m.peak)}\n"
        f"  of which: parameters {size(m.parameters)}, optimizer {size(m.optimizer)}, "
        f"gradients {size(m.gradients)} (by count), activations and workspace {size(m.activations)} (remaining)\n"
        f"  formula:  parameters {size(f.weights)}, optimizer {size(f.optimizer)}, gradients {size(f.gradients)}, "
        f"activations {size(f.kept + f.working)}, logits {size(f.logits)}, "
        + (f"teacher {size(f.teacher)}, " if f.teacher else "")
        + f"peak {size(f.total)}"
        + (
            f"\n  in the host: {size(m.host)} of states; a step reads {size(m.host_reads)} (by formula "
            f"{size(m.host_reads_formula)}), writes {size(m.host_writes)} (by formula {size(m.host_formula)}) and "
            f"waits for {size(m.host_exposed)} of both (by formula {size(m.host_exposed_formula)})"
        )
        * bool(m.host)
        + (f"\n  outside the step: teacher's weights {size(m.beside)}, by formula" if m.beside else "")
    )


def time_lines(report: Report) -> str:
    """Returns the lines on FLOPs, and where the hardware is known on the predicted time."""
    flops = report.flops
    lines = [
        "[bold]FLOPs of a step[/]",
        f"  matmuls {si(flops.counted, 'FLOP')} compiled, {si(flops.formula, 'FLOP')} by formula "
        f"({flops.difference:+.2%})"
        # A formula of FLOPs is exact, so more in the program means that XLA computes some again.
        + (": XLA rematerializes some of them to save memory" if flops.difference > 0.01 else "")
        + (", with equal loads of all experts" if report.config.model.num_experts else ""),
    ]
    if (eight := report.float8) is not None:
        lines.append(
            f"  {eight.found:,} of {eight.expected:,} matmuls of layers in 8 bits: {eight.share:.1%} of the FLOPs"
        )
    t = report.time
    if t is None:
        return "\n".join(lines)
    # Less than a microsecond is rounding.
    exposed = ", ".join(f"{axes} {duration(s)}" for axes, s in t.exposed_by_axes.items() if s >= 1e-6)
    lines += [
        f"[bold]Predicted time[/] on {t.server.name} (a model, not a measurement)",
        f"  step {duration(t.seconds)}: matmuls {duration(t.products)}, memory-bound {duration(t.memory_bound)}, "
        f"exposed communication {duration(t.exposed)} = {t.exposed_share:.1%} ({exposed or 'none'}); "
        f"overlapped communication {duration(t.hidden)}, which slows computation down by {duration(t.contention)}"
        + (f"; copies from and to the host {duration(t.copying)}" if t.copying else ""),
        f"  between {duration(t.between[0])} and {duration(t.between[1])}: {accuracy_on(t.server).in_words}",
        f"  by the planner's formulas: {duration(t.by_plan)} ({t.by_plan / t.seconds - 1:+.0%}), "
        f"of it {duration(t.copies_by_plan)} for copies in layer loops; "
        "they include the model's kernels, but neither other copies of this program nor its schedule",
        *([f"  {guessed_text(report.step.guessed_matmuls)}"] if report.step.guessed_matmuls else []),
        f"  {t.tflops:.1f} model TFLOP/s per GPU, MFU {t.mfu:.1%}; "
        f"with recompute {t.hardware_tflops:.1f}, HFU {t.hfu:.1%}",
        *([f"  {kinds_text(t.kinds, t.seconds)}"] if t.kinds else []),
    ]
    return "\n".join(lines)


WORTH_UNROLLING = 0.03
"""Share of a step spent on stacks of layer loops above which `unrolling_line` is printed."""
CAUSE_HEADS: dict[str, str] = {"cause": "left", "time": "right", "of the step": "right", "in": "left"}


def causes_table(time: TimeReport) -> Table:
    """Builds the table of the memory-bound time by cause."""
    table = new_table(f"Memory-bound: {duration(time.memory_bound)}, by cause", CAUSE_HEADS)
    for cells in cause_rows(time):
        table.add_row(*cells)
    return table


def unrolling_line(report: Report) -> str:
    """Returns the hint that --unroll-layers would save time; empty if it saves little or can't be used."""
    plan = report.step.plan
    if report.time is None or plan.unrolled or not plan.gains_by_unrolling(report.step.config.model):
        return ""
    share = sum(by_cause(report.time.causes).get(STACKS, {}).values()) / report.time.seconds
    if share < WORTH_UNROLLING:
        return ""
    return f"  --unroll-layers avoids the stacks of the layer loop, {share:.0%} of the step (docs/notes/speed.md)\n"


def cause_rows(time: TimeReport) -> list[list[str]]:
    """Returns the cells of a row for each cause of at least a thousandth of the step, with its phases."""
    rows, least = [], 0.001 * time.seconds
    for cause, phases in by_cause(time.causes).items():
        seconds = sum(phases.values())
        where = sorted(((s, phase) for phase, s in phases.items() if s >= least), reverse=True)
        if seconds >= least:
            shown = ", ".join(f"{phase} {duration(s)}" for s, phase in where)
            rows.append([LABELS.get(cause, cause), duration(seconds), f"{seconds / time.seconds:.1%}", shown])
    return rows


def axes_text(axes: tuple[str, ...] | None) -> str:
    """Returns "model", "data+model", "none" for groups of one device, "?" for groups that match no set of axes."""
    return "?" if axes is None else "+".join(axes) or "none"


def show_note(note: str | None, console: Console) -> None:
    """Prints how a program was compiled, if not with the run's options."""
    if note:
        console.print(f"note    {note}", highlight=False)


def shapes_text(arrays: tuple[Array, ...]) -> str:
    """Returns the first two arrays, and how many more there are."""
    shown = ", ".join(str(a) for a in arrays[:2])
    return shown + (f" and {len(arrays) - 2} more" if len(arrays) > 2 else "")


def escape(text: str) -> str:
    """Returns a text in which rich sees no markup."""
    return text.replace("[", r"\[")
