"""Bar charts and timelines as SVG text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from mtjax.analysis.contract import PHASES
from mtjax.inspect.roofline import Event
from mtjax.inspect.text import duration
from mtjax.layout.timetable import Timetable
from mtjax.plan.timeline import LEFT_OUT, MOST_STAGES, Column, abridged, columns, describe

WIDTH = 1060
LABELS = 150
VALUES = 90
ROW = 26
MOST_COLUMNS = 240
"""Most columns of a timetable; of longer ones the middle is omitted."""
FORWARD_TONE, BACKWARD_TONE, IDLE_TONE = 0, 4, 10


@dataclass(frozen=True)
class Segment:
    """A segment of a stacked bar."""

    name: str
    value: float


@dataclass(frozen=True)
class Bar:
    """A stacked bar."""

    label: str
    parts: Sequence[Segment]

    @property
    def total(self) -> float:
        """Length of the bar."""
        return sum(part.value for part in self.parts)


def bars(
    rows: Sequence[Bar],
    show: Callable[[float], str],
    *,
    legend: Sequence[str],
    tones: Sequence[str],
    mark: float | None = None,
    mark_label: str = "",
) -> str:
    """Draws horizontal stacked bars on one scale.

    Args:
      rows: from top to bottom.
      show: formats a value.
      legend: names in the legend.
      tones: all names of segments; the index of a name is its colour.
      mark: a value at which a line is drawn, or None.
      mark_label: label of the line.
    """
    room = WIDTH - LABELS - VALUES
    scale = room / (max([bar.total for bar in rows] + [mark or 0.0]) or 1.0)
    shapes: list[str] = []
    for i, bar in enumerate(rows):
        y, x = ROW * i, float(LABELS)
        shapes.append(f'<text x="{LABELS - 8}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>')
        for part in bar.parts:
            width = part.value * scale
            shapes.append(_box(x, y, width, ROW - 6, tones.index(part.name), f"{part.name}: {show(part.value)}"))
            x += width
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}" class="soft">{show(bar.total)}</text>')
    if mark:
        x, bottom = LABELS + mark * scale, ROW * len(rows)
        shapes.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        text = f"{mark_label} {show(mark)}"
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="end" class="soft">{escape(text)}</text>')
    return _legend(legend, tones) + _svg(shapes, ROW * len(rows) + (20 if mark else 0))


def timeline(events: Sequence[Event]) -> str:
    """Draws a timeline with two lanes, computation and communication; grey where computation waits."""
    end = max((event.end for event in events), default=0.0) or 1.0
    scale = (WIDTH - LABELS - 20) / end
    lanes = {"compute": 0, "wait": 0, "send": ROW}
    names = {"compute": "compute", "send": "communicate"}
    used = [p for p in PHASES if any(e.phase == p for e in events)]
    legend = _legend([*used, "waiting"], (*PHASES, "waiting"))
    shapes: list[str] = []
    for stream, name in names.items():
        shapes.append(f'<text x="{LABELS - 8}" y="{lanes[stream] + 15}" text-anchor="end">{name}</text>')
    for event in events:
        tone = len(PHASES) if event.stream == "wait" else PHASES.index(event.phase)
        title = f"{event.label} {event.name}, {event.phase}: {duration(event.end - event.start)}"
        x, width = LABELS + event.start * scale, max((event.end - event.start) * scale - 0.5, 0.6)
        shapes.append(_box(x, lanes[event.stream], width, ROW - 4, tone, title))
    base = ROW * 2 + 2
    shapes.append(f'<line class="axis" x1="{LABELS}" x2="{LABELS + end * scale:.1f}" y1="{base}" y2="{base}"/>')
    for i in range(6):
        x = LABELS + i / 5 * end * scale
        anchor = ("start", *["middle"] * 4, "end")[i]
        label = duration(end * i / 5) if i else "0"
        shapes.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="{anchor}" class="soft">{label}</text>')
    return legend + _svg(shapes, base + 22)


def timetable(table: Timetable) -> str:
    """Draws a pipeline timetable: a lane for each stage, a cell for each half tick, paler for later chunks."""
    shown = abridged(columns(table), MOST_COLUMNS)
    lanes = abridged(range(table.stages), MOST_STAGES)
    width = (WIDTH - LABELS - 20) / len(shown)
    shapes: list[str] = []
    for row, stage in enumerate(lanes):
        y = ROW * row
        name = LEFT_OUT if stage is None else f"stage {stage}"
        shapes.append(f'<text x="{LABELS - 8}" y="{y + 15}" text-anchor="end">{name}</text>')
        for i, column in enumerate(shown):
            if stage is not None and column is not None:
                shapes += _half(LABELS + i * width, y, width, column, stage, table)
    if None in shown:
        x = LABELS + (shown.index(None) + 0.5) * width
        shapes.append(f'<text x="{x:.1f}" y="{ROW * len(lanes) + 12}" text-anchor="middle">{LEFT_OUT}</text>')
    names = ["forward", "backward", "idle"]
    swatches = (f'<i class="{_tone(tone)}"></i>' for tone in (FORWARD_TONE, BACKWARD_TONE, IDLE_TONE))
    legend = "".join(f"<span>{swatch}{name}</span>" for swatch, name in zip(swatches, names, strict=True))
    return f'<div class="legend">{legend}</div>' + _svg(shapes, ROW * len(lanes) + 16)


def _half(x: float, y: float, width: float, column: Column, stage: int, table: Timetable) -> list[str]:
    """Draws the cell of half a tick, with the number of the microbatch where it fits."""
    work, half = column.half[stage], "backward" if column.is_backward else "forward"
    position = f"stage {stage}, tick {column.tick}, {half}"
    # A gap between cells, and never nothing: a timetable of hundreds of ticks has cells of a few pixels.
    cell = max(width - 0.8, 0.6)
    if work is None:
        return [_box(x, y, cell, ROW - 6, IDLE_TONE, f"{position}: idle")]
    fade = 1 - 0.6 * work.chunk / table.chunks
    chunk = f", chunk {work.chunk}" if table.chunks > 1 else ""
    title = f"{position}: microbatch {work.microbatch}{chunk}, slot {work.slot}"
    tone = BACKWARD_TONE if column.is_backward else FORWARD_TONE
    shapes = [_box(x, y, cell, ROW - 6, tone, title, fade)]
    text = describe(work, table.chunks)
    if width >= 7 * len(text) + 4:
        shapes.append(f'<text x="{x + cell / 2:.1f}" y="{y + 14}" text-anchor="middle">{text}</text>')
    return shapes


def _legend(names: Sequence[str], tones: Sequence[str]) -> str:
    """Returns the legend of colours as HTML that wraps."""
    swatches = (f'<i class="{_tone(tones.index(name))}"></i>{escape(name)}' for name in names)
    return '<div class="legend">' + "".join(f"<span>{s}</span>" for s in swatches) + "</div>"


def _box(x: float, y: float, width: float, height: float, tone: int, title: str, opacity: float = 1) -> str:
    attributes = f'x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{height}"'
    attributes += f' fill-opacity="{opacity:.2g}"' if opacity < 1 else ""
    return f"<rect {attributes} class='{_tone(tone)}'><title>{escape(title)}</title></rect>"


def _tone(index: int) -> str:
    """Returns the CSS class of a colour."""
    return f"t{index}" if index < 10 else "idle"


def _svg(shapes: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(shapes)}</svg>'
