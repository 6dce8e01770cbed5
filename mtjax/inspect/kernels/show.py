"""The kernels of a step as rows of a table, notes, and JSON values."""

from importlib.metadata import version
from typing import Any

from mtjax.inspect.kernels.audit import SLOW, SWAPS, KernelReport, KernelRow
from mtjax.inspect.units import duration

KERNEL_HEADS: dict[str, str] = {
    "kernel": "left",
    "phase": "left",
    **dict.fromkeys(("launches", "time", "share", "by bytes", "by instructions", "registers", "warps"), "right"),
    "accesses": "right",
    "source": "left",
    "verdict": "left",
}
"""Column head -> alignment."""
SHOWN = 15
"""Kernels that are shown in addition to those with faults."""
LEAST = 0.001
"""Least share of the step of a kernel that is shown, and of a fault that is told."""


def kernel_rows(report: KernelReport) -> list[list[str]]:
    """Returns the cells of the kernels that take longest, and of all with a fault."""
    # Rows are ordered by time, so a fault in a short kernel would otherwise not be seen, and one below `LEAST` need not
    # be.
    shown = [row for i, row in enumerate(report.rows) if _counts(report, row) and (i < SHOWN or row.faults)]
    return [_cells(report, row) for row in shown]


def _counts(report: KernelReport, row: KernelRow) -> bool:
    return row.seconds >= LEAST * report.step


def _cells(report: KernelReport, row: KernelRow) -> list[str]:
    m = row.machine
    about = "" if m.is_exact else "~"
    instructions = "-" if row.by_products else f"{about}{duration(row.by_instructions)} {m.bound}"
    return [
        m.name,
        row.phase,
        f"{row.count:,}",
        duration(row.seconds),
        f"{row.seconds / report.step:.1%}",
        duration(max(row.by_bytes, row.by_products)),
        instructions,
        str(m.registers),
        f"{m.occupancy:.0%}",
        accesses(row),
        row.source or "-",
        ", ".join((*row.faults, *_notes(row))) or "ok",
    ]


def accesses(row: KernelRow) -> str:
    """Returns how a kernel accesses memory: "16 B, 100%" - most bytes of an instruction, and the share of its sectors
    that it uses; "indexed" where addresses depend on data."""
    m = row.machine
    if not m.vectors:
        return "-"
    # The width in which most bytes are moved, not the largest.
    widest = max(m.vectors, key=lambda width: width * m.vectors[width])
    share = "" if m.coalesced is None else f", {m.coalesced:.0%}"
    return f"{widest} B{share}" + (", indexed" if m.is_indexed else "")


def _notes(row: KernelRow) -> list[str]:
    return [kind for kind in row.machine.atomics if kind != SWAPS] + (["matmul"] if row.by_products else [])


def kernel_notes(report: KernelReport) -> list[str]:
    """Returns sentences about all kernels: the lint, and what these numbers leave out."""
    lines = [
        f"{row.machine.name} ({row.source or row.op_name or 'no source line'}): {fault}"
        for row in report.faulty
        if _counts(report, row)
        for fault in row.faults.values()
    ]
    launches = sum(row.count for row in report.rows)
    added = report.step - report.without
    notes = [
        f"{len(report.rows)} kernels of XLA (jax {version('jax')}) with {launches:,} launches, and "
        f"{report.libraries:,} launches of cuBLAS and cuDNN, whose code is not part of the program; instructions that "
        f"take longer than bytes add {duration(max(added, 0.0))} to the step",
        *lines,
    ]
    if not lines:
        notes.append(
            f"no compare-and-swap loop, spill, uncoalesced kernel, or one {SLOW:g} times slower than its bytes"
        )
    return notes


def guessed_text(matmuls: int) -> str:
    """Returns a sentence about matmul kernels that were compiled without a GPU to measure them on."""
    return (
        f"{matmuls} matmul kernels are Triton's with tiles that XLA guessed: on a GPU it measures several, so the "
        "program that runs there has others, or cuBLAS's"
    )


def kernels_json(report: KernelReport) -> dict[str, Any]:
    """Returns the report as JSON values."""
    return {
        "jax": version("jax"),
        "seconds": report.step,
        "seconds_without_instructions": report.without,
        "library_launches": report.libraries,
        "own_matmuls": report.own_products,
        "kernels": [_json(row) for row in report.rows],
    }


def _json(row: KernelRow) -> dict[str, Any]:
    m = row.machine
    return {
        "name": m.name,
        "instructions": list(row.instructions),
        "launches": row.count,
        "grid": list(m.launch.grid),
        "threads": list(m.launch.threads),
        "phase": row.phase,
        "cause": row.cause,
        "op_name": row.op_name,
        "source": row.source,
        "seconds": row.seconds,
        "bytes": row.bytes,
        "seconds_by_bytes": row.by_bytes,
        "seconds_by_matmuls": row.by_products,
        "seconds_by_clock": dict(m.seconds),
        "bound": m.bound,
        "instructions_per_thread": dict(m.counts),
        "is_exact": m.is_exact,
        "registers": m.registers,
        "spilled_bytes": m.spilled,
        "shared_bytes": m.shared,
        "occupancy": m.occupancy,
        "atomics": list(m.atomics),
        "sectors_used": m.coalesced,
        "bytes_per_access": {str(width): times for width, times in m.vectors.items()},
        "is_indexed": m.is_indexed,
        "faults": dict(row.faults),
    }
