"""Reports as one self-contained HTML page, without scripts or network access."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from mtjax.analysis.contract import PHASES
from mtjax.analysis.counts import parameters
from mtjax.config.sizes import describe_recompute, padded_vocab_size
from mtjax.inspect.chart import Bar, Segment, bars, timeline, timetable
from mtjax.inspect.decision import POOR_MFU, POOR_WAIT, Decision
from mtjax.inspect.decision import sections as decision_sections
from mtjax.inspect.kernels.audit import KernelReport
from mtjax.inspect.kernels.show import KERNEL_HEADS, kernel_notes, kernel_rows
from mtjax.inspect.predict import TimeReport
from mtjax.inspect.report import Report
from mtjax.inspect.stages import StagesReport
from mtjax.inspect.text import (
    CAUSE_HEADS,
    PERMUTE_HEADS,
    STAGE_HEADS,
    axes_text,
    bubble_text,
    cause_rows,
    describe_types,
    duration,
    permutes_row,
    shapes_text,
    size,
    stage_row,
)
from mtjax.layout.gpu_memory import USABLE_MEMORY

STYLE = """
:root { --ink: #1a1d21; --soft: #5c6670; --line: #d9dee3; --paper: #fff; --card: #f5f7f9; --good: #1a7f37;
  --bad: #c62828; --c0: #4269d0; --c1: #efb118; --c2: #ff725c; --c3: #6cc5b0; --c4: #3ca951; --c5: #ff8ab7;
  --c6: #a463f2; --c7: #97bbf5; --c8: #9c6b4e; --c9: #9498a0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4ae; --line: #363c43; --paper: #14171a;
  --card: #1e2226; --good: #57c773; --bad: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p, figcaption { color: var(--soft); margin: .25rem 0 .75rem } figure { margin: 0; overflow-x: auto }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1rem 0 }
.card { background: var(--card); border-radius: 8px; padding: .6rem 1rem; flex: 1 1 12rem }
.card b { display: block; font-size: 1.25rem } .card span { color: var(--soft); font-size: .85rem }
.good { color: var(--good) } .bad { color: var(--bad) }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; width: 100% }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--soft); font-weight: 600 } td.n, th.n { text-align: right; white-space: nowrap }
td.path { font: .75rem/1.4 ui-monospace, monospace; color: var(--soft); max-width: 26rem; overflow-wrap: anywhere }
svg { display: block; max-width: 100% } svg text { fill: var(--ink); font: 12px system-ui, sans-serif }
svg .soft { fill: var(--soft) } svg .axis { stroke: var(--line) } svg .mark { stroke: var(--bad); stroke-width: 2 }
.idle { --c: var(--line) } svg rect { fill: var(--c) } .legend i { background: var(--c) } ul { padding-left: 1.2rem }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: 0 0 .4rem 150px; font-size: .8rem;
  color: var(--soft) }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px }
.t0 { --c: var(--c0) } .t1 { --c: var(--c1) } .t2 { --c: var(--c2) } .t3 { --c: var(--c3) } .t4 { --c: var(--c4) }
.t5 { --c: var(--c5) } .t6 { --c: var(--c6) } .t7 { --c: var(--c7) } .t8 { --c: var(--c8) } .t9 { --c: var(--c9) }
"""


def page(report: Report, others: Sequence[Report] = (), decision: Decision | None = None) -> str:
    """Returns the HTML page of a report.

    Args:
      report: shown in detail.
      others: compared with it.
      decision: summary before the details, if any.
    """
    title = _title(report)
    sections = [_cards(report), *([decision_sections(decision)] if decision else []), _contract(report), _sent(report)]
    if report.stages:
        sections.append(_stages(report.stages))
    sections.append(_memory(report))
    if report.time:
        sections.append(_time(report.time))
        if report.time.kernels:
            sections.append(_kernels(report.time.kernels))
    if report.unread:
        sections.append(f"<p>{escape(report.unread)}</p>")
    sections.append(_collectives(report))
    if others:
        sections.append(_others([report, *others]))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>mtjax inspect: {escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>{_subtitle(report)}\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _title(report: Report) -> str:
    """Returns model, devices and parallel degrees: "GPT, 8.3B parameters, on 512 x H100 (DP 64 x TP 8)"."""
    count, mesh = parameters(report.step.anatomy), report.step.plan.mesh
    scaled = f"{count / 1e9:,.1f}B" if count >= 1e9 else f"{count / 1e6:,.1f}M"
    family = report.config.model.family
    name = {"gpt": "GPT", "bert": "BERT", "t5": "T5", "llama": "Llama"}.get(family, family)
    device = report.time.server.gpu.name.upper() if report.time else report.target.name
    return f"{name}, {scaled} parameters, on {mesh.size} x {device} ({mesh.abbreviated})"


def _subtitle(report: Report) -> str:
    step, plan, model = report.step, report.step.plan, report.config.model
    noun = "microbatches" if plan.microbatches > 1 else "microbatch"
    text = (
        f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_heads} heads, "
        f"sequence {model.sequence_length}, vocabulary {padded_vocab_size(model):,}, "
        f"{describe_types(step.config)}, {describe_recompute(step.config.training)}; "
        f"{plan.microbatches} {noun} of {plan.microbatch_size} samples per data parallel rank of mesh {step.mesh}. "
        f"Compiled in {step.compile_seconds:.1f} s."
    )
    return f"<p>{escape(text)}</p>"


def _cards(report: Report) -> str:
    verdict, memory, t = report.verdict, report.memory, report.time
    good = sum(line.status == "holds" for line in verdict.lines)
    result = f"{'PASS' if verdict.holds else 'FAIL'} ({good}/{len(verdict.lines)})"
    cards = [
        f'<b class="{"good" if verdict.holds else "bad"}">{result}</b><span>communication check, contract '
        f'"{escape(report.contract.name)}"</span>'
    ]
    of = f" of {size(memory.usable)}" if memory.usable else ""
    colour = {True: "good", False: "bad", None: ""}[memory.fits]
    share = f", of {USABLE_MEMORY:.0%} of its {size(memory.capacity)}" if memory.capacity else ""
    cards.append(f'<b class="{colour}">{size(memory.peak)}{of}</b><span>peak memory per device{share}</span>')
    sent = sum(r.wire_bytes * r.count for r in report.rows)
    cards.append(f"<b>{size(sent)}</b><span>sent per device and step</span>")
    if t:
        least, most = (duration(seconds) for seconds in t.between)
        cards.append(
            f"<b>{duration(t.seconds)}</b><span>predicted step time on {escape(t.server.name)}; {least} to {most} by "
            "the errors on published runs</span>"
        )
        poor = ' class="bad"' if t.mfu < POOR_MFU else ""
        cards.append(f"<b{poor}>{t.tflops:.0f} TFLOP/s</b><span>per GPU, MFU {t.mfu:.1%}</span>")
        poor = ' class="bad"' if t.exposed_share > POOR_WAIT else ""
        cards.append(f"<b{poor}>{t.exposed_share:.1%}</b><span>of the step is exposed communication</span>")
    return '<div class="cards">' + "".join(f'<div class="card">{c}</div>' for c in cards) + "</div>"


def _contract(report: Report) -> str:
    rows = []
    for line in report.verdict.lines:
        expected, good = line.required.line, line.status == "holds"
        compiled = f"{line.found_elements:,} in {line.found}" if expected.pooled else f"{line.found:,}"
        mark = f'<span class="{"good" if good else "bad"}">{"ok" if good else line.status}</span>'
        rows.append(
            [
                escape(expected.phase),
                f"{escape(expected.kind)} over {escape(expected.axis)}",
                _equals(line.required.count, expected.count),
                _equals(line.required.elements, expected.elements),
                compiled,
                f"{mark} {escape('; '.join(line.notes))}",
            ]
        )
    heads = ["phase", "operation", "arrays", "elements each", "compiled", ""]
    violations = "".join(f'<li class="bad">{escape(v)}</li>' for v in report.verdict.violations)
    tolerated = "".join(f"<li>tolerated: {escape(t)}</li>" for t in report.verdict.tolerated)
    return f"<h2>Contract: expected and compiled collectives</h2>{_table(heads, rows)}<ul>{violations}{tolerated}</ul>"


def _equals(value: int, formula: str) -> str:
    """Returns a number and its formula, unless that is the number itself."""
    return f"{value:,}" if formula == str(value) else f"{value:,} = {escape(formula)}"


def _sent(report: Report) -> str:
    sent: dict[str, dict[str, float]] = {}
    for row in report.rows:
        phases = sent.setdefault(axes_text(row.axes), {})
        phases[row.phase] = phases.get(row.phase, 0.0) + row.wire_bytes * row.count
    rows = [Bar(axes, _phase_parts(phases)) for axes, phases in sent.items()]
    return (
        "<h2>Bytes sent per device and step</h2><figure>"
        + bars(rows, size, legend=[p for p in PHASES if any(p in phases for phases in sent.values())], tones=PHASES)
        + "<figcaption>By mesh axis and phase, assuming ring algorithms.</figcaption></figure>"
    )


def _phase_parts(phases: Mapping[str, float]) -> list[Segment]:
    return [Segment(phase, phases[phase]) for phase in PHASES if phases.get(phase)]


def _stages(stages: StagesReport) -> str:
    sent = [[escape(cell) for cell in permutes_row(permutes, stages)] for permutes in stages.permutes]
    memory = [stage_row(stages, number) for number in range(len(stages.stages))]
    return (
        f"<h2>Pipeline: {escape(stages.schedule)}</h2><figure>{timetable(stages.table)}"
        f"<figcaption>{escape(bubble_text(stages))}.</figcaption></figure>"
        f"{_table([*PERMUTE_HEADS], sent, numbers=(2, 3, 5, 6, 7))}<p>Stage-boundary permutes.</p>"
        f"{_table([*STAGE_HEADS], memory, numbers=range(7))}<p>Memory of each stage, by formula.</p>"
    )


def _memory(report: Report) -> str:
    m, f = report.memory, report.memory.formula
    kinds = ("parameters", "optimizer", "gradients", "activations and workspace", "other arguments", "new outputs")
    compiled = (m.parameters, m.optimizer, m.gradients, m.activations, m.other_arguments, m.outputs - m.aliased)
    formula = (f.weights, f.optimizer, f.gradients, f.kept + f.working + f.logits, f.teacher, 0)
    rows = [
        Bar(name, [Segment(kind, value) for kind, value in zip(kinds, values, strict=True) if value > 0])
        for name, values in (("compiled", compiled), ("formula", formula))
    ]
    usable = f"{USABLE_MEMORY:.0%} of the memory"
    chart = bars(rows, size, legend=kinds[:4], tones=kinds, mark=m.usable, mark_label=usable)
    note = "Gradients are counted as one float32 copy; activations are the remaining temporaries of the compiler."
    return f"<h2>Memory per device</h2><figure>{chart}<figcaption>{note}</figcaption></figure>"


def _time(t: TimeReport) -> str:
    causes = ("matmuls", "memory-bound", "exposed communication")
    rows = []
    for phase in (p for p in PHASES if p in t.phases):
        spent = t.phases[phase]
        values = zip(causes, (spent.products, spent.memory_bound, spent.exposed), strict=True)
        rows.append(Bar(phase, [Segment(cause, value) for cause, value in values if value > 0]))
    chart = bars(rows, duration, legend=causes, tones=causes)
    layers = "".join(
        f"<h2>Timeline of a layer: {escape(name.removeprefix('layer '))}</h2><figure>{timeline(events)}</figure>"
        for name, events in t.layers.items()
    )
    note = f"Roofline simulation of the schedule on {escape(t.server.name)}: a prediction, not a measurement."
    causes = _table([*CAUSE_HEADS], ([escape(cell) for cell in row] for row in cause_rows(t)), numbers=(1, 2))
    return (
        f"<h2>Step time by phase</h2><figure>{chart}<figcaption>{note}</figcaption></figure>"
        f"<h2>Memory-bound: {duration(t.memory_bound)}, by cause</h2>{causes}{layers}"
    )


def _kernels(kernels: KernelReport) -> str:
    rows = [[escape(cell) for cell in cells] for cells in kernel_rows(kernels)]
    notes = "".join(f"<li>{escape(note)}</li>" for note in kernel_notes(kernels))
    table = _table([*KERNEL_HEADS], rows, numbers=range(2, 10), paths=(0, 10))
    return f"<h2>Kernels, by their machine code</h2>{table}<ul>{notes}</ul>"


def _collectives(report: Report) -> str:
    heads = [
        "phase",
        "operation",
        "over",
        "count",
        "shape",
        "bytes each",
        "sent per step",
        "spans",
        "overlapped",
        "source",
    ]
    rows = [
        [
            escape(r.phase),
            escape(r.kind),
            escape(axes_text(r.axes)),
            f"{r.count:,}",
            escape(shapes_text(r.arrays)),
            size(r.payload_bytes),
            size(r.wire_bytes * r.count),
            f"{r.servers} servers" if r.servers > 1 else "-",
            f"{r.hidden} of {r.count}" if r.is_async else "no",
            _source(r.op_name),
        ]
        for r in report.rows
    ]
    return f"<h2>Collectives of a step</h2>{_table(heads, rows, numbers=(3, 5, 6), paths=(9,))}"


def _source(op_name: str) -> str:
    """Returns the `op_name` of a collective, collapsed because names are up to a page long."""
    return f"<details><summary>show</summary>{escape(op_name)}</details>" if op_name else ""


def _others(reports: Sequence[Report]) -> str:
    heads = ["mesh", "microbatches", "peak memory", "sent per step", "predicted step", "MFU", "contract"]
    rows = [
        [
            escape(str(r.step.mesh)),
            f"{r.step.plan.microbatches} of {r.step.plan.microbatch_size}",
            size(r.memory.peak),
            size(sum(x.wire_bytes * x.count for x in r.rows)),
            duration(r.time.seconds) if r.time else "-",
            f"{r.time.mfu:.1%}" if r.time else "-",
            "PASS" if r.verdict.holds else '<span class="bad">FAIL</span>',
        ]
        for r in reports
    ]
    return f"<h2>Comparison</h2>{_table(heads, rows)}"


def _table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), paths: Sequence[int] = ()
) -> str:
    """Returns an HTML table of cells that are HTML already; `numbers` and `paths` are indices of columns."""

    def kind(column: int) -> str:
        return ' class="n"' if column in numbers else ' class="path"' if column in paths else ""

    head = "".join(f"<th{kind(i) if i in numbers else ''}>{h}</th>" for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(f"<td{kind(i)}>{c}</td>" for i, c in enumerate(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
