"""Measured times of a trace as text for the terminal."""

from rich.console import Console

from mtjax.inspect.causes import LABELS
from mtjax.inspect.measured import Measured, in_order
from mtjax.inspect.measured_kernels import MeasuredKernel
from mtjax.inspect.text import axes_text, escape, new_table
from mtjax.inspect.units import duration

_TIMES = dict.fromkeys(("measured", "predicted"), "right")
_SENT_HEADS = {**dict.fromkeys(("phase", "operation", "over"), "left"), "count": "right", **_TIMES}
_KERNEL_HEADS = {
    **dict.fromkeys(("phase", "cause", "operation", "source"), "left"),
    **dict.fromkeys(("launches", *_TIMES, "difference"), "right"),
}
KERNELS = 15
"""Most kernels that are shown: those whose prediction is off by most seconds."""
LEAST = 0.001
"""Least share of the step by which the prediction of a kernel that is shown is off."""


def show_measured(measured: Measured, console: Console) -> None:
    """Prints the measured times of a trace next to the predicted ones."""
    console.print(
        f"[bold]Measured time[/] in {escape(str(measured.trace))}: {measured.steps} steps on {measured.devices} "
        f"devices, {duration(measured.seconds)} per step; collectives include the wait for other ranks",
        highlight=False,
        soft_wrap=True,
    )
    phases = new_table(
        "By phase", {"phase": "left", **dict.fromkeys(("computation", "communication", "predicted"), "right")}
    )
    for phase, spent in in_order(measured):
        phases.add_row(phase, duration(spent.computing), duration(spent.sending), _or_unknown(spent.predicted))
    console.print(phases)
    causes = new_table("By cause", {"cause": "left", **_TIMES})
    for cause, each in measured.causes.items():
        causes.add_row(LABELS.get(cause, cause), duration(each.measured), _or_unknown(each.predicted))
    console.print(causes)
    sent = new_table("By collective", _SENT_HEADS)
    for (phase, kind, axes), each in measured.collectives.items():
        cells = (str(each.count), duration(each.measured), _or_unknown(each.predicted))
        sent.add_row(phase, kind, axes_text(axes), *cells)
    console.print(sent)
    if off := farthest_off(measured):
        kernels = new_table("Kernels, those farthest from their prediction first", _KERNEL_HEADS, overflow="fold")
        for kernel in off:
            kernels.add_row(*map(escape, kernel_cells(kernel)))
        console.print(kernels)


def farthest_off(measured: Measured) -> list[MeasuredKernel]:
    """Returns the kernels that are shown: none where the hardware, and so the prediction, is not known."""
    known = [k for k in measured.kernels if k.predicted is not None]
    return [k for k in known[:KERNELS] if abs(k.difference) >= LEAST * measured.seconds]


def kernel_cells(kernel: MeasuredKernel) -> list[str]:
    """Returns the cells of a kernel's row: times of all its launches in a step."""
    kind, sign = kernel.kind, "-" if kernel.difference < 0 else "+"
    return [
        kind.phase,
        LABELS.get(kind.cause, kind.cause),
        kind.path or kind.opcode,
        kind.source or "-",
        f"{kernel.launches:,.0f}",
        duration(kernel.measured),
        _or_unknown(kernel.predicted),
        sign + duration(abs(kernel.difference)),
    ]


def _or_unknown(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
