"""From a model's logical axis names to the sharding of each parameter and of the optimizer's state."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, reshard

from mtjax.sharding.axes import REPLICATED, dimension_axes, partition_spec
from mtjax.sharding.context.zigzag import token_order
from mtjax.theory.rules import Rules

Tree = Any


def logical_axes(state: nnx.State) -> dict[str, Any]:
    """The names of every parameter's dimensions, in a tree of plain dicts like the parameters'.

    A module that was stacked has one dimension more than its names: that one is `layers`.
    """

    def names(variable: nnx.Variable) -> nnx.Variable:
        axes = tuple(variable.get_metadata()["axes"])
        return variable.replace(("layers",) * (len(variable.shape) - len(axes)) + axes)

    named = jax.tree.map(names, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    return nnx.to_pure_dict(named)


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """Shardings of a tree of partition specs."""
    return jax.tree.map(lambda place: NamedSharding(mesh, place), specs)


def optimizer_shardings(optimizer: optax.GradientTransformation, parameters: Tree, placed: Tree, mesh: Mesh) -> Tree:
    """Shardings of the optimizer's state: moments like their parameters, counters on every device.

    Left to itself, a jitted `init` replicates the moments on every device.
    """
    state = jax.eval_shape(optimizer.init, parameters)
    return optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state,
        placed,
        transform_non_params=lambda _: replicated(mesh),
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, rules: Rules) -> NamedSharding:
    """A batch: split by samples, and by their tokens where ranks share these."""
    return NamedSharding(mesh, partition_spec(rules, ("batch", "seq") if rules.seq else ("batch",)))


def of_dimensions(sharding: NamedSharding, count: int) -> NamedSharding:
    """Where an array of a batch with `count` dimensions lives: one that has samples only is split by these."""
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:count]))


def process_rows(sharding: NamedSharding, global_batch_size: int) -> np.ndarray:
    """The rows of a global batch that this process' devices hold, ascending: all that it needs to load.

    Args:
      sharding: `batch_sharding`.
      global_batch_size: rows.
    """
    places = of_dimensions(sharding, 1).addressable_devices_indices_map((global_batch_size,))
    rows = [np.arange(global_batch_size)[index] for index in places.values() if index is not None]
    return np.unique(np.concatenate(rows))


def global_batch(
    sharding: NamedSharding, local: Mapping[str, np.ndarray], global_batch_size: int
) -> dict[str, jax.Array]:
    """One global array of each array of rows that this process loaded, without sending any of them elsewhere.

    Where ranks share the tokens of a sample, columns are put in the order in which they have them.
    """
    rows, ways = process_rows(sharding, global_batch_size), context_degree(sharding)

    def assemble(array: np.ndarray) -> jax.Array:
        if ways > 1 and array.ndim > 1:
            array = array[:, token_order(ways, array.shape[1])]

        def part(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(global_batch_size)
            first = int(np.searchsorted(rows, start))
            return array[(slice(first, first + stop - start), *index[1:])]

        place = of_dimensions(sharding, array.ndim)
        return jax.make_array_from_callback((global_batch_size, *array.shape[1:]), place, part)

    return {name: assemble(array) for name, array in local.items()}


def context_degree(sharding: NamedSharding) -> int:
    """Ranks that share the tokens of a sample of a batch."""
    return math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, 1))


def min_over_shards(function: Callable[[Tree], jax.Array], arrays: Tree) -> jax.Array:
    """The minimum over devices of the scalar `function` of each device's parts of `arrays`; only scalars are sent."""

    def least(parts: Tree) -> jax.Array:
        own = function(parts)
        axes = tuple(sorted(jax.typeof(own).mat.varying))
        return lax.pmin(own, axes) if axes else own

    places = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    return jax.shard_map(least, in_specs=(places,), out_specs=REPLICATED)(arrays)


def map_shards(function: Callable[[Tree], jax.Array], arrays: Tree) -> jax.Array:
    """The numbers that `function` makes of each device's own parts of `arrays`: [devices, numbers], on every device.

    Rows are in the order of the mesh. Devices that should hold the same are not trusted to: each reads its own.
    """
    places = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    every_axis = PartitionSpec(tuple(jax.sharding.get_abstract_mesh().axis_names))
    own = jax.shard_map(lambda parts: function(parts)[None], in_specs=(places,), out_specs=every_axis, check_vma=False)
    return reshard(own(arrays), REPLICATED)


def holders(array: Any) -> list[list[int]]:
    """Places in the mesh of the devices that hold the same part of an array, a list for each part."""
    sharding = array.sharding
    indices = sharding.devices_indices_map(array.shape)
    parts: dict[str, list[int]] = {}
    for place, device in enumerate(sharding.mesh.devices.flat):
        parts.setdefault(str(indices[device]), []).append(place)
    return list(parts.values())


def with_sharding(abstract: Tree, placed: Tree) -> Tree:
    """Abstract arrays that know where they live: enough to lower a program without a device."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, placed)


def is_names(x: Any) -> bool:
    """Whether `x` is a tuple of logical names: a leaf of the trees above."""
    return isinstance(x, tuple)
