"""The shape of a mesh: the degree of each of its axes, and the parser of "64x8"."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from mtjax.errors import UserError, nearest
from mtjax.layout.rules import CONTEXT, DATA, EXPERT, MANUAL, MODEL, SHARD, STAGE, Axes

AXES: Axes = (*MANUAL, MODEL)
"""Mesh axes, outermost first: `model` varies fastest, so that its groups sit inside one server."""

MOST_DEVICES = 2**20
"""Devices of a mesh: ten times the largest cluster that trained one model."""
LONGEST_TEXT = 200
"""Most characters of a mesh as typed."""

ABBREVIATIONS = {DATA: "DP", STAGE: "PP", SHARD: "FSDP", CONTEXT: "CP", EXPERT: "EP", MODEL: "TP"}
"""Mesh axis -> the usual abbreviation of data, pipeline, sharded data, context, expert or tensor parallelism."""
OTHER_NAMES = {"dp_replicate": DATA, "dp_shard": SHARD} | {short.lower(): axis for axis, short in ABBREVIATIONS.items()}
"""Other name of a mesh axis, in lower case -> the axis: torchtitan's of sharding groups, and the abbreviations."""
PARALLELISM = {
    DATA: "data",
    STAGE: "pipeline",
    SHARD: "sharded data",
    CONTEXT: "context",
    EXPERT: "expert",
    MODEL: "tensor",
}
"""Mesh axis -> the kind of parallelism whose degree it has."""

AUTO = "auto"
"""The value of `mesh` that requests the planner's fastest mesh."""

POSITIONAL: dict[int, Axes] = {1: (DATA,), 2: (DATA, MODEL), 3: (DATA, STAGE, MODEL)}
"""The axes whose degrees are the numbers of "64", "64x8" and "8x4x8"."""


@dataclass(frozen=True, kw_only=True)
class MeshShape:
    """Degree of each mesh axis."""

    data: int = 1
    stage: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    model: int = 1

    @property
    def replica_shape(self) -> "MeshShape":
        """The mesh of one data parallel replica."""
        return replace(self, data=1)

    @property
    def size(self) -> int:
        """Devices of the mesh."""
        return self.degree(AXES)

    @cached_property  # asked for a hundred thousand times in a search
    def axes(self) -> Axes:
        """Axes of the JAX mesh of this shape: data and model always, others where their degree is above 1."""
        return tuple(axis for axis in AXES if axis in (DATA, MODEL) or getattr(self, axis) > 1)

    @property
    def batch_degree(self) -> int:
        """Number of shards of a batch: the ranks of sharding groups see other samples, and so do expert parallel ones
        outside expert layers."""
        return self.data * self.shard * self.expert

    def divides(self, width: int) -> bool:
        """Returns whether ZeRO without sharding groups divides the parameters of a model of this width."""
        return width % (self.batch_degree * self.context) == 0

    @property
    def has_pipeline(self) -> bool:
        """Whether there is pipeline parallelism."""
        return self.stage > 1

    @property
    def has_sharding_groups(self) -> bool:
        """Whether ZeRO shards within groups, which are replicas of each other."""
        return self.shard > 1

    @property
    def has_context_parallel(self) -> bool:
        """Whether there is context parallelism."""
        return self.context > 1

    @property
    def has_data_and_tensor(self) -> bool:
        """Whether there is both data and tensor parallelism. Where the tensor parallel degree is the number of GPUs of
        a server, gradients then cross other links than activations."""
        return min(self.data * self.shard, self.model) > 1

    @property
    def description(self) -> str:
        """The mesh as printed: "64x8 (data x model)", or with the name of each axis."""
        return f"{self} ({' x '.join(POSITIONAL[2])})" if self.axes == POSITIONAL[2] else str(self)

    @property
    def abbreviated(self) -> str:
        """The degrees of parallelism as the field abbreviates them: "DP 64 x TP 8"; "DP 1" on a single device."""
        degrees = [(short, getattr(self, axis)) for axis, short in ABBREVIATIONS.items()]
        return " x ".join(f"{short} {degree}" for short, degree in degrees if degree > 1) or "DP 1"

    def degree(self, axes: Axes) -> int:
        """Returns the number of shards of a dimension that is sharded over these axes; 1 for ()."""
        return math.prod(map(vars(self).__getitem__, axes))  # asked for a hundred thousand times, too

    def degree_text(self, axes: Axes) -> str:
        """Returns the degree of these axes in the terms of messages: "tensor parallel degree 8 (mesh axis model)"."""
        kinds, names = (" x ".join(map(name, axes)) for name in (PARALLELISM.__getitem__, str))
        return f"{kinds} parallel degree {self.degree(axes)} (mesh {'axis' if len(axes) == 1 else 'axes'} {names})"

    def __str__(self) -> str:
        """Returns the mesh as `parse_mesh` reads it: "64x8", or with names where it has other axes than data, model."""
        if self.axes == POSITIONAL[2]:
            return "x".join(str(getattr(self, axis)) for axis in self.axes)
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in self.axes)


def parse_mesh(text: str) -> MeshShape:
    """Parses "8" (DATA), "64x8" (DATAxMODEL), "8x4x8" (DATAxSTAGExMODEL) or axes by name in any order:
    "model=8,data=64" or "tp=8,dp=64".

    Axes that are not named have degree 1.

    Raises:
      UserError: the text has neither form, names an unknown axis or one twice, or has a degree below 1.
    """
    if text == AUTO:
        raise UserError(
            "mesh auto works with mtjax train and mtjax launch, which know their devices: give a shape, such as 64x8"
        )
    if len(text) > LONGEST_TEXT:
        raise UserError(f"mesh {text[:20]}... has {len(text)} characters, and no mesh has more than {LONGEST_TEXT}")
    # Not \d, which also matches digits of other scripts.
    if re.fullmatch(r"\s*[0-9]+(x[0-9]+){0,2}\s*", text):
        numbers = [int(number) for number in text.split("x")]
        degrees = dict(zip(POSITIONAL[len(numbers)], numbers, strict=True))
    else:
        degrees = _named_degrees(text)
    for axis, degree in degrees.items():
        if degree < 1:
            raise UserError(f"mesh {text!r} sets {axis} to {degree}; every axis needs at least 1")
    mesh_shape = MeshShape(**degrees)
    # A typo would otherwise cost a search, or memory for a mesh of that many devices.
    if mesh_shape.size > MOST_DEVICES:
        raise UserError(f"mesh {text!r} has {mesh_shape.size} devices; the maximum is {MOST_DEVICES}")
    return mesh_shape


def _named_degrees(text: str) -> dict[str, int]:
    """Parses "model=8,data=64" or "tp=8,dp=64"."""
    degrees: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([0-9]+)\s*", item)
        if not match:
            example = MeshShape(data=8, stage=4, model=8)
            raise UserError(
                f"mesh {text!r} is neither DATAxMODEL, such as 64x8, nor named, such as {example} or dp=8,pp=4,tp=8"
            )
        axis = OTHER_NAMES.get(match[1].lower(), match[1])
        if axis not in AXES:
            names = (*AXES, *(name for name in OTHER_NAMES if "_" in name))
            axes = ", ".join(f"{axis} ({ABBREVIATIONS[axis].lower()})" for axis in AXES)
            raise UserError(
                f"mesh {text!r}: no axis is called {match[1]!r}{nearest(match[1], names)}; the axes are {axes}"
            )
        if axis in degrees:
            raise UserError(f"mesh {text!r} sets {axis} twice; name each axis once")
        degrees[axis] = int(match[2])
    return degrees
