"""One record per parameter: its names, its shardings, how its gradient is reduced; shardings of batches."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtjax.config.shared_blocks import BLOCK
from mtjax.layout.layouts import (
    LARGEST_SCORES,
    LAYERS,
    NOT_SHARDED,
    Layout,
    gathers_in_compute_dtype,
    is_matrix,
    sharded_dimension,
)
from mtjax.layout.mesh import MeshShape
from mtjax.layout.rules import Axes, Rules
from mtjax.sharding.axes import partition_spec, with_axes
from mtjax.sharding.param_comm import GradReduction

Tree = Any


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of a model on a mesh; all shardings are those of the entire, stacked array.

    `records` is everywhere a tree of these, like the parameters'.
    """

    name: str
    """Dotted, such as `stack.layers.mlp.up.weight`."""
    logical_axes: tuple[str, ...]
    """Logical names of its dimensions."""
    shape: tuple[int, ...]
    is_matrix: bool
    """Whether it maps the hidden states to or from another space: such parameters have weight decay, and ZeRO gathers
    most of them in the compute type."""
    compute_spec: PartitionSpec
    """Sharding in which products use it: replicated over the axes of `grad_reduction`."""
    storage_spec: PartitionSpec
    """Sharding between steps, also of the reduced gradient and the moments of a trainable parameter."""
    grad_reduction: GradReduction
    """How its gradient is reduced, and which of its dimensions ZeRO shards."""
    between_groups: Axes
    """Mesh axes between sharding groups, over which the gradient of a shard is reduced after the last microbatch; ()
    without groups, and for a parameter that ZeRO does not shard."""
    deferred_axes: Axes
    """Mesh axes over which its gradient is reduced after the last microbatch, whatever the ZeRO stage: ranks along them
    see the same samples, and only some of them have a gradient of it. For example `stage`, for an embedding."""
    gather_dtype: str | None
    """Type in which it is gathered; None where ZeRO does not shard it."""
    is_read_every_tick: bool
    """Whether layers read it in every tick of a pipeline, though it is outside the stacks: a shared block. ZeRO-2 and 3
    gather it, and reduce its gradient, once per step, as ZeRO-1 does."""
    is_gathered_per_step: bool
    """Whether it is gathered once per step: by ZeRO-1 and 2, and by ZeRO-3 if `is_read_every_tick`."""
    is_trainable: bool
    """Whether it is trained; a frozen parameter has no gradient and no moments."""
    dtype: str = "float32"
    """Type in which it is stored between steps."""

    @property
    def is_stacked(self) -> bool:
        """Whether it holds all layers of a stack, along its first dimension."""
        return self.logical_axes[:1] == (LAYERS,)

    @property
    def has_zero_dimension(self) -> bool:
        """Whether ZeRO shards a dimension of it; of a frozen parameter only ZeRO-3 does (`gather_dtype`)."""
        return self.grad_reduction.dim != NOT_SHARDED

    @property
    def is_sharded_within_layers(self) -> bool:
        """Whether every rank has a shard of every layer, and not some of the layers."""
        return self.is_stacked and self.grad_reduction.dim > 0

    @property
    def layer_logical_axes(self) -> tuple[str, ...]:
        """Logical names of the dimensions where it is used: those of one layer when it is stacked."""
        return self.logical_axes[self.is_stacked :]

    @property
    def layer_grad_reduction(self) -> GradReduction:
        """`grad_reduction` where it is used: of one layer, without the leading dimension, when it is stacked."""
        whole = self.grad_reduction
        return replace(whole, dim=whole.dim - 1) if self.is_sharded_within_layers else whole


def dotted(path: Any) -> str:
    """Formats a path in a tree as a dotted name, such as `stack.layers.mlp.up.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def param_specs(
    logical_axes: Tree,
    shapes: Tree,
    layout: Layout,
    mesh_shape: MeshShape,
    compute_dtype: str,
    grad_reduce_dtype: str = "float32",
    is_trainable: Callable[[str], bool] = lambda name: True,
    master_dtype: str = "float32",
) -> Tree:
    """Builds the record of each parameter from trees of logical names and abstract arrays.

    ZeRO gathers matrices in `compute_dtype`, gradients are reduced over ranks in `grad_reduce_dtype`, and trained
    matrices are stored in `master_dtype`. `is_trainable` is asked by the parameter's dotted name. The rules of `layout`
    name only axes of this mesh.
    """

    def describe(path: Any, names: tuple[str, ...], array: Any) -> ParamSpec:
        """Describes a parameter from its path, its dimensions' logical names and its abstract array."""
        name, in_compute_dtype = dotted(path), gathers_in_compute_dtype(names)
        trainable, is_maximum = is_trainable(name), name.endswith(f".{LARGEST_SCORES}")
        # Ranks along `replicated` hold the same parameter. Along those in `token_axes` they process different samples
        # or tokens: the gradient is reduced over these. Along the others, stages, it is reduced after the last
        # microbatch.
        replicated = tuple(axis for axis in layout.rules.replicated_axes(names) if mesh_shape.degree((axis,)) > 1)
        deferred = tuple(axis for axis in replicated if axis not in layout.rules.token_axes)
        reduced = tuple(axis for axis in replicated if axis not in deferred)
        # ZeRO shards one dimension that is divisible by its axes; where there is none, the parameter stays replicated.
        candidates = tuple(axis for axis in layout.zero_axes if axis in reduced)
        divisible = sharded_dimension(names, array.shape, layout, mesh_shape, mesh_shape.degree(candidates))
        dim, comm_dtype = (NOT_SHARDED, "float32") if is_maximum else (divisible, grad_reduce_dtype)
        zero_axes = candidates if dim != NOT_SHARDED else ()
        # Only shards are reduced between sharding groups, and only once per step, as links between servers are slow.
        between = tuple(axis for axis in reduced if zero_axes and axis not in zero_axes)
        in_groups = tuple(axis for axis in reduced if axis not in between)
        compute_spec, shards = partition_spec(layout.rules, names), mesh_shape.degree(zero_axes)
        # A frozen parameter has no gradient and no moments to shard: ZeRO-1 and 2 leave it replicated.
        is_stored_sharded = bool(zero_axes) and (trainable or layout.zero == 3)
        is_read_every_tick = bool(deferred) and name.startswith(BLOCK)
        return ParamSpec(
            name=name,
            logical_axes=names,
            shape=tuple(array.shape),
            is_matrix=is_matrix(names),
            compute_spec=compute_spec,
            storage_spec=with_axes(compute_spec, dim, zero_axes) if is_stored_sharded else compute_spec,
            grad_reduction=GradReduction(in_groups, dim, zero_axes, shards, comm_dtype, is_maximum),
            between_groups=between,
            deferred_axes=deferred,
            gather_dtype=(compute_dtype if in_compute_dtype else "float32") if is_stored_sharded else None,
            is_read_every_tick=is_read_every_tick,
            is_gathered_per_step=is_stored_sharded and (layout.zero < 3 or is_read_every_tick),
            is_trainable=trainable,
            dtype=master_dtype if trainable and in_compute_dtype else "float32",
        )

    return jax.tree_util.tree_map_with_path(describe, logical_axes, shapes, is_leaf=lambda x: isinstance(x, tuple))


def trained(records: Tree, tree: Tree) -> Tree:
    """Selects the leaves of trained parameters from a tree like the parameters'."""
    if all(record.is_trainable for record in jax.tree.leaves(records)):
        return tree
    from mtjax.sharding.trainable import select_trainable

    return select_trainable(records, tree)


def partition_specs(records: Tree, which: Literal["compute_spec", "storage_spec"]) -> Tree:
    """Returns one of these shardings of every parameter, in a tree like the parameters'."""
    return jax.tree.map(lambda record: getattr(record, which), records)


def sharded_stacks(records: Iterable[ParamSpec]) -> list[list[int]]:
    """Returns the indices of the parameters that are sharded within layers, grouped by the length of their stack."""
    # Stacks of the same length can be gathered in one loop.
    stacks: dict[int, list[int]] = {}
    for index, record in enumerate(records):
        if record.is_sharded_within_layers:
            stacks.setdefault(record.shape[0], []).append(index)
    return list(stacks.values())


def logical_axes(state: nnx.State) -> dict[str, Any]:
    """Returns the logical names of every parameter's dimensions, in a tree of plain dicts like the parameters'."""

    def names(variable: nnx.Variable) -> nnx.Variable:
        # `vmap` over layers (`Stack`) adds a leading dimension, `layers`, to the array, but no name to its metadata.
        axes = tuple(variable.get_metadata()["axes"])
        return variable.replace((LAYERS,) * (len(variable.shape) - len(axes)) + axes)

    named = jax.tree.map(names, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return nnx.to_pure_dict(named)


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Converts a tree of partition specs to shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Returns the sharding of a batch: by samples, and by tokens with context parallelism."""
    return NamedSharding(mesh, partition_spec(rules, ("batch", "seq") if rules.seq else ("batch",)))


def first_dimensions(sharding: NamedSharding, count: int) -> NamedSharding:
    """Restricts a batch's sharding to an array of `count` dimensions, such as [batch]."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:count]))


def with_sharding(abstract: Tree, shardings: Tree) -> Tree:
    """Adds shardings to abstract arrays, so that a program can be lowered from them without a device."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)
