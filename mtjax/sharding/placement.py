"""Shardings of parameters, optimizer state and batches, from logical axis names."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from mtjax.layout.rules import Rules
from mtjax.sharding.axes import REPLICATED, dimension_axes, partition_spec

Tree = Any


def logical_axes(state: nnx.State) -> dict[str, Any]:
    """Returns the logical names of every parameter's dimensions, in a tree of plain dicts like the parameters'.

    A stacked module's arrays have one dimension more than names: its name is `layers`.
    """

    def names(variable: nnx.Variable) -> nnx.Variable:
        axes = tuple(variable.get_metadata()["axes"])
        return variable.replace(("layers",) * (len(variable.shape) - len(axes)) + axes)

    named = jax.tree.map(names, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return nnx.to_pure_dict(named)


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Converts a tree of partition specs to shardings."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def optimizer_shardings(
    optimizer: optax.GradientTransformation, parameters: Tree, param_shardings: Tree, mesh: Mesh
) -> Tree:
    """Returns the shardings of the optimizer's state: moments like their parameters, counters replicated."""
    # XLA: without them, a jitted `init` replicates the moments on every device.
    state = jax.eval_shape(optimizer.init, parameters)
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        param_shardings,
        transform_non_params=lambda _: replicated(mesh),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """Returns the sharding of a batch: by samples, and by tokens with context parallelism."""
    return NamedSharding(mesh, partition_spec(rules, ("batch", "seq") if rules.seq else ("batch",)))


def of_dimensions(sharding: NamedSharding, count: int) -> NamedSharding:
    """Restricts a batch's sharding to an array of `count` dimensions, such as [batch]."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:count]))


def process_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """Returns the rows of a global batch on this process' devices, ascending: those that it has to load.

    Args:
      sharding: `batch_sharding`.
      global_batch_size: rows.
    """
    indices = of_dimensions(sharding, 1).addressable_devices_indices_map((global_batch_size,))
    rows = [np.arange(global_batch_size)[index] for index in indices.values() if index is not None]
    return np.unique(np.concatenate(rows))


def global_batch(
    sharding: NamedSharding, local: Mapping[str, np.ndarray], global_batch_size: int
) -> dict[str, jax.Array]:
    """Assembles global arrays from the rows that each process loaded, without communication.

    With context parallelism, columns are permuted to the order in which ranks have them (zig-zag).

    Args:
      sharding: `batch_sharding`.
      local: arrays [rows of this process, ...].
      global_batch_size: rows of the global arrays.
    """
    # `make_array_from_callback` calls `shard` for this process' devices alone.
    rows, degree = process_rows(sharding, global_batch_size), context_degree(sharding)

    def assemble(array: np.ndarray) -> jax.Array:
        """Assembles [global_batch_size, ...] from this process' rows."""
        if degree > 1 and array.ndim > 1:
            from mtjax.sharding.context.zigzag import token_order

            # A contiguous shard of the permuted columns is a rank's early and late chunk.
            array = array[:, token_order(degree, array.shape[1])]

        def shard(index: Any) -> np.ndarray:
            """Cuts a device's shard out of this process' rows, which are some of the global batch's."""
            start, stop, _ = index[0].indices(global_batch_size)
            # A device's rows are consecutive, and `rows` is ascending, so they are consecutive here too.
            first = int(np.searchsorted(rows, start))
            return array[(slice(first, first + stop - start), *index[1:])]

        array_sharding = of_dimensions(sharding, array.ndim)
        return jax.make_array_from_callback((global_batch_size, *array.shape[1:]), array_sharding, shard)

    return {name: assemble(array) for name, array in local.items()}


def context_degree(sharding: NamedSharding) -> int:
    """Returns the context parallel degree of a batch's sharding."""
    return math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, 1))


def min_over_shards(function: Callable[[Tree], jax.Array], arrays: Tree) -> jax.Array:
    """Computes the minimum over devices of the scalar `function` of each device's shards; only scalars are sent."""

    def least(shards: Tree) -> jax.Array:
        value = function(shards)
        axes = tuple(sorted(jax.typeof(value).mat.varying))
        return lax.pmin(value, axes) if axes else value

    specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    return jax.shard_map(least, in_specs=(specs,), out_specs=REPLICATED)(arrays)


def map_shards(function: Callable[[Tree], jax.Array], arrays: Tree) -> jax.Array:
    """Applies `function` to each device's shards of `arrays`.

    Args:
      function: shards -> [numbers].
      arrays: sharded or replicated.

    Returns:
      [devices, numbers] in the order of the mesh, replicated. Devices with replicas of a shard are not assumed to be
      equal: each reads its replica.
    """
    specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    # One row per device: [devices, numbers] is sharded over all mesh axes together. `check_vma` would reject results
    # that are typed as equal on some ranks.
    every_axis = PartitionSpec(tuple(jax.sharding.get_abstract_mesh().axis_names))
    mapped = jax.shard_map(
        lambda shards: function(shards)[None], in_specs=(specs,), out_specs=every_axis, check_vma=False
    )
    return reshard(mapped(arrays), REPLICATED)


def holders(array: Any) -> list[list[int]]:
    """Returns, for each shard of an array, the indices in the mesh of the devices that hold it."""
    sharding = array.sharding
    indices = sharding.devices_indices_map(array.shape)
    shards: dict[str, list[int]] = {}
    for position, device in enumerate(sharding.mesh.devices.flat):
        shards.setdefault(str(indices[device]), []).append(position)
    return list(shards.values())


def with_sharding(abstract: Tree, shardings: Tree) -> Tree:
    """Adds shardings to abstract arrays, so that a program can be lowered from them without a device."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def is_names(x: Any) -> bool:
    """Returns whether `x` is a tuple of logical names: a leaf of the trees above."""
    return isinstance(x, tuple)
