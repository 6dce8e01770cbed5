"""A block of threads of a kernel, followed through its PTX: how often instructions run, and which memory they touch.

Only what addresses and branches depend on is computed, on integers, for all threads of the block at once. What is
loaded from memory is not known: it counts as 0, and is remembered as equal for all threads if all load it from one
address (an offset of a slice), else as different for each (an index of a gather). A branch on loaded data, such as
whether an index lies within the array or whether a swap was successful, goes on to the next instruction, unless it is a
branch forward and the next instruction ends the kernel.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mtjax.inspect.kernels.ptx import Op, PtxEntry, width_of

SECTOR = 32
"""Bytes of a sector, the smallest transfer between caches and memory."""
WARP = 32
MOST_BLOCKS = 8
"""Blocks that are followed where one does not take all branches."""
MOST_STEPS = 60_000
"""Instructions of a block after which it is no longer followed."""
_BASE = 1 << 40
"""Distance between the addresses of two parameters: no two arrays overlap."""
_WORD = np.uint64
_FULL = (1 << 64) - 1
KNOWN, EQUAL, VARIES = range(3)
"""What is known about a register: its value; that all threads have the same; nothing."""


class Value(NamedTuple):
    """A register of all threads: unsigned integers [threads], and how far they are known."""

    bits: np.ndarray
    known: int


@dataclass
class Access:
    """What the executions of one memory instruction touch."""

    requests: int = 0
    """Of warps."""
    sectors: int = 0
    """That the warps' requests touch, added."""
    threads: int = 0
    """Threads that executed it, added."""
    is_indexed: bool = False
    """Whether addresses depend on data that differs between threads."""


@dataclass
class Followed:
    """A block of threads, or several."""

    threads: int
    executions: np.ndarray
    """Of each instruction, threads added, [instructions]."""
    accesses: dict[int, Access] = field(default_factory=dict)
    """By index of the instruction, global memory only."""
    sectors: int = 0
    """Sectors of global memory that the block touches, at known addresses."""
    touched: int = 0
    """Bytes of these sectors that its threads access."""
    is_complete: bool = True
    """Whether it was followed to its end."""
    blocks: int = 1
    """Blocks that were added together."""

    def bytes_per_thread(self, kernel: PtxEntry) -> float:
        """Returns the bytes of global memory that a thread loads and stores, on average."""
        return sum(a.threads * kernel.ops[i].access_bytes for i, a in self.accesses.items()) / self.threads

    def straight(self, kernel: PtxEntry) -> list[tuple[int, float]]:
        """Returns bytes and executions by a thread of each instruction on global memory outside of loops, in order."""
        loops = kernel.in_loop() if self.executions.size else range(len(kernel.ops))  # matmuls are not followed
        ops = [(i, op) for i, op in enumerate(kernel.ops) if op.space == "global" and i not in loops]
        return [(op.access_bytes, int(self.executions[i]) / self.threads) for i, op in ops]


def follow(kernel: PtxEntry, threads: tuple[int, int, int], grid: tuple[int, int, int]) -> Followed:
    """Follows the block in the middle of a launch; if it leaves out some accesses, several blocks.

    Args:
      kernel: the code.
      threads: of a block, by dimension.
      grid: blocks, by dimension.
    """
    # The middle: blocks at the edges of an array take branches that the others do not.
    found = _BlockAddresses(kernel, threads, grid, (grid[0] // 2, grid[1] // 2, grid[2] // 2)).run()
    if all(times for _, times in found.straight(kernel)):
        return found
    # Where arrays are side by side, such as gate and up, a block writes one of them. Blocks are chosen by the golden
    # ratio, as those at equal distances could all write the same one.
    count = int(np.prod(grid))
    indices = sorted({int((i + 0.5) * 0.6180339887 % 1 * count) for i in range(MOST_BLOCKS)})
    block_indices = ((i % grid[0], i // grid[0] % grid[1], i // grid[0] // grid[1]) for i in indices)
    return _together([_BlockAddresses(kernel, threads, grid, block_index).run() for block_index in block_indices])


def _together(blocks: list[Followed]) -> Followed:
    """Adds blocks of a kernel."""
    found = blocks[0]
    for block in blocks[1:]:
        found.threads += block.threads
        found.executions += block.executions
        found.sectors += block.sectors
        found.touched += block.touched
        found.is_complete &= block.is_complete
        found.blocks += 1
        for i, b in block.accesses.items():
            a = found.accesses.get(i, Access())
            indexed = a.is_indexed or b.is_indexed
            found.accesses[i] = Access(a.requests + b.requests, a.sectors + b.sectors, a.threads + b.threads, indexed)
    return found


class _BlockAddresses:
    def __init__(
        self, kernel: PtxEntry, threads: tuple[int, int, int], grid: tuple[int, int, int], block: tuple[int, int, int]
    ) -> None:
        self.kernel, self.size = kernel, int(np.prod(threads))
        # Everything else, all arithmetic on data, would take most of the time and change no count.
        self.needed = kernel.address_slice()
        self.pc = np.zeros(self.size, np.int64)
        self.result = Followed(self.size, np.zeros(len(kernel.ops) + 1, np.int64))
        self.bytes_seen: dict[int, list[np.ndarray]] = {}
        index = np.arange(self.size)
        self.registers: dict[str, Value] = {}
        for axis, name in enumerate("xyz"):
            below = int(np.prod(threads[:axis]))
            self._set(f"%tid.{name}", index // below % threads[axis])
            self._set(f"%ntid.{name}", np.full(self.size, threads[axis]))
            self._set(f"%ctaid.{name}", np.full(self.size, block[axis]))
            self._set(f"%nctaid.{name}", np.full(self.size, grid[axis]))
        self._set("%laneid", index % WARP)

    def _set(self, name: str, values: np.ndarray) -> None:
        self.registers[name] = Value(values.astype(_WORD), KNOWN)

    def run(self) -> Followed:
        """Executes instructions, of diverged threads always those that are furthest behind."""
        ops, end = self.kernel.ops, len(self.kernel.ops)
        everyone = np.ones(self.size, bool)
        # A loop whose condition depends on loaded data may never end here.
        for _ in range(MOST_STEPS):
            # Diverged threads meet again after a branch only if those behind are run first.
            at = int(self.pc.min())
            if at >= end:
                break
            here = everyone if (self.pc == at).all() else self.pc == at
            self._step(at, ops[at], here)
        else:
            self.result.is_complete = False
        self._count_sectors()
        return self.result

    def _step(self, at: int, op: Op, here: np.ndarray) -> None:
        active = here
        known = KNOWN
        if op.guard:
            guard = self._read(op.guard, 1)
            known = guard.known
            holds = (guard.bits == 0) if op.is_negated else (guard.bits != 0)
            active = here & holds
            if known != KNOWN:
                skips = op.kind == "bra" and not (self._target(op) > at and self._ends(at + 1))
                active = here & False if skips else here
        self.result.executions[at] += int(active.sum())
        self.pc[here] = at + 1
        if op.kind == "bra":
            self.pc[active] = self._target(op)
        elif op.kind in ("ret", "exit", "trap"):
            self.pc[active] = len(self.kernel.ops)
        else:
            if op.space == "global" and active.any():
                self._access(at, op, active)
            if at in self.needed:
                self._compute(op, active)

    def _ends(self, at: int) -> bool:
        """Returns whether an instruction ends the kernel."""
        ops = self.kernel.ops
        if at >= len(ops) or ops[at].kind in ("ret", "exit", "trap"):
            return True
        return ops[at].kind == "bra" and ops[at].guard is None and self._ends(self._target(ops[at]))

    def _target(self, op: Op) -> int:
        """Returns the index of the instruction to which a branch goes."""
        return self.kernel.labels.get(op.operands[-1], len(self.kernel.ops))

    def _access(self, at: int, op: Op, active: np.ndarray) -> None:
        access = self.result.accesses.setdefault(at, Access())
        address = self._address(op)
        access.threads += int(active.sum())
        in_warps = np.zeros(-(-self.size // WARP) * WARP, bool)
        in_warps[: self.size] = active
        # A request to the caches is a warp's, so sectors are counted for each warp, and a sector that two warps touch
        # counts twice.
        lanes = in_warps.reshape(-1, WARP)
        access.requests += int(lanes.any(1).sum())
        if address.known == VARIES:
            access.is_indexed = True
            return
        size = max(op.access_bytes, 1)
        start = np.full(lanes.size, -1, np.int64)
        start[: self.size][active] = address.bits.astype(np.int64)[active]
        ends = np.stack([start, start + size - 1]).reshape(2, -1, WARP) // SECTOR
        of_warp = np.sort(np.where(lanes, ends, -1).transpose(1, 0, 2).reshape(lanes.shape[0], -1), axis=1)
        access.sectors += int((np.diff(of_warp, axis=1, prepend=-1) > 0).sum())
        self.bytes_seen.setdefault(size, []).append(start[start >= 0])

    def _count_sectors(self) -> None:
        """Counts the distinct sectors of the block, and how much of them is accessed."""
        starts = [np.concatenate(found) for found in self.bytes_seen.values()]
        if not starts:
            return
        sizes = [np.full(len(found), size) for size, found in zip(self.bytes_seen, starts, strict=True)]
        start, size = np.concatenate(starts), np.concatenate(sizes)
        order = np.argsort(start, kind="stable")
        start, end = start[order], (start + size)[order]
        # Threads that access the same bytes use them once, or a broadcast would seem to use more than the sectors hold.
        before = np.maximum.accumulate(np.concatenate([[-1], end[:-1]]))  # where the accesses before it end
        self.result.touched = int(np.maximum(end - np.maximum(start, before), 0).sum())
        first, last = start // SECTOR, (end - 1) // SECTOR
        self.result.sectors = int(np.maximum(last - np.maximum(first - 1, (before - 1) // SECTOR), 0).sum())

    def _address(self, op: Op) -> Value:
        text = op.address
        total, known = np.zeros(self.size, _WORD), KNOWN
        for sign, term in re.findall(r"([+-]?)\s*([%$\w.]+)", text):
            value = self._read(term, 64)
            total = total - value.bits if sign == "-" else total + value.bits
            known = max(known, value.known)
        return Value(total, known)

    def _read(self, operand: str, bits: int) -> Value:
        if operand in self.registers:
            value = self.registers[operand]
            return Value(value.bits & _WORD((1 << bits) - 1), value.known)
        if operand in self.kernel.parameters:
            # A pointer has no value before the launch: any will do that no other array reaches.
            number = (self.kernel.parameters.index(operand) + 1) * _BASE
        else:
            try:
                number = int(operand.rstrip("U"), 0)
            except ValueError:  # a register that was never computed, a float, or the name of an array
                return Value(np.zeros(self.size, _WORD), VARIES if operand.startswith(("%", "0f", "0d")) else KNOWN)
        return Value(np.full(self.size, number & ((1 << bits) - 1), _WORD), KNOWN)

    def _compute(self, op: Op, active: np.ndarray) -> None:
        """Executes an instruction on integers; the result of any other is not known."""
        result = self._load(op) if op.kind in ("ld", "atom") else _arithmetic(op, self._read)
        for i, name in enumerate(op.written):
            value = result[min(i, len(result) - 1)] if result else Value(np.zeros(self.size, _WORD), VARIES)
            old = self.registers.get(name)
            if old is not None and not active.all():
                known = max(value.known, old.known)
                value = Value(np.where(active, value.bits, old.bits), known)
            self.registers[name] = value

    def _load(self, op: Op) -> list[Value]:
        if op.space == "param" and op.kind == "ld":
            name = op.address.split("+")[0].strip()
            return [self._read(name, 64)]
        address = self._address(op)
        is_one = address.known == EQUAL or (address.known == KNOWN and (address.bits == address.bits[0]).all())
        known = EQUAL if is_one and op.space in ("global", "const", "param") and op.kind == "ld" else VARIES
        return [Value(np.zeros(self.size, _WORD), known)] * max(1, len(op.written))


def _arithmetic(op: Op, read) -> list[Value]:
    """Returns the results of an instruction on integers; [] where it isn't one, or is not known here."""
    kind, width = op.type, width_of(op.type)
    # No address is computed in floating point.
    if kind.startswith(("f", "bf")) and op.kind not in ("mov",):
        return []
    operands = op.operands
    if op.kind == "mov" and "{" in "".join(operands):
        return _pack(op, read, width)
    source_width = 2 * width if op.kind == "cvt" else width
    if op.kind == "cvt":
        source_width = width_of([part for part in op.parts if part[0] in "bsuf" and part[-1].isdigit()][-1])
        if any(part in ("f16", "f32", "f64", "bf16") for part in op.parts):
            return []
    if op.kind == "selp":
        first, second, choice = read(operands[1], width), read(operands[2], width), read(operands[3], 1)
        bits = np.where(choice.bits != 0, first.bits, second.bits)
        return [Value(bits, max(first.known, second.known, choice.known))]
    values = [read(operand, source_width) for operand in operands[1:]]
    known = max((value.known for value in values), default=KNOWN)
    a = [value.bits for value in values]
    is_signed = kind.startswith("s")
    bits = _result(op, a, source_width, is_signed)
    if bits is None:
        return []
    wide = 2 * width if "wide" in op.parts else width_of(op.parts[-2]) if op.kind == "cvt" else width
    if op.kind == "setp":
        wide = 1
    if op.kind == "cvt" and is_signed:
        bits = _signed(bits, source_width).astype(_WORD)
    return [Value(bits & _WORD(_FULL >> (64 - wide)), known)]


def _signed(bits: np.ndarray, width: int) -> np.ndarray:
    """Reads two's complement."""
    values = bits.astype(np.int64)
    return values if width >= 64 else np.where(values >> (width - 1), values - (1 << width), values)


_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def _result(op: Op, a: list[np.ndarray], width: int, is_signed: bool) -> np.ndarray | None:
    """Computes an instruction's result in 64 bits; None for kinds that are not followed."""
    s = [_signed(x, width) for x in a] if is_signed else a
    match op.kind:
        case "mov" | "cvt" | "cvta":
            return a[0]
        case "add" | "addc":
            return a[0] + a[1]
        case "sub":
            return a[0] - a[1]
        case "neg":
            return np.zeros_like(a[0]) - a[0]
        case "not":
            return ~a[0]
        case "and":
            return a[0] & a[1]
        case "or":
            return a[0] | a[1]
        case "xor":
            return a[0] ^ a[1]
        case "shl":
            return np.where(a[1] < width, a[0] << np.minimum(a[1], _WORD(63)), _WORD(0))
        case "shr":
            return (s[0] >> np.minimum(a[1], _WORD(width - 1)).astype(s[0].dtype)).astype(_WORD)
        case "min" | "max":
            return (np.minimum if op.kind == "min" else np.maximum)(s[0], s[1]).astype(_WORD)
        case "mul" | "mad":
            product = (s[0] * s[1]).astype(_WORD)
            if "hi" in op.parts:
                product = (s[0] * s[1] >> s[0].dtype.type(32)).astype(_WORD) if width == 32 else _high(a[0], a[1])
            return product + a[2] if op.kind == "mad" else product
        case "div" | "rem":
            # Threads that a guard turns off may hold a zero, and numpy would warn.
            divisor = np.where(s[1] == 0, s[1].dtype.type(1), s[1])
            # PTX rounds to zero, numpy to minus infinity.
            quotient = (
                (np.abs(s[0]) // np.abs(divisor)) * np.sign(s[0]) * np.sign(divisor) if is_signed else s[0] // divisor
            )
            return (quotient if op.kind == "div" else s[0] - quotient * divisor).astype(_WORD)
        case "setp":
            compare = next((_COMPARE[part] for part in op.parts if part in _COMPARE), None)
            return None if compare is None else compare(s[0], s[1]).astype(_WORD)
        case "bfe":
            shifted = a[0] >> np.minimum(a[1], _WORD(63))
            return shifted & ((_WORD(1) << np.minimum(a[2], _WORD(63))) - _WORD(1))
        case "bfi":
            mask = ((_WORD(1) << np.minimum(a[3], _WORD(63))) - _WORD(1)) << np.minimum(a[2], _WORD(63))
            return (a[1] & ~mask) | ((a[0] << np.minimum(a[2], _WORD(63))) & mask)
        case "shf":
            both, shift = (a[1] << _WORD(32)) | a[0], a[2] & _WORD(31)
            return (both << shift) >> _WORD(32) if "l" in op.parts else both >> shift
        case _:
            return None


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the upper 64 bits of the products of 64."""
    # In Python's integers, as numpy has none of 128 bits. A division by a constant compiles to such a product.
    return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)], _WORD)


def _pack(op: Op, read, width: int) -> list[Value]:
    """Joins or divides a register: `mov.b64 {%r1, %r2}, %rd1`."""
    names = re.findall(r"[%\w]+", op.operands[0] if "{" in op.operands[0] else op.operands[1])
    part = width // len(names)
    if "{" in op.operands[0]:
        whole = read(op.operands[1], width)
        mask = _WORD((1 << part) - 1)
        return [Value((whole.bits >> _WORD(part * i)) & mask, whole.known) for i in range(len(names))]
    values = [read(name, part) for name in names]
    bits = np.zeros_like(values[0].bits)
    for i, value in enumerate(values):
        bits |= value.bits << _WORD(part * i)
    return [Value(bits, max(value.known for value in values))]
