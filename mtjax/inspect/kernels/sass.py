"""Reader of machine code (SASS) as nvdisasm prints it: instructions of each kernel by pipe, and in which loops."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_SECTION = re.compile(r"^\.text\.([\w$]+):|^\s*\.section\s+\.text\.([\w$]+)")
_LABEL = re.compile(r"^(\.L\w+):")
_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([.\w]*)\s*([^;]*)")
_ANCHORS = {"LDG", "STG", "ATOMG", "RED", "REDG", "ATOM", "LD", "ST", "LDGSTS"}


@dataclass(frozen=True)
class SassInstruction:
    """An instruction in machine code."""

    name: str
    """Without modifiers."""
    modifiers: str
    operands: str

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

    @property
    def in_loop(self) -> list[bool]:
        """Whether each instruction is in a loop."""
        inside = [False] * len(self.instructions)
        for first, last in self.loops:
            inside[first : last + 1] = [True] * (last + 1 - first)
        return inside

    def counts(self, times: float) -> Counter[str]:
        """Returns how often a thread executes each kind of instruction, with loops of `times` iterations."""
        found: Counter[str] = Counter()
        for machine, is_inside in zip(self.instructions, self.in_loop, strict=True):
            found[machine.name] += times if is_inside else 1  # pyright: ignore[reportArgumentType]
        return found

    def times(self, bytes_per_thread: float) -> float:
        """Returns the iterations of loops in which a thread accesses so many bytes of global memory; 1 without a loop.

        ptxas unrolls loops as it likes, so that iterations can't be read off the PTX.
        """
        sizes = [
            (machine.access_bytes, inside) for machine, inside in zip(self.instructions, self.in_loop, strict=True)
        ]
        # All loops get the same number of iterations. Where a kernel has several, this is their mean, weighted by what
        # they access.
        once, each = sum(n for n, inside in sizes if not inside), sum(n for n, inside in sizes if inside)
        return max(1.0, (bytes_per_thread - once) / each) if each else 1.0

    def has(self, *names: str) -> bool:
        """Returns whether it has one of these instructions."""
        return any(machine.name in names for machine in self.instructions)


def parse(text: str) -> dict[str, Code]:
    """Parses what nvdisasm prints; kernel -> code."""
    found: dict[str, Code] = {}
    code, labels = Code(), {}
    for line in text.splitlines():
        if section := _SECTION.match(line):
            name = section[1] or section[2]
            if name not in found:
                code, labels = Code(), {}
                found[name] = code
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code.instructions)
        elif match := _LINE.match(line):
            at = len(code.instructions)
            code.instructions.append(SassInstruction(match[1], match[2].lstrip("."), match[3].strip()))
            if match[1] == "BRA":
                code.loops += _backwards(at, match[3], labels)
    return found


def _backwards(at: int, operands: str, labels: dict[str, int]) -> Iterator[tuple[int, int]]:
    """Yields the loop that a branch ends; not that of the branch to itself after the end of every kernel."""
    target = re.search(r"\.L\w+", operands)
    first = labels.get(target[0]) if target else None
    if first is not None and first < at:
        yield first, at
