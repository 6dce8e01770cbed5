"""Shardings of the states of optimizers other than AdamW, which keep different arrays of different parameters."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtjax.layout.optimizer_states import OptimizerStates, kept_arrays
from mtjax.sharding.param_specs import ParamSpec, dotted

Tree = Any


def shardings_by_name(state: Tree, records: Tree, states: OptimizerStates, mesh: Mesh) -> Tree:
    """Returns the sharding of each array: that of its parameter, along the dimensions it has of it; others replicated.

    Args:
      state: abstract arrays.
      records: `ParamSpec` of every trained parameter.
      states: the optimizer.
      mesh: of the run.
    """
    named = {record.name: record for record in jax.tree.leaves(records)}

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        """Finds the parameter by the end of a leaf's path; leaves of no parameter are replicated."""
        words = dotted(path).split(".")
        # From the longest end: a parameter's name may be the end of another's.
        for first in range(1, len(words)):
            record = named.get(".".join(words[first:]))
            if record is not None:
                return NamedSharding(mesh, _spec(record, words[first - 1], states, leaf.shape))
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)


def _spec(record: ParamSpec, array: str, states: OptimizerStates, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition of a state array of a parameter."""
    if shape == record.shape:
        return record.storage_spec
    dims = kept_arrays(states, record.logical_axes, record.shape)[array]
    return PartitionSpec(*(record.storage_spec[dim] for dim in dims))
