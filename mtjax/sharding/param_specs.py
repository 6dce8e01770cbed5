"""One record per parameter: names, where it, its gradient and its moments live, and how its gradient is summed."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec

from mtjax.sharding.axes import partition_spec, with_axes
from mtjax.sharding.param_comm import GradReduction
from mtjax.sharding.placement import is_names
from mtjax.theory.layout import (
    LAYERS,
    NOT_SHARDED,
    ZERO_AXES,
    Layout,
    gathers_in_compute_dtype,
    is_matrix,
    sharded_dimension,
)
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import Axes

Tree = Any


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of a model on a mesh; all places refer to the dimensions of the entire, stacked array."""

    name: str
    """Dotted, say `stack.layers.mlp.up.weight`."""
    axes: tuple[str, ...]
    """Logical names of its dimensions."""
    shape: tuple[int, ...]
    is_matrix: bool
    """Whether it maps the residual stream to or from something else: such parameters decay, and ZeRO gathers most of
    them in the compute type."""
    compute_spec: PartitionSpec
    """Where it lives as products take it: replicated over the axes of `total`."""
    storage_spec: PartitionSpec
    """Where it lives between steps; where it is trained so do its summed gradient and its moments."""
    grad_reduction: GradReduction
    """How its gradient is summed, and which of its dimensions ZeRO splits."""
    deferred_axes: Axes
    """Mesh axes over which its gradient is summed after the last microbatch, whatever ZeRO does: ranks along them see
    the same samples, and at most some of them have a gradient of it."""
    gather_dtype: str | None
    """Type in which it is gathered, by ZeRO-3 for each use and by ZeRO-1 and 2 once a step; None where ZeRO does not
    split it."""
    is_gathered_per_step: bool
    """Whether it is gathered once a step, by ZeRO-1 and 2."""
    is_trainable: bool
    """Whether it is trained; one that is frozen has no gradient and no moments."""

    @property
    def is_stacked(self) -> bool:
        """Whether it holds all layers of a stack, along its first dimension."""
        return self.axes[:1] == (LAYERS,)

    @property
    def is_zero_sharded(self) -> bool:
        """Whether ZeRO splits it where it is trained; a frozen one ZeRO-3 alone does."""
        return self.grad_reduction.dim != NOT_SHARDED

    @property
    def is_sharded_within_layers(self) -> bool:
        """Whether ZeRO splits every layer of it, not the layers among ranks."""
        return self.is_stacked and self.grad_reduction.dim > 0

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Logical names where it is used: of one layer when it is stacked."""
        return self.axes[self.is_stacked :]

    @property
    def layer_grad_reduction(self) -> GradReduction:
        """`total` where it is used: of one layer when it is stacked."""
        return (
            replace(self.grad_reduction, dim=self.grad_reduction.dim - 1)
            if self.is_sharded_within_layers
            else self.grad_reduction
        )


def dotted(path: Any) -> str:
    """A path in a tree as names are written everywhere, say `stack.layers.mlp.up.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def param_specs(
    axes: Tree,
    shapes: Tree,
    layout: Layout,
    mesh: MeshShape,
    compute_dtype: str,
    grad_reduce_dtype: str = "float32",
    is_trainable: Callable[[str], bool] = lambda name: True,
) -> Tree:
    """A record of each parameter, in a tree like theirs.

    Args:
      axes: logical names.
      shapes: abstract arrays.
      layout: its rules name only axes of this mesh.
      mesh: ways of each axis.
      compute_dtype: in which ZeRO gathers matrices.
      wire: type in which gradients are summed over ranks.
      is_learnt: whether the parameter of a dotted name is trained.
    """

    def record(path: Any, names: tuple[str, ...], array: Any) -> ParamSpec:
        name = dotted(path)
        return _record(name, names, array.shape, layout, mesh, compute_dtype, grad_reduce_dtype, is_trainable(name))

    return jax.tree_util.tree_map_with_path(record, axes, shapes, is_leaf=is_names)


def _record(
    name: str,
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    layout: Layout,
    mesh: MeshShape,
    compute_dtype: str,
    wire: str,
    is_learnt: bool,
) -> ParamSpec:
    rules = layout.rules
    replicas = tuple(axis for axis in rules.replicas(axes) if mesh.degree((axis,)) > 1)
    late = tuple(axis for axis in replicas if axis not in rules.shared_work)
    replicas = tuple(axis for axis in replicas if axis not in late)
    parts = tuple(axis for axis in ZERO_AXES if axis in replicas)
    dim = sharded_dimension(axes, shape, layout, mesh.degree(parts))
    parts = () if dim == NOT_SHARDED else parts
    whole = partition_spec(rules, axes)
    is_stored_split = bool(parts) and (is_learnt or layout.zero == 3)
    sent = compute_dtype if gathers_in_compute_dtype(axes) else "float32"
    return ParamSpec(
        name=name,
        axes=axes,
        shape=tuple(shape),
        is_matrix=is_matrix(axes),
        compute_spec=whole,
        storage_spec=with_axes(whole, dim, parts) if is_stored_split else whole,
        grad_reduction=GradReduction(replicas, dim, parts, mesh.degree(parts), wire),
        deferred_axes=late,
        gather_dtype=sent if is_stored_split else None,
        is_gathered_per_step=is_stored_split and layout.zero < 3,
        is_trainable=is_learnt,
    )


def partition_specs(records: Tree, which: Literal["compute_spec", "storage_spec"]) -> Tree:
    """Where every parameter lives in one of these senses: partition specs in a tree like the parameters'."""
    return jax.tree.map(lambda record: getattr(record, which), records)


def sharded_stacks(records: Iterable[ParamSpec]) -> list[list[int]]:
    """Numbers of the parameters that ZeRO splits inside layers, grouped by the length of their stack."""
    stacks: dict[int, list[int]] = {}
    for number, record in enumerate(records):
        if record.is_sharded_within_layers:
            stacks.setdefault(record.shape[0], []).append(number)
    return list(stacks.values())


def replicated_names(records: Tree, zero: int) -> list[str]:
    """Names of parameters that ZeRO leaves replicated because none of their dimensions is divisible."""
    left = [r.name for r in jax.tree.leaves(records) if r.grad_reduction.axes and not r.is_zero_sharded]
    return left if zero else []
