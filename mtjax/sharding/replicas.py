"""Reads each device's shards, replicas included: which devices should be equal, and what each of them holds."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec, reshard

from mtjax.sharding.axes import REPLICATED

Tree = Any


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
