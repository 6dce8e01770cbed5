"""Measured time of each kernel of a step, compared with the prediction: which predictions a trace contradicts."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo import Module
from mtjax.inspect.kernels.source import SourceLines
from mtjax.inspect.phases import locate

_PARTS = 3
"""Parts of an operation's path that a kernel's name keeps."""
_WRAPPING = re.compile(
    r"^(jit|jvp|transpose|vmap|shard_map|checkpoint|remat\d*|rematted_computation|closed_call|eval_jaxpr|while|body)\b"
)


class KernelKind(NamedTuple):
    """What a kernel does: kernels of the same kind are one row."""

    phase: str
    cause: str
    """Matmuls, attention or memory-bound, as in `Measured.causes`."""
    path: str
    """End of the operation's path in the model, with N instead of numbers of layers."""
    source: str
    """The line of mtjax from which it comes; "" where XLA dropped it."""
    opcode: str
    """Opcode of the operation, or what a custom call calls."""


@dataclass(frozen=True)
class MeasuredKernel:
    """All kernels of one kind in a step of a device."""

    kind: KernelKind
    launches: float
    """In a step."""
    measured: float
    """Seconds of a step."""
    predicted: float | None
    """Seconds of a step; None where the hardware is not known."""

    @property
    def difference(self) -> float:
        """How many seconds more than predicted were measured; all of them without a prediction."""
        return self.measured - (self.predicted or 0.0)

    def to_json(self) -> dict[str, Any]:
        """Returns the row as JSON values."""
        return self.kind._asdict() | {
            "launches": self.launches,
            "measured": self.measured,
            "predicted": self.predicted,
        }


@dataclass(frozen=True)
class InstructionWork:
    """What an operation of the program does in a step."""

    cause: str
    predicted: float | None
    """Seconds of all its executions; None for loops, calls and branches, and where the hardware is not known."""


class Ran(NamedTuple):
    """Executions of an operation in a step of a device."""

    launches: float
    seconds: float


def by_kernel(
    step: CompiledStep, works: Mapping[str, InstructionWork], measured: Mapping[str, Ran]
) -> tuple[MeasuredKernel, ...]:
    """Returns the kernels of a step, those whose prediction is off by most seconds first.

    Args:
      step: the traced program.
      works: what its operations do, by name; no collectives.
      measured: how often and how long they ran, by name.
    """
    lines = SourceLines.of(step.text)
    found: dict[KernelKind, MeasuredKernel] = {}
    for name, kind in kinds(step.module, lines, works):
        ran, predicted = measured.get(name, Ran(0.0, 0.0)), works[name].predicted
        # Operations that cost nothing by either count would fill the list.
        if ran.launches or predicted:
            before = found.get(kind, MeasuredKernel(kind, 0.0, 0.0, None))
            expected = before.predicted if predicted is None else (before.predicted or 0.0) + predicted
            found[kind] = MeasuredKernel(kind, before.launches + ran.launches, before.measured + ran.seconds, expected)
    return tuple(sorted(found.values(), key=lambda kernel: -abs(kernel.difference)))


def kinds(module: Module, lines: SourceLines, works: Mapping[str, InstructionWork]) -> Iterator[tuple[str, KernelKind]]:
    """Yields the name and the kind of each operation that does some work."""
    for computation in module.computations.values():
        for instruction in computation.instructions:
            if work := works.get(instruction.name):
                phase, path, _ = locate(computation, instruction)
                source = lines.source_of(module, instruction)
                # A custom call says nothing; what it calls may be cuBLAS or cuDNN.
                opcode = instruction.attribute("custom_call_target") or instruction.opcode
                yield instruction.name, KernelKind(phase, work.cause, short(path), source, opcode)


def short(path: str) -> str:
    """Returns the last parts of an operation's path, without transformations and numbers of layers."""
    # Unrolled layers have a kernel each, of the same kind.
    parts = [re.sub(r"\d+", "N", part) for part in path.split("/") if not _WRAPPING.match(part)]
    return "/".join(parts[-_PARTS:])
