"""The line of source code of an instruction, from the tables of stack frames in HLO text."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mtjax.inspect.hlo import Instruction, Module

_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
_NUMBER = re.compile(r"(\w+)=(\d+)")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_PACKAGE = "/mtjax/"
_WRAPPERS = ("/mtjax/sharding/axes.py",)
"""Files whose functions call others, which say more."""


@dataclass
class SourceLines:
    """The tables of a module."""

    tables: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> "SourceLines":
        """Reads the tables at the beginning of an HLO module; without them no line is known."""
        tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        current: dict[int, str] | None = None
        for line in text.splitlines()[1:]:
            if line in tables:
                current = tables[line]
            elif row := _ROW.match(line):
                if current is not None:
                    current[int(row[1])] = row[2] if row[2] is not None else row[3]
            elif line.strip():
                break  # the first computation
        return cls(tables)

    def source_of(self, module: Module, instruction: Instruction) -> str:
        """Returns the line of an instruction or, of a fusion without one, of what it fuses; "" where XLA dropped it."""
        return next((line for line in map(self.line_of, _attributes(module, instruction)) if line), "")

    def line_of(self, attributes: str) -> str:
        """Returns "models/ops.py:42", the innermost line of mtjax of an instruction, or "" where XLA dropped it."""
        match = re.search(r"stack_frame_id=(\d+)", attributes)
        frame = int(match[1]) if match else 0
        seen: set[int] = set()
        while frame and frame not in seen and frame in self.tables.get("StackFrames", {}):
            seen.add(frame)
            numbers = _numbers(self.tables["StackFrames"][frame])
            location = _numbers(self.tables["FileLocations"].get(numbers.get("file_location_id", 0), ""))
            path = self.tables["FileNames"].get(location.get("file_name_id", 0), "")
            # From the innermost frame outwards: those of jax and flax come first and are the same for all operations.
            if _PACKAGE in path and not path.endswith(_WRAPPERS):
                return f"{path.rsplit(_PACKAGE, 1)[1]}:{location.get('line', 0)}"
            frame = numbers.get("parent_frame_id", 1) - 1  # XLA prints one more than the parent's number
        return ""


def _attributes(module: Module, instruction: Instruction) -> Iterator[str]:
    """Yields the attributes of an operation, and of those that it fuses, results first."""
    yield instruction.attributes
    for callee in module.callees(instruction):
        yield callee.root.attributes
        yield from (inner.attributes for inner in reversed(callee.instructions))


def _numbers(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in _NUMBER.findall(text)}
