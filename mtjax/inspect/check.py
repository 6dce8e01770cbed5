"""Check of a compiled program against its contract, with a message for every difference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mtjax.analysis.contract import (
    EMBEDDING_BACKWARD,
    GRADIENTS,
    LAYER_BACKWARD,
    LAYER_PHASES,
    LOSS_BACKWARD,
    LOSS_FORWARD,
    OPTIMIZER,
    OTHER,
    SAMPLING,
    SMALL_BYTES,
    Expectation,
    Requirement,
)
from mtjax.inspect.check_notes import missing_note, origin_text, subject, total_note, uncertain_notes
from mtjax.inspect.collectives import ALL_GATHER, ALL_REDUCE, ON_CPUS, REDUCE_SCATTER, SUMS, Collective
from mtjax.inspect.cpu_promotion import NARROW
from mtjax.inspect.hlo import Array, dtype_bits
from mtjax.inspect.phases import combined_paths, phase_of

Status = Literal["holds", "missing", "differs"]
_AFTER_FORWARD = (LOSS_BACKWARD, LAYER_BACKWARD, EMBEDDING_BACKWARD, GRADIENTS, OPTIMIZER, OTHER)


def _in_order(named: list[str | None], made_in: Sequence[str | None]) -> list[str | None]:
    """Returns the phases of a combined operation, in the order of its arrays as far as their producers show it."""
    # The names of a combined operation may be in another order than its arrays. If a producer's phase is not among
    # them, the producers say nothing about the order.
    remaining = list(named)
    for phase in made_in:
        if phase is not None and phase not in remaining:
            return named
        if phase is not None:
            remaining.remove(phase)
    return [remaining.pop(0) if phase is None else phase for phase in made_in] or named


@dataclass
class Entry:
    """One array of a collective, with the executions that no line of the contract has claimed yet."""

    collective: Collective
    array: Array
    phase: str
    """Phase of this array: those of a combined operation may differ."""
    left: int
    """Executions in a step that no line has claimed."""
    dtype: str
    """Dtype before XLA for CPUs: bf16 of a reduction that it converted to float32."""

    @classmethod
    def of(cls, collective: Collective) -> "list[Entry]":
        """Returns one entry for each array of a collective."""
        paths = combined_paths(collective.op_name) if collective.has_own_name else []
        phases = [phase_of(path) for path in paths] if 1 < len(paths) == len(collective.arrays) else []
        unnamed = [] if collective.has_own_name else list(collective.made_in)
        phases = _in_order(phases, collective.made_in) if phases else unnamed
        narrowed = collective.narrowed or (False,) * len(collective.arrays)
        return [
            cls(
                collective,
                array,
                (phases[i] if phases else None) or collective.phase,
                collective.count,
                NARROW if narrowed[i] else array.dtype,
            )
            for i, array in enumerate(collective.arrays)
        ]


@dataclass(frozen=True)
class ContractLine:
    """A line of the contract, and the collectives found for it."""

    required: Requirement
    found: int
    """Arrays; in a pooled line, operations."""
    found_elements: int
    status: Status
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Result of a check."""

    lines: tuple[ContractLine, ...]
    violations: tuple[str, ...]
    """One sentence for each difference; empty when the contract holds."""
    tolerated: tuple[str, ...] = ()
    """Collectives of scalars, which are in no line and no violation."""

    @property
    def holds(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


@dataclass(frozen=True)
class Landmarks:
    """Sizes by which an unexpected array is recognized."""

    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> unsharded shape of each parameter."""
    logits: int = 0
    """Elements of a microbatch's unsharded logits."""
    stacks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape on a device of each parameter that stacks several layers, gathered from ZeRO's shards."""


def check(
    collectives: Sequence[Collective], requirements: Sequence[Requirement], landmarks: Landmarks, *, is_gpu: bool
) -> Verdict:
    """Checks collectives against a contract.

    In GPU programs operations, elements and dtypes must be the contract's. XLA for CPUs converts bf16 to float32 and
    rewrites reduce-scatters: notes report both, and only the dtypes of reductions are compared, as they were before.

    Args:
      collectives: all of the program.
      requirements: the contract, evaluated for the run's sizes.
      landmarks: sizes by which extra arrays are named.
      is_gpu: whether the program is for GPUs.
    """
    # Groups of one device send nothing, and XLA leaves some of them in programs.
    entries = [entry for c in collectives if c.group_size > 1 for entry in Entry.of(c)]
    ordered = sorted(_pools(requirements, is_gpu), key=_claiming_order)
    # The order matters, because a line takes entries away from those after it.
    lines = tuple(_claim(entries, required, landmarks, is_gpu) for required in ordered)
    violations = [note for line in lines if line.status != "holds" for note in line.notes]
    unclaimed = [e for e in entries if e.left]
    tolerated = _tolerate(unclaimed)
    return Verdict(lines, (*violations, *_extra(unclaimed, landmarks), *uncertain_notes(collectives)), tolerated)


@dataclass(frozen=True)
class _Pool(Requirement):
    """Pooled lines merged into one, because the program does not distinguish them."""

    floor: int = 0

    @property
    def min_elements(self) -> int:
        return self.floor


def _pools(requirements: Sequence[Requirement], is_gpu: bool) -> list[Requirement]:
    """Merges pooled lines of the same kind, axis and phase.

    For GPUs also of the same dtype; CPU programs convert the narrower, and all-reduce instead of reduce-scatter.
    """
    merged: dict[tuple, Requirement] = {}
    for number, required in enumerate(requirements):
        line = required.line
        # In a CPU program both are all-reduces, and one line could claim what is the other's.
        kind = ALL_REDUCE if line.kind == REDUCE_SCATTER and not is_gpu else line.kind
        key = (line.phase, kind, line.axis, required.dtype if is_gpu else "") if line.pooled else (number,)
        if before := merged.get(key):
            kind = REDUCE_SCATTER if REDUCE_SCATTER in (before.line.kind, line.kind) else line.kind
            dtype = NARROW if NARROW in (before.dtype, required.dtype) else required.dtype
            elements = f"{_product(before.line)} + {_product(line)}"
            hoisted, also = before.line.hoisted or line.hoisted, before.line.also or line.also
            line = replace(line, kind=kind, count="1", elements=elements, hoisted=hoisted, also=also)
            required = _Pool(line, 1, before.total + required.total, dtype, before.min_elements + required.min_elements)
        merged[key] = required
    return list(merged.values())


def _product(line: Expectation) -> str:
    """Returns the formula of a line's elements in a step."""
    return line.elements if line.count == "1" else f"{line.count}*({line.elements})"


def _claiming_order(required: Requirement) -> tuple[bool, bool, int, int]:
    """Returns the sort key by which lines claim entries.

    Exact lines first, hoisted ones last; large arrays before small ones, of which they may be multiples; of arrays of
    the same size the smaller count first.
    """
    return required.line.pooled, required.line.hoisted, -required.elements, required.count


def _claim(entries: list[Entry], required: Requirement, landmarks: Landmarks, is_gpu: bool) -> ContractLine:
    """Claims the entries that meet a line."""
    kinds = {required.line.kind} | (set() if is_gpu else set(ON_CPUS.get(required.line.kind, ())[:1]))
    fitting = [
        e
        for e in entries
        if e.left
        and _is_in_phase(e, required.line)
        and e.collective.axes == required.line.axes
        and e.collective.kind in kinds
        # Ids of experts and tokens travel beside activations, sometimes with as many elements.
        and _is_integer(e.dtype) == _is_integer(required.dtype)
    ]
    # In CPU programs only reductions show which dtype they had before XLA converted bf16 to float32.
    compares_dtypes = is_gpu or required.line.kind in SUMS
    if required.line.pooled and compares_dtypes:
        same_dtype = [e for e in fitting if e.dtype == required.dtype]
        arrays = [e for e in fitting if e.array.elements > 1]
        are_arrays = any(e.array.elements > 1 for e in same_dtype)
        others = any(e.array.bytes > SMALL_BYTES for e in fitting if e.dtype != required.dtype)
        # XLA: not all conversions to float32 in CPU programs can be recognized.
        unsure = not is_gpu and required.dtype == NARROW
        enough = not unsure or _elements(same_dtype) >= required.min_elements
        if unsure and _elements(arrays) <= required.total:
            fitting = arrays  # all of them together are what the line asks for
        elif enough and (not others or _elements(same_dtype) >= max(required.min_elements, 1) or are_arrays):
            fitting = same_dtype  # those of other dtypes are left for other lines
    claimed = _pool(fitting) if required.line.pooled else _match(fitting, required)
    found = sum(n for _, n in claimed)
    elements = sum(e.array.elements * e.collective.count for e, _ in claimed)
    wrong, notes = _type_notes([e for e, _ in claimed], required, is_gpu)
    if required.line.pooled:
        # XLA combines a few scalars (norms, counts) with gradients; as float32 they stay below the tolerance for
        # scalars.
        extra_scalars = max(elements - required.total, 0)
        if elements >= required.min_elements and extra_scalars <= SMALL_BYTES // 4:
            status, extra = "holds", [f"with {extra_scalars} extra scalars"] if extra_scalars else []
        else:
            status, extra = "differs", [total_note(required, elements, _full_stacks(claimed, landmarks))]
        if wrong:
            return ContractLine(required, found, elements, "differs", (*wrong, *(extra if status == "differs" else [])))
        return ContractLine(required, found, elements, status, tuple(extra))
    if found < required.count:
        return ContractLine(required, found, found * required.elements, "missing", (missing_note(required, found),))
    status = "differs" if wrong else "holds"
    return ContractLine(required, found, found * required.elements, status, tuple(wrong or notes))


def _elements(entries: Sequence[Entry]) -> int:
    """Returns the elements that are left in entries."""
    return sum(entry.array.elements * entry.left for entry in entries)


def _is_integer(dtype: str) -> bool:
    """Returns whether a dtype is an integer type: ids and counts are never taken for activations."""
    return dtype.startswith(("s", "u"))


def _is_in_phase(entry: Entry, line: Expectation) -> bool:
    """Returns whether an entry is in a phase that the line allows."""
    return entry.phase in (line.phase, line.also) or (line.hoisted and entry.phase in _AFTER_FORWARD)


def _pool(fitting: list[Entry]) -> list[tuple[Entry, int]]:
    """Claims all fitting entries, for a pooled line."""
    claimed = []
    for entry in fitting:
        claimed.append((entry, entry.left))
        entry.left = 0
    return claimed


def _match(fitting: list[Entry], required: Requirement) -> list[tuple[Entry, int]]:
    """Claims entries of the required size, those of the required dtype and the most frequent first; then arrays that
    pack several of that size."""
    # Exactly the required size first: a larger array is taken for several of them only if these do not suffice.
    by_size = sorted(fitting, key=lambda e: (e.array.elements, e.dtype != required.dtype, -e.left))
    sizes = [(e, e.array.elements // required.elements * e.left) for e in by_size if _packs(e, required)]
    claimed: list[tuple[Entry, int]] = []
    need = required.count
    for entry, number in sizes:
        # An entry is taken as a whole or not at all: a loop's executions have one purpose.
        if number <= need:
            claimed.append((entry, number))
            need -= number
    if need:
        # Other lines may have arrays of this size too, in loops of other lengths: try all sums.
        claimed = _adding_up(sizes, required.count) or claimed
    for entry, _ in claimed:
        entry.left = 0
    return claimed


def _packs(entry: Entry, required: Requirement) -> bool:
    """Returns whether an entry has the size of one or several required arrays."""
    packed, remainder = divmod(entry.array.elements, required.elements)
    return bool(packed) and not remainder


def _adding_up(sizes: list[tuple[Entry, int]], need: int) -> list[tuple[Entry, int]] | None:
    """Returns the first subset of `sizes` whose numbers add up to `need`; None if there is none."""
    subsets: dict[int, tuple[int, ...]] = {0: ()}
    for i, (_, number) in enumerate(sizes):
        for total, indices in list(subsets.items()):
            if total + number <= need:
                subsets.setdefault(total + number, (*indices, i))
    return [sizes[i] for i in subsets[need]] if need in subsets else None


def _type_notes(claimed: list[Entry], required: Requirement, is_gpu: bool) -> tuple[list[str], list[str]]:
    """Returns messages about arrays of a wrong dtype, and notes on other rewritten arrays."""
    wrong, notes = [], []
    for original, dtype in sorted({(e.dtype, e.array.dtype) for e in claimed}):
        example = next(e for e in claimed if (e.dtype, e.array.dtype) == (original, dtype))
        what = f"{example.array}, from {origin_text(example.collective)}"
        if is_gpu and dtype != required.dtype:
            ratio = dtype_bits(dtype) / dtype_bits(required.dtype)
            wrong.append(f"{subject(required)} sends {dtype} instead of {required.dtype}, {ratio:g}x the bytes: {what}")
        elif not is_gpu and _is_wrong_sum(original, required):
            wrong.append(f"{subject(required)} reduces {original} instead of {required.dtype}: {what}")
        elif dtype != required.dtype:
            notes.append(f"{dtype} for {required.dtype}: converted by XLA for CPUs")
    if not is_gpu and any(e.collective.kind != required.line.kind for e in claimed):
        notes.append(ON_CPUS[required.line.kind][1])
    return wrong, notes


def _is_wrong_sum(dtype: str, required: Requirement) -> bool:
    """Returns whether a reduction in a CPU program has fewer bits than the contract's, or more where the contract's
    dtype is set by the config (bf16 gradients)."""
    if required.line.kind not in SUMS or dtype == required.dtype:
        return False
    return dtype_bits(dtype) < dtype_bits(required.dtype) or required.line.dtype == "bfloat16"


def _full_stacks(claimed: list[tuple[Entry, int]], landmarks: Landmarks) -> list[str]:
    """Returns the largest matrices that arrays contain with all layers, in any order of dimensions."""
    found: dict[str, Array] = {}
    for entry, _ in claimed:
        dims = sorted(entry.array.dims)
        found |= {name: entry.array for name, shape in landmarks.stacks.items() if dims == sorted(shape)}
    largest = sorted(found.items(), key=lambda item: -item[1].elements)[:3]
    return [f"{name} ({array})" for name, array in largest if array.elements == largest[0][1].elements]


def _tolerate(left: list[Entry]) -> tuple[str, ...]:
    """Claims scalars outside layers and sampling (all of whose arrays are small), and returns notes on them."""
    scalars: dict[tuple[str, ...], int] = {}
    for entry in left:
        collective = entry.collective
        # In a layer even a scalar costs the latency of a collective, as often as there are layers.
        if entry.phase in (*LAYER_PHASES, SAMPLING) or not collective.is_known or entry.array.bytes > SMALL_BYTES:
            continue
        axes = collective.axes or ()
        scalars[axes] = scalars.get(axes, 0) + entry.array.elements * entry.left
        entry.left = 0
    return tuple(f"{n} scalars over {'+'.join(axes)}" for axes, n in scalars.items())


def _extra(left: list[Entry], landmarks: Landmarks) -> list[str]:
    """Returns one sentence for each kind of array that no line claimed."""
    groups: dict[tuple, list[Entry]] = {}
    for entry in left:
        if entry.left and entry.collective.is_known:
            c = entry.collective
            groups.setdefault((c.kind, c.axes, entry.phase, entry.array), []).append(entry)
    notes = []
    for (kind, axes, phase, array), entries in groups.items():
        number = sum(e.left for e in entries)
        over = "+".join(axes) if axes is not None else "no known axes"
        name = _recognize(array, kind, phase, landmarks)
        origin = " and ".join(dict.fromkeys(origin_text(e.collective) for e in entries))
        notes.append(f"{number} extra {kind} over {over} in {phase}: {array}{name}, from {origin}")
    return notes


def _recognize(array: Array, kind: str, phase: str, landmarks: Landmarks) -> str:
    """Returns what an array is, as far as its size and phase show it."""
    if landmarks.logits == array.elements and phase in (LOSS_FORWARD, LOSS_BACKWARD, SAMPLING):
        return " - the logits, unsharded"
    weight = _weight(array, landmarks)
    if weight:
        return f" - the weight {weight}, unsharded" if kind == ALL_GATHER else f" - the size of the weight {weight}"
    return ""


def _weight(array: Array, landmarks: Landmarks) -> str | None:
    """Returns the parameter with these dimensions in any order, or whose layers have them."""
    # XLA reorders dimensions and adds ones, so shapes are compared as sets; vectors are too common to tell from one
    # another.
    dims = sorted(d for d in array.dims if d > 1)
    for name, shape in landmarks.weights.items():
        if len(dims) > 1 and dims in (sorted(shape), sorted(shape[1:])):
            return name
    return None
