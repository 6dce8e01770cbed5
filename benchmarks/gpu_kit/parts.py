"""The parts of the benchmark in order of importance, and the work of each process."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from typing import Any

from gpu_kit.child import Child
from gpu_kit.shapes import REHEARSED, SHAPES
from mtjax.errors import UserError

OURS, THEIRS = "mtjax", "torch"
SINGLE = ("machine", "numbers", "features", "resume", "commands")
"""Parts of one process, which are modules of this package."""


@dataclass(frozen=True)
class Part:
    """A part with its time limit."""

    name: str
    budget: float
    """Time limit in seconds."""
    children: tuple[str, ...]
    """Its processes, which start together, and use the GPU exclusively one after the other in this order."""
    least_gpus: int = 1


def _speed(model: str, budget: float, *, alone: bool = False) -> Part:
    return Part(f"speed {model}", budget, (*(() if alone else (f"{THEIRS} {model}",)), f"{OURS} {model}"))


PARTS = (
    Part("machine", 60, ("machine",)),
    Part("numbers", 200, ("numbers",)),
    _speed("gpt2-1.2b", 150),
    _speed("llama2-7b-layers", 100, alone=True),
    Part("features", 200, ("features",)),
    Part("resume", 100, ("resume",)),
    Part("collectives", 90, ("collectives",), least_gpus=2),
    Part("meshes", 240, ("meshes",), least_gpus=2),
    _speed("llama-1b", 130),
    _speed("gpt2-medium", 100),
    _speed("gpt2-small", 90),
    _speed("llama-1b-fp8", 100, alone=True),
    _speed("llama2-7b-12-layers", 120, alone=True),
    _speed("llama3-8b-layers", 100, alone=True),
    _speed("gpt2-medium-dropout", 110),
    _speed("gpt2-medium-dropout-xla", 90, alone=True),
    _speed("gpt2-medium-loop", 80, alone=True),
    Part("commands", 100, ("commands",)),
    _speed("gpt2-xl", 150),
)


def chosen(only: tuple[str, ...], *, rehearse: bool) -> list[Part]:
    """Returns the selected parts, and `machine`, which the others need.

    Raises:
      UserError: a pattern matches no part.
    """
    for pattern in only:
        if not any(fnmatch(part.name, pattern) for part in PARTS):
            raise UserError(f"--only {pattern!r} matches no part: the parts are {', '.join(p.name for p in PARTS)}")
    unrehearsed = [f"speed {name}" for name in SHAPES if name not in REHEARSED] if rehearse else []
    selected = [p for p in PARTS if not only or p.name == "machine" or any(fnmatch(p.name, o) for o in only)]
    return [p for p in selected if p.name not in unrehearsed]


def work(child: Child, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the work that the process is named after, importing only the modules that it needs."""
    kind, _, model = child.name.partition(" ")
    memory = float(machine.get("memory", 0.0))
    if kind in SINGLE:
        return import_module(f"gpu_kit.{kind}").run(child)
    if kind == THEIRS:
        from gpu_kit import speed_torch

        return speed_torch.run(child, model, memory)
    if kind == OURS:
        from gpu_kit import speed

        return speed.run(child, model, memory)
    from gpu_kit import several

    return several.collectives(child) if kind == "collectives" else several.meshes(child, memory)
