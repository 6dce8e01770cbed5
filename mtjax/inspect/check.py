"""Holds a compiled program against its contract, and explains every difference."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtjax.inspect.collectives import ALL_GATHER, ALL_REDUCE, KINDS, REDUCE_SCATTER, Collective
from mtjax.inspect.hlo import Array, dtype_bits
from mtjax.sharding.contract import LAYER_PHASES, LOSS_BACKWARD, LOSS_FORWARD, SMALL_BYTES, Due

Status = Literal["holds", "missing", "differs"]


@dataclass
class Entry:
    """One array of a collective, while it waits for a line of the contract to claim it."""

    collective: Collective
    array: Array
    left: int
    """Executions in a step that no line has claimed."""


@dataclass(frozen=True)
class Line:
    """A line of the contract beside what was compiled."""

    due: Due
    found: int
    """Arrays; of a pooled line, operations."""
    found_elements: int
    status: Status
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Whether the program is the contract's, and if not, why."""

    lines: tuple[Line, ...]
    violations: tuple[str, ...]
    """One sentence for each difference; empty when the contract holds."""
    tolerated: tuple[str, ...] = ()
    """What is sent beside the contract, and why that is no breach."""

    @property
    def holds(self) -> bool:
        """Whether nothing is missing and nothing is too much."""
        return not self.violations


@dataclass(frozen=True)
class Landmarks:
    """Sizes by which an unexpected array is recognised."""

    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of each parameter, whole."""
    logits: int = 0
    """Elements of a microbatch's logits, whole."""


def check(collectives: Sequence[Collective], dues: Sequence[Due], landmarks: Landmarks, *, is_gpu: bool) -> Verdict:
    """Compares collectives with a contract.

    On GPUs operations, elements and types must be the contract's. Programs for CPUs widen bf16 and write a
    reduce-scatter as all-reduce and slice, so there elements alone are compared, and what was rewritten is noted.

    Args:
      collectives: all of the program.
      dues: the contract, worked out for the run's sizes.
      landmarks: what extra arrays are compared with, to name them.
      is_gpu: whether the program is for GPUs.
    """
    entries = [Entry(c, a, c.count) for c in collectives for a in c.arrays if c.group_size > 1]
    lines = tuple(_claim(entries, d, is_gpu) for d in sorted(dues, key=lambda d: d.line.pooled))
    violations = [note for line in lines if line.status != "holds" for note in line.notes]
    left = [e for e in entries if e.left]
    tolerated = _tolerate(left)
    return Verdict(lines, (*violations, *_extra(left, landmarks), *_uncertain(collectives)), tolerated)


def _claim(entries: list[Entry], due: Due, is_gpu: bool) -> Line:
    """Takes what fulfils a line out of the entries."""
    kinds = {due.line.kind} | ({ALL_REDUCE} if due.line.kind == REDUCE_SCATTER and not is_gpu else set())
    fitting = [
        e
        for e in entries
        if e.left
        and e.collective.phase == due.line.phase
        and e.collective.axes == (due.line.axis,)
        and e.collective.kind in kinds
    ]
    claimed = _pool(fitting) if due.line.pooled else _match(fitting, due)
    found = sum(n for _, n in claimed)
    elements = sum(e.array.elements * e.collective.count for e, _ in claimed)
    notes = _type_notes([e for e, _ in claimed], due, is_gpu)
    if due.line.pooled:
        riders = elements - due.total
        if 0 <= riders <= SMALL_BYTES // 4:
            status, extra = "holds", [f"{riders} scalars ride along"] if riders else []
        else:
            status, extra = "differs", [_total_note(due, elements)]
        wrong = [n for n in notes if is_gpu]
        return Line(due, found, elements, "differs" if wrong else status, (*wrong, *extra))
    if found < due.count:
        return Line(due, found, found * due.elements, "missing", (_missing_note(due, found),))
    wrong = notes if is_gpu else []
    return Line(due, found, found * due.elements, "differs" if wrong else "holds", tuple(wrong) or tuple(notes))


def _pool(fitting: list[Entry]) -> list[tuple[Entry, int]]:
    claimed = []
    for entry in fitting:
        claimed.append((entry, entry.left))
        entry.left = 0
    return claimed


def _match(fitting: list[Entry], due: Due) -> list[tuple[Entry, int]]:
    """Entries of the right size; then those in which the compiler packed several arrays of that size."""
    claimed: list[tuple[Entry, int]] = []
    need = due.count
    by_packing = sorted(fitting, key=lambda e: e.array.elements)
    for entry in by_packing:
        packed, rest = divmod(entry.array.elements, due.elements)
        if rest or not packed or packed * entry.left > need:
            continue
        claimed.append((entry, packed * entry.left))
        need -= packed * entry.left
        entry.left = 0
    return claimed


def _type_notes(claimed: list[Entry], due: Due, is_gpu: bool) -> list[str]:
    """What travels in another type than the contract's."""
    notes = []
    for dtype in sorted({e.array.dtype for e in claimed} - {due.dtype}):
        ratio = dtype_bits(dtype) / dtype_bits(due.dtype)
        example = next(e for e in claimed if e.array.dtype == dtype)
        notes.append(
            f"{due.line.kind} over {due.line.axis} in {due.line.phase} carries {dtype} instead of {due.dtype}, "
            f"{ratio:g}x the bytes: {example.array}, from {_origin(example.collective)}"
            if is_gpu
            else f"{dtype} for {due.dtype}: CPU programs widen it"
        )
    if not is_gpu and any(e.collective.kind != due.line.kind for e in claimed):
        notes.append("all-reduce and slice: CPU programs write a reduce-scatter so")
    return notes


def _missing_note(due: Due, found: int) -> str:
    number = due.count - found
    return (
        f"{number} of {due.count} {due.line.kind} over {due.line.axis} missing in {due.line.phase}: "
        f"{due.elements:,} elements each ({due.line.elements})"
    )


def _total_note(due: Due, elements: int) -> str:
    difference = elements - due.total
    return (
        f"{due.line.kind} over {due.line.axis} in {due.line.phase} carries {elements:,} elements a step instead of "
        f"{due.total:,}: {abs(difference):,} too {'many' if difference > 0 else 'few'} ({due.line.elements})"
    )


def _tolerate(left: list[Entry]) -> tuple[str, ...]:
    """Lets go of scalars outside the layers."""
    scalars: dict[tuple[str, ...], int] = {}
    for entry in left:
        collective = entry.collective
        if collective.phase in LAYER_PHASES or not collective.is_known or collective.payload_bytes > SMALL_BYTES:
            continue
        axes = collective.axes or ()
        scalars[axes] = scalars.get(axes, 0) + entry.array.elements * entry.left
        entry.left = 0
    return tuple(f"{n} scalars over {'+'.join(axes)}" for axes, n in scalars.items())


def _extra(left: list[Entry], landmarks: Landmarks) -> list[str]:
    """One sentence for each kind of array that no line asked for."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in left:
        if entry.left and entry.collective.is_known:
            c = entry.collective
            groups.setdefault((c.kind, c.axes, c.phase, entry.array), []).append(entry)
    notes = []
    for (kind, axes, phase, array), entries in groups.items():
        number = sum(e.left for e in entries)
        over = "+".join(axes) if axes is not None else "no known axes"
        name = _recognise(array, kind, phase, landmarks)
        origin = " and ".join(dict.fromkeys(_origin(e.collective) for e in entries))
        notes.append(f"{number} extra {kind} over {over} in {phase}: {array}{name}, from {origin}")
    return notes


def _recognise(array: Array, kind: str, phase: str, landmarks: Landmarks) -> str:
    """What an array is, as far as its size and its place tell."""
    if landmarks.logits == array.elements and phase in (LOSS_FORWARD, LOSS_BACKWARD):
        return " - the logits, whole"
    weight = _weight(array, landmarks)
    if weight:
        return f" - the weight {weight}, whole" if kind == ALL_GATHER else f" - the size of the weight {weight}"
    return ""


def _weight(array: Array, landmarks: Landmarks) -> str | None:
    """The parameter with these dimensions in any order, or one layer of it."""
    dims = sorted(d for d in array.dims if d > 1)
    for name, shape in landmarks.weights.items():
        if len(dims) > 1 and dims in (sorted(shape), sorted(shape[1:])):
            return name
    return None


def _origin(collective: Collective) -> str:
    if not collective.op_name:
        return f"{collective.name}, which has no op_name"
    return f"op_name {collective.op_name!r}" + ("" if collective.has_own_name else " (the nearest that has one)")


def _uncertain(collectives: Iterable[Collective]) -> list[str]:
    """What can't be attributed is never passed over."""
    notes = []
    for c in collectives:
        if c.is_known:
            continue
        if c.kind not in KINDS:
            why = "is an operation that this reader does not know"
        elif c.axes is None:
            why = f"spans groups of {c.group_size} that are no set of mesh axes"
        else:
            why = f"runs in a loop of unknown length or a branch, counted {c.count} times"
        shapes = ", ".join(map(str, c.arrays))
        notes.append(f"{c.kind} {c.name} in {c.phase} {why}: {shapes}, from {_origin(c)}")
    return notes
