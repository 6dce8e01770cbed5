"""Builds meshes of replicas; and reads each device's shards, replicas included: which should be equal, and what each
of them holds."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec, reshard

from mtjax.layout.rules import DATA
from mtjax.sharding.axes import REPLICATED

Tree = Any


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """Builds a mesh of the devices of each index along `data`: a replica that can run without the other ones."""
    # Slices of the device array along `data`, each with a `data` axis of size 1.
    names, axis = mesh.axis_names, mesh.axis_names.index(DATA)
    replicas = np.split(mesh.devices, mesh.shape[DATA], axis=axis)
    return [Mesh(replica, names, axis_types=(AxisType.Explicit,) * len(names)) for replica in replicas]


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
    # In the order of the mesh, as `map_shards` returns its rows.
    for position, device in enumerate(sharding.mesh.devices.flat):
        # By text: slices can't be hashed before Python 3.12.
        shards.setdefault(str(indices[device]), []).append(position)
    return list(shards.values())
