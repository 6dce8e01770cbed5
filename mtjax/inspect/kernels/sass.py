"""Reader of machine code (SASS) as nvdisasm prints it: instructions of each kernel, in which loops, behind which
branches."""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_SECTION = re.compile(r"^\.text\.([\w$]+):|^\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"^(\.L\w+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)\s*([^;]*)")
_ANCHORS = {"LDG", "STG", "ATOMG", "RED", "REDG", "ATOM", "LD", "ST", "LDGSTS"}


@dataclass(frozen=True)
class SassInstruction:
    """An instruction in machine code."""

    name: str
    """Without modifiers."""
    modifiers: str
    operands: str
    is_guarded: bool = False
    """Whether a predicate may turn it off; then it is issued nevertheless."""

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread accesses in global memory; 0 for other instructions."""
        if self.name not in _ANCHORS:
            return 0
        # Without a size a load is of 4 bytes.
        sizes = {"8": 1, "16": 2, "64": 8, "128": 16, "256": 32}
        return next((sizes[part.lstrip("US")] for part in self.modifiers.split(".") if part.lstrip("US") in sizes), 4)


@dataclass
class Code:
    """Machine code of a kernel."""

    instructions: list[SassInstruction] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)
    """First and last instruction of each loop."""
    branches: list[tuple[int, int]] = field(default_factory=list)
    """First and last of the instructions that each branch forward jumps over."""

    @property
    def in_loop(self) -> list[bool]:
        """Whether each instruction is in a loop."""
        inside = [False] * len(self.instructions)
        for first, last in self.loops:
            inside[first : last + 1] = [True] * (last + 1 - first)
        return inside

    def shares(self, accesses: Sequence[tuple[int, float]]) -> list[float] | None:
        """Returns the share of threads that execute each instruction where branches jump over some; None where it is
        not known, because ptxas duplicated or merged accesses.

        Args:
          accesses: of the PTX to global memory outside of loops, in order: bytes, and executions by a thread.
        """
        # ptxas keeps the order of what branches jump over, so that the n-th access here is the n-th there.
        inside = self.in_loop
        access_positions = [i for i, machine in enumerate(self.instructions) if machine.access_bytes and not inside[i]]
        sizes, expected = [self.instructions[i].access_bytes for i in access_positions], [size for size, _ in accesses]
        if sorted(sizes) != sorted(expected):
            return None
        found = [1.0] * len(self.instructions)
        for first, last in self.branches:
            low, high = bisect_left(access_positions, first), bisect_left(access_positions, last + 1)
            # Turned off by a predicate, an access says nothing about the instructions beside it.
            is_guarded = any(self.instructions[i].is_guarded for i in access_positions[low:high])
            if low == high or is_guarded or sorted(sizes[low:high]) != sorted(expected[low:high]):
                continue
            share = max(min(1.0, times) for _, times in accesses[low:high])
            found[first : last + 1] = [min(share, other) for other in found[first : last + 1]]
        return found

    def counts(self, times: float, shares: Sequence[float] | None = None) -> Counter[str]:
        """Returns how often a thread executes each kind of instruction, on average.

        Args:
          times: iterations of loops.
          shares: what `shares` returned; None counts both sides of all branches.
        """
        found: Counter[str] = Counter()
        for machine, is_inside, share in zip(self.instructions, self.in_loop, self._or_all(shares), strict=True):
            found[machine.name] += share * (times if is_inside else 1)  # pyright: ignore[reportArgumentType]
        return found

    def times(self, bytes_per_thread: float, shares: Sequence[float] | None = None) -> float:
        """Returns the iterations of loops in which a thread accesses so many bytes of global memory; 1 without a loop.

        ptxas unrolls loops as it likes, so that iterations can't be read off the PTX.
        """
        sizes = [
            (machine.access_bytes * share, inside)
            for machine, inside, share in zip(self.instructions, self.in_loop, self._or_all(shares), strict=True)
        ]
        # All loops get the same number of iterations. Where a kernel has several, this is their mean, weighted by what
        # they access.
        once, each = sum(n for n, inside in sizes if not inside), sum(n for n, inside in sizes if inside)
        return max(1.0, (bytes_per_thread - once) / each) if each else 1.0

    def _or_all(self, shares: Sequence[float] | None) -> Sequence[float]:
        return shares or [1.0] * len(self.instructions)

    def has(self, *names: str) -> bool:
        """Returns whether it has one of these instructions."""
        return any(machine.name in names for machine in self.instructions)


def parse(text: str) -> dict[str, Code]:
    """Parses what nvdisasm prints; kernel -> code."""
    found: dict[str, Code] = {}
    code, labels, forward = Code(), {}, {}
    for line in text.splitlines():
        at = len(code.instructions)
        if section := _SECTION.match(line):
            name = section[1] or section[2]
            if name not in found:
                code, labels, forward = Code(), {}, {}
                found[name] = code
        elif label := _LABEL.match(line):
            labels[label[1]] = at
            code.branches += [(branch + 1, at - 1) for branch in forward.pop(label[1], ()) if branch + 1 < at]
        elif match := _LINE.match(line):
            guard, opcode, modifiers, operands = match.groups()
            code.instructions.append(SassInstruction(opcode, modifiers.lstrip("."), operands.strip(), bool(guard)))
            target = re.search(r"\.L\w+", operands) if opcode == "BRA" else None
            if target and target[0] not in labels:
                forward.setdefault(target[0], []).append(at)
            # A branch to itself is not a loop: one pads the end of every kernel.
            elif target and labels[target[0]] < at:
                code.loops.append((labels[target[0]], at))
    return found
