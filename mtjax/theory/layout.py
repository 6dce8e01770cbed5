"""Layouts: which mesh axes split which logical axis, and what ZeRO splits besides."""

import dataclasses
from dataclasses import dataclass
from functools import cache

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import CONTEXT, DATA, EXPERT, MODEL, STAGE, Axes, Rules

TENSOR_RULES = Rules(
    batch=(DATA,),
    layers=(STAGE,),
    expert=(EXPERT,),
    heads=(MODEL,),
    kv_heads=(MODEL,),
    mlp=(MODEL,),
    vocab=(MODEL,),
)
"""The paper's column/row-parallel split: heads, MLP and vocabulary over `model`, samples over `data`; layers over the
stages of a pipeline, experts over `expert`."""

ZERO_AXES: Axes = (DATA, CONTEXT, EXPERT)
"""Mesh axes over which ZeRO splits what is replicated."""

NOT_SHARDED = -1
"""Stands for the dimension when ZeRO splits none."""

LAYERS = "layers"
"""Logical name of the dimension along which the layers of a stack are stacked: the first."""
ROUTER_BIAS = (LAYERS, "routes")
"""Logical names of the biases by which routers choose experts."""


@dataclass(frozen=True)
class Layout:
    """A way of spreading a model over the mesh."""

    rules: Rules = TENSOR_RULES
    """Of activations, and of parameters except for what `zero` splits."""
    zero: int = 0
    """What is split over `ZERO_AXES` besides: 1 the optimizer's state and parameters between steps, 2 also gradients, 3
    also parameters in use."""

    @property
    def sequence(self) -> bool:
        """Whether the residual stream is split along the sequence over `model`."""
        return MODEL in self.rules.act_seq

    @property
    def name(self) -> str:
        """For people: "tensor + sequence + ZeRO-1"."""
        parts = ("tensor", "sequence" if self.sequence else "", f"ZeRO-{self.zero}" if self.zero else "")
        return " + ".join(part for part in parts if part)


TENSOR = Layout()
"""The paper's own."""


def layout_of(model: Model, mesh: MeshShape, *, sequence_parallel: bool = False, zero: int = 0) -> Layout:
    """The layout of a model on a mesh.

    Grouped-query attention may have fewer key and value heads than the mesh has model ways: then each rank has all of
    them, and `mtjax.sharding.kv_heads` is what ranks do with them.
    """
    shares_heads = num_kv_heads(model) % mesh.degree(TENSOR_RULES.kv_heads) != 0
    return _layout(sequence_parallel, shares_heads, zero, mesh.axes)


@cache
def _layout(sequence_parallel: bool, shares_heads: bool, zero: int, axes: Axes) -> Layout:
    tokens = (CONTEXT,) if CONTEXT in axes else ()
    act_seq = (*tokens, MODEL) if sequence_parallel else tokens
    samples = (DATA, EXPERT) if EXPERT in axes else (DATA,)
    rules = dataclasses.replace(TENSOR_RULES.over(axes), batch=samples, seq=tokens, act_seq=act_seq)
    return Layout(dataclasses.replace(rules, kv_heads=()) if shares_heads else rules, zero)


def is_matrix(names: tuple[str, ...]) -> bool:
    """Whether a parameter maps the residual stream, or the rank of an adapter, to or from something else.

    Counting dimensions would take a stacked norm, [layers, embed], for a matrix, and likewise a bias per head.
    """
    return bool({"embed", "rank"} & set(names)) and any(name not in ("embed", LAYERS) for name in names)


def is_decayed(names: tuple[str, ...]) -> bool:
    """Whether weight decay applies: as in Megatron, to parameters of two or more dimensions per layer, except biases.

    Those are the matrices, and T5's table of a number for each bucket of distances and head.
    """
    return is_matrix(names) or "buckets" in names


def gathers_in_compute_dtype(names: tuple[str, ...]) -> bool:
    """Whether products take a parameter in the compute type, and ZeRO-3 gathers it so: matrices, but for routers',
    which are read in float32."""
    return is_matrix(names) and "routes" not in names


def sharded_dimension(names: tuple[str, ...], shape: tuple[int, ...], layout: Layout, ways: int) -> int:
    """The dimension of a parameter that ZeRO splits over `ways` ranks: the largest divisible one that is unsplit.

    `layers` is taken last, and by stage 1 only: the others need a part of every layer on every rank. Routers' biases
    stay whole: their gradients are 0, and XLA would leave out some of the sums.
    """
    if not layout.zero or ways == 1 or names == ROUTER_BIAS:
        return NOT_SHARDED
    free = [i for i, name in enumerate(names) if not layout.rules.axes(name) and shape[i] % ways == 0]
    inside = [i for i in free if names[i] != LAYERS]
    if inside:
        return max(inside, key=lambda i: shape[i])
    return free[0] if free and layout.zero == 1 else NOT_SHARDED
