"""Reader of PTX, NVIDIA's virtual machine code: the instructions of a kernel, and which registers addresses depend on.

Grammar: PTX ISA, chapters "Syntax" and "Instruction Set" (docs.nvidia.com/cuda/parallel-thread-execution).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)[^{]*\{", re.DOTALL)
_LABEL = re.compile(r"\s*([$%\w]+):(?!:)\s*")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_REGISTER = re.compile(r"%[\w.]+")
MEMORY = ("ld", "st", "atom", "red")
"""Instructions that access memory."""


@dataclass(frozen=True)
class Op:
    """An instruction."""

    name: str
    """With its modifiers: "ld.global.nc.v4.b32"."""
    operands: tuple[str, ...]
    """As written; vectors in braces are one operand."""
    guard: str | None = None
    """The predicate register without which it does nothing."""
    is_negated: bool = False
    """Whether the guard must be false."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The name, divided at its dots."""
        return tuple(part for part in re.split(r"[.:]+", self.name) if part)

    @property
    def kind(self) -> str:
        """The name without modifiers."""
        return self.parts[0]

    @property
    def type(self) -> str:
        """The last modifier that is a type ("u32", "pred"); "" without one."""
        return next((part for part in reversed(self.parts) if _is_type(part)), "")

    @property
    def has_result(self) -> bool:
        """Whether the first operand is written."""
        return self.kind not in ("st", "red", "bra", "ret", "exit", "bar", "barrier", "membar", "fence", "trap", "call")

    @cached_property
    def written(self) -> tuple[str, ...]:
        """Registers that it writes."""
        if not self.has_result or not self.operands:
            return ()
        return tuple(_REGISTER.findall(self.operands[0]))

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Registers that it reads, its guard too."""
        sources = self.operands[1:] if self.has_result else self.operands
        found = [name for source in sources for name in _REGISTER.findall(source)]
        return (*found, *([self.guard] if self.guard else ()))

    @property
    def space(self) -> str:
        """Memory that it accesses: "global", "shared", "param", "local", "const", or "" for another or none."""
        if self.kind not in MEMORY:
            return ""
        spaces = ("global", "shared", "param", "local", "const")
        # Without a space the access is generic, and counts as one of global memory.
        return next((part for part in self.parts if part in spaces), "global")

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread accesses: of all elements of a vector."""
        count = next((int(part[1:]) for part in self.parts if part in ("v2", "v4", "v8")), 1)
        return count * width_of(self.type) // 8

    @property
    def address(self) -> str:
        """The text between the brackets; "" without any."""
        found = next((re.search(r"\[(.*)\]", operand) for operand in self.operands if "[" in operand), None)
        return found[1] if found else ""


@dataclass(frozen=True)
class PtxEntry:
    """An entry: its instructions in order."""

    name: str
    parameters: tuple[str, ...]
    ops: tuple[Op, ...]
    labels: Mapping[str, int]
    """Label -> index of the instruction after it."""

    def address_slice(self) -> frozenset[int]:
        """Returns the indices of instructions that addresses and branches depend on."""
        writers: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in op.written:
                writers.setdefault(name, []).append(i)
        pending = [name for op in self.ops for name in self._seeds(op)]
        seen, kept = set(pending), set()
        while pending:
            for i in writers.get(pending.pop(), ()):
                if i in kept:
                    continue
                kept.add(i)
                op = self.ops[i]
                # Only a load's address counts: what it loads is not known anyway.
                sources = op.read if op.kind not in ("ld", "atom") else (*_REGISTER.findall(op.address), op.guard or "")
                new = [name for name in sources if name not in seen]
                seen.update(new)
                pending += new
        return frozenset(kept)

    def in_loop(self) -> frozenset[int]:
        """Returns the indices of instructions between the target of a branch backward and the branch."""
        firsts = ((self.labels.get(op.operands[-1], i), i) for i, op in enumerate(self.ops) if op.kind == "bra")
        return frozenset(i for first, last in firsts if first < last for i in range(first, last + 1))

    @staticmethod
    def _seeds(op: Op) -> Iterator[str]:
        if op.guard:
            yield op.guard
        if op.space in ("global", "shared"):
            yield from _REGISTER.findall(op.address)


def parse(text: str) -> dict[str, PtxEntry]:
    """Parses a PTX file; name -> kernel. Instructions of unknown kinds are kept as they are."""
    text = _COMMENT.sub("", text)
    starts = list(_ENTRY.finditer(text))
    found = {}
    for i, match in enumerate(starts):
        end = starts[i + 1].start() if i + 1 < len(starts) else len(text)
        parameters = tuple(p.split("[")[0].split()[-1] for p in match[2].split(",") if p.strip())
        ops, labels = _body(text[match.end() : end])
        found[match[1]] = PtxEntry(match[1], parameters, tuple(ops), labels)
    return found


def _body(text: str) -> tuple[list[Op], dict[str, int]]:
    ops: list[Op] = []
    labels: dict[str, int] = {}
    # Semicolons end statements, not lines; braces of blocks and labels stand before a statement.
    for statement in text.split(";"):
        rest = statement.lstrip("{} \t\r\n")
        while label := _LABEL.match(rest):
            labels[label[1]] = len(ops)
            rest = rest[label.end() :].lstrip("{} \t\r\n")
        match = _STATEMENT.fullmatch(rest.strip())
        if match is None or rest.startswith("."):
            continue
        operands = tuple(operand.strip() for operand in _split(match[4]) if operand.strip())
        ops.append(Op(match[3], operands, match[2], match[1] == "!"))
    return ops, labels


def _split(text: str) -> list[str]:
    """Splits operands at commas outside of braces and brackets, and the two predicates of `%p|%q`."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _is_type(part: str) -> bool:
    return part == "pred" or re.fullmatch(r"(?:bf|[bsuf])\d+(?:x2)?", part) is not None


def width_of(kind: str) -> int:
    """Returns the bits of a type: 32 of "u32", of "f16x2" and where there is none, 1 of "pred"."""
    if kind == "pred":
        return 1
    digits = re.search(r"(\d+)(x2)?", kind)
    return int(digits[1]) * (2 if digits[2] else 1) if digits else 32
