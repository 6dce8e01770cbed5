"""The shape of a mesh: the number of ways of each of its axes, and the one parser of "64x8"."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtjax.config.sizes import divisors
from mtjax.errors import UserError, nearest
from mtjax.theory.rules import CONTEXT, DATA, EXPERT, MANUAL, MODEL, STAGE, Axes

AXES: Axes = (*MANUAL, MODEL)
"""Mesh axes, outermost first: `model` varies fastest, so that its groups sit inside one server."""

MOST_DEVICES = 2**20
"""Devices of a mesh: ten times the largest cluster that trained one model."""
LONGEST = 200
"""Characters of a mesh in words."""

ABBREVIATIONS = {DATA: "DP", STAGE: "PP", CONTEXT: "CP", EXPERT: "EP", MODEL: "TP"}
"""Mesh axis -> the usual abbreviation of data, pipeline, context, expert or tensor parallelism."""

LEAST_SHARED = 4096
"""Tokens of a sample that each of the ranks which share it has at least, on meshes that mtjax proposes: a shorter
search, and attention has something to do while keys and values arrive."""

AUTO = "auto"
"""What stands for the mesh of a run that takes the planner's fastest."""

POSITIONAL: dict[int, Axes] = {1: (DATA,), 2: (DATA, MODEL), 3: (DATA, STAGE, MODEL)}
"""The axes that the numbers of "64", "64x8" and "8x4x8" are ways of."""


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Ways of each mesh axis."""

    data: int = 1
    stage: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1

    @property
    def replica_shape(self) -> "MeshShape":
        """Of one data way."""
        return replace(self, data=1)

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.degree(AXES)

    @property
    def axes(self) -> Axes:
        """The axes that a mesh of this shape is made with: data and model always, others of more than one way."""
        return tuple(axis for axis in AXES if axis in (DATA, MODEL) or getattr(self, axis) > 1)

    @property
    def batch_degree(self) -> int:
        """In how many parts the samples of a batch are split."""
        return self.data * self.expert

    @property
    def has_pipeline(self) -> bool:
        """Whether layers are spread over the stages of a pipeline."""
        return self.stage > 1

    @property
    def has_context_parallel(self) -> bool:
        """Whether several ranks share the tokens of each sample."""
        return self.context > 1

    @property
    def has_data_and_tensor(self) -> bool:
        """Whether several ranks share the batch, and several each layer. Where a server has as many GPUs as there are
        model ways, gradients then cross other links than activations."""
        return min(self.data, self.model) > 1

    @property
    def description(self) -> str:
        """As it is shown to people: "64x8 (data x model)", or with the name of each axis."""
        return f"{self} ({' x '.join(POSITIONAL[2])})" if self.axes == POSITIONAL[2] else str(self)

    @property
    def abbreviated(self) -> str:
        """The degrees of parallelism as the field abbreviates them: "DP 64 x TP 8"; "DP 1" on a single device."""
        degrees = [(short, getattr(self, axis)) for axis, short in ABBREVIATIONS.items()]
        return " x ".join(f"{short} {degree}" for short, degree in degrees if degree > 1) or "DP 1"

    def degree(self, axes: Axes) -> int:
        """The number of parts into which these axes together split a dimension; 1 for ()."""
        return math.prod(getattr(self, axis) for axis in axes)

    def __str__(self) -> str:
        """As `parse_mesh` reads it: "64x8", or with names where more than data and model are split."""
        if self.axes == POSITIONAL[2]:
            return "x".join(str(getattr(self, axis)) for axis in self.axes)
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in self.axes)


def meshes_within(mesh: MeshShape, experts: int, tokens: int) -> Iterator[MeshShape]:
    """A mesh, and those on which some of its data ways are ways of as many experts, or share samples of so many tokens;
    the mesh alone without experts and with short samples."""
    for context in context_degrees(tokens):
        data, left = divmod(mesh.data, context)
        for ways in divisors(math.gcd(data, experts or 1)) if not left else ():
            yield replace(mesh, data=data // ways, context=context, expert=ways)


def context_degrees(tokens: int) -> list[int]:
    """Numbers of ranks that may share a sample of so many tokens on a mesh that mtjax proposes; 1 first."""
    return divisors(tokens // LEAST_SHARED or 1)


def parse_mesh(text: str) -> MeshShape:
    """Reads "8" (DATA), "64x8" (DATAxMODEL), "8x4x8" (DATAxSTAGExMODEL) or axes by name in any order: "model=8,data=64"
    or "tp=8,dp=64".

    Axes that are not named have one way.

    Raises:
      UserError: the text is neither, names an unknown axis or one twice, or has a way below 1.
    """
    if text == AUTO:
        raise UserError(
            "mesh auto is for mtjax train and mtjax launch, which know their devices: give a shape, like 64x8"
        )
    if len(text) > LONGEST:
        raise UserError(f"mesh {text[:20]}... has {len(text)} characters, and no mesh has more than {LONGEST}")
    if re.fullmatch(r"\s*[0-9]+(x[0-9]+){0,2}\s*", text):
        numbers = [int(word) for word in text.split("x")]
        ways = dict(zip(POSITIONAL[len(numbers)], numbers, strict=True))
    else:
        ways = _named_ways(text)
    for axis, n in ways.items():
        if n < 1:
            raise UserError(f"mesh {text!r} gives {axis} {n} ways; every axis needs at least 1")
    shape = MeshShape(**ways)
    if shape.size > MOST_DEVICES:
        raise UserError(f"mesh {text!r} has {shape.size} devices, and mtjax counts up to {MOST_DEVICES}")
    return shape


def _named_ways(text: str) -> dict[str, int]:
    ways: dict[str, int] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]+)\s*", part)
        if not match:
            example = MeshShape(data=8, stage=4, model=8)
            raise UserError(
                f"mesh {text!r} is neither DATAxMODEL, like 64x8, nor named, like {example} or dp=8,pp=4,tp=8"
            )
        axis = next((axis for axis, short in ABBREVIATIONS.items() if short == match[1].upper()), match[1])
        if axis not in AXES:
            axes = ", ".join(f"{axis} ({ABBREVIATIONS[axis].lower()})" for axis in AXES)
            raise UserError(
                f"mesh {text!r}: no axis is called {match[1]!r}{nearest(match[1], AXES)}; the axes are {axes}"
            )
        if axis in ways:
            raise UserError(f"mesh {text!r} gives {axis} twice; name each axis once")
        ways[axis] = int(match[2])
    return ways


def check_no_context_parallel(mesh: MeshShape) -> None:
    """Checks that every rank has all tokens of its samples: text is not generated where ranks share them.

    Raises:
      UserError: several share them.
    """
    if mesh.has_context_parallel:
        raise UserError(
            f"mesh {mesh} shares the tokens of samples over context={mesh.context}, which is for training and "
            "evaluation: leave it out"
        )
