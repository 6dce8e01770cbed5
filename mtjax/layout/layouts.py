"""Layouts: the mesh axes over which logical axes are sharded, and what ZeRO shards in addition."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.config.ssm import ssm_groups
from mtjax.layout.mesh import MeshShape
from mtjax.layout.rules import CONTEXT, DATA, EXPERT, MODEL, SHARD, STAGE, Axes, Rules

TENSOR_RULES = Rules(
    batch=(DATA,),
    layers=(STAGE,),
    expert=(EXPERT,),
    heads=(MODEL,),
    kv_heads=(MODEL,),
    groups=(MODEL,),
    mlp=(MODEL,),
    vocab=(MODEL,),
)
"""Column/row-parallel sharding of arXiv 1909.08053: heads, MLP and vocabulary over `model`, samples over `data`; layers
over pipeline stages, experts over `expert`."""


def zero_axes_of(axes: Axes) -> Axes:
    """Returns the mesh axes over which ZeRO shards what is replicated otherwise, of a mesh with `axes`: without
    sharding groups all over which a batch is sharded, otherwise those of a group."""
    # Ranks along these axes have different tokens, and the same parameters but for experts.
    return (SHARD if SHARD in axes else DATA, CONTEXT, EXPERT)


NOT_SHARDED = -1
"""In place of a dimension: ZeRO shards none."""
LARGEST_SCORES = "largest_scores"
"""Name of a parameter of zeros whose gradient is the largest attention score of each head."""

LAYERS = "layers"
"""Logical name of the dimension along which the layers of a stack are stacked: the first."""
ROUTER_BIAS = (LAYERS, "routes")
"""Logical names of routers' biases."""
OPERANDS = "operands"
"""Logical name of a dimension that only scales of 8-bit products have; they are not weights of the model."""


@dataclass(frozen=True)
class Layout:
    """How a model is sharded over the mesh."""

    rules: Rules = TENSOR_RULES
    """Sharding of activations, and of parameters before ZeRO."""
    zero: int = 0
    """ZeRO stage over `zero_axes`: 1 shards the optimizer state, and parameters between steps; 2 also gradients; 3 also
    parameters in use."""

    @cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.zero))

    def __hash__(self) -> int:
        """Returns the hash, computed once: a search asks caches for the layouts of thousands of plans."""
        return self._hash

    @property
    def zero_axes(self) -> Axes:
        """Mesh axes over which ZeRO shards what is replicated otherwise; also axes that the mesh doesn't have."""
        return zero_axes_of(self.rules.token_axes)

    @property
    def shards_sequence(self) -> bool:
        """Whether there is sequence parallelism: the residual stream is sharded along the sequence over `model`."""
        return MODEL in self.rules.act_seq

    @property
    def shards_width(self) -> bool:
        """Whether tensor parallelism is 2D: the residual stream is sharded along its width over `model`."""
        return MODEL in self.rules.act_embed

    @property
    def name(self) -> str:
        """Name in tables: "tensor + sequence + ZeRO-1"."""
        names = (
            "tensor 2D" if self.shards_width else "tensor",
            "sequence" if self.shards_sequence else "",
            f"ZeRO-{self.zero}" if self.zero else "",
        )
        return " + ".join(name for name in names if name)


TENSOR = Layout()
"""Tensor parallelism of arXiv 1909.08053."""


def layout_of(
    model: Model, mesh_shape: MeshShape, *, sequence_parallel: bool = False, zero: int = 0, splits_width: bool = False
) -> Layout:
    """Returns the layout of a model on a mesh.

    Grouped-query attention may have fewer key and value heads than tensor parallel ranks: then these are replicated,
    and `mtjax.sharding.kv_heads` selects a rank's. Likewise the groups of state-space layers.
    """
    sizes = {"kv_heads": num_kv_heads(model), "groups": ssm_groups(model)}
    # Where the degree does not divide the number, ranks share a head (`divisibility` checks that they can).
    replicated = tuple(name for name, size in sizes.items() if size % mesh_shape.degree(TENSOR_RULES.mesh_axes(name)))
    return _layout(sequence_parallel, replicated, zero, mesh_shape.axes, splits_width)


@cache
def _layout(sequence_parallel: bool, replicated: tuple[str, ...], zero: int, axes: Axes, splits_width: bool) -> Layout:
    tokens = (CONTEXT,) if CONTEXT in axes else ()
    # CONTEXT outermost: a rank of context parallelism has its tokens, which sequence parallelism shards further.
    act_seq = (*tokens, MODEL) if sequence_parallel else tokens
    # Expert parallel ranks have other samples, too: outside experts `expert` is one more data parallel axis.
    samples = tuple(axis for axis in (DATA, SHARD, EXPERT) if axis in axes)
    width = (MODEL,) if splits_width else ()
    rules = dataclasses.replace(
        TENSOR_RULES.restricted_to(axes), batch=samples, seq=tokens, act_seq=act_seq, act_embed=width
    )
    return Layout(dataclasses.replace(rules, **dict.fromkeys(replicated, ())), zero)


def zero_problems(mesh_shape: MeshShape, zero: int) -> Iterator[str]:
    """Yields what a stage of ZeRO is not compatible with."""
    if zero not in range(4):
        yield f"ZeRO has stages 0 to 3, not {zero}"
    if mesh_shape.has_sharding_groups and not zero:
        yield (
            f"shard={mesh_shape.shard} in mesh {mesh_shape} is the number of ranks over which ZeRO shards, and "
            "zero is 0: use --zero 1, 2 or 3, or data in place of shard"
        )


def is_matrix(names: tuple[str, ...]) -> bool:
    """Returns whether a parameter is a matrix, not a vector: it maps between the residual stream, an adapter's rank or
    a latent, and another dimension."""
    # Not by the number of dimensions: a stacked norm is [layers, embed], and a bias may be per head.
    # A latent's norm has the latent alone; its matrices have heads or the width beside it.
    if "latent" in names:
        return len(set(names) - {LAYERS}) > 1
    # `every_expert` counts vectors: the biases of experts.
    vectors = ("embed", LAYERS, "every_expert")
    return bool({"embed", "rank"} & set(names)) and any(name not in vectors for name in names)


def is_decayed(names: tuple[str, ...]) -> bool:
    """Returns whether weight decay applies: as in Megatron, to parameters of two or more dimensions per layer, except
    biases. Those are the matrices, T5's table of relative biases, and convolutions.
    """
    return is_matrix(names) or "buckets" in names or "taps" in names


def gathers_in_compute_dtype(names: tuple[str, ...]) -> bool:
    """Returns whether matmuls read a parameter, and ZeRO gathers it, in the compute dtype: matrices but routers', which
    are read in float32."""
    return is_matrix(names) and "routes" not in names


def sharded_dimension(
    names: tuple[str, ...], shape: tuple[int, ...], layout: Layout, mesh_shape: MeshShape, degree: int
) -> int:
    """Returns the dimension along which ZeRO shards a parameter over `degree` ranks: the largest unsharded one that is
    divisible; without tensor parallelism the outermost one (after `layers`), if tensor parallelism would shard it.
    `NOT_SHARDED` if there is none.
    """
    # XLA: would drop some reductions of routers' biases, whose gradients are 0: they are never sharded.
    if not layout.zero or degree == 1 or names == ROUTER_BIAS or OPERANDS in names:
        return NOT_SHARDED
    # XLA: collectives have the sharded dimension outermost; of any other one, shards and gradients are transposed.
    outer = int(names[0] == LAYERS)
    axes = layout.rules.mesh_axes(names[outer]) if outer < len(names) else ()
    if axes and mesh_shape.degree(axes) == 1 and shape[outer] % degree == 0:
        return outer
    divisible = [i for i, name in enumerate(names) if not layout.rules.mesh_axes(name) and shape[i] % degree == 0]
    in_layer = [i for i in divisible if names[i] != LAYERS]
    if in_layer:
        return max(in_layer, key=lambda i: shape[i])
    # `layers` is the last choice, and for stage 1 only: stages 2 and 3 need a shard of every layer on every rank.
    return divisible[0] if divisible and layout.zero == 1 else NOT_SHARDED
