"""Shardings of parameters, optimizer state and batches, from logical axis names."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mtjax.layout.rules import Rules
from mtjax.sharding.axes import REPLICATED, partition_spec

Tree = Any


def logical_axes(state: nnx.State) -> dict[str, Any]:
    """Returns the logical names of every parameter's dimensions, in a tree of plain dicts like the parameters'.

    A stacked module's arrays have one dimension more than names: its name is `layers`.
    """

    def names(variable: nnx.Variable) -> nnx.Variable:
        # `vmap` over layers (`Stack`) adds a leading dimension to the array, but no name to its metadata.
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


def min_and_sum_over_shards(
    function: Callable[[Tree], tuple[jax.Array, Sequence[jax.Array]]], arrays: Tree
) -> tuple[jax.Array, jax.Array]:
    """Computes two scalars of each device's shards, and returns the first's minimum over devices and the second's sum,
    which `function` returns as terms that depend on one array each; only scalars are sent."""

    def reduced(shards: Tree) -> tuple[jax.Array, jax.Array]:
        """Reduces the results of this rank's shards to scalars that are equal on all ranks."""
        least, terms = function(shards)
        by_axes: dict[tuple[str, ...], list[jax.Array]] = {}
        for term in terms:
            by_axes.setdefault(_varying(term), []).append(term)
        # Along other axes the shards are replicas, so that the values are equal already.
        total = sum((lax.psum(sum(each), axes) if axes else sum(each)) for axes, each in sorted(by_axes.items()))
        return lax.pmin(least, _varying(least)) if _varying(least) else least, jnp.asarray(total)

    specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, arrays)
    return jax.shard_map(reduced, in_specs=(specs,), out_specs=(REPLICATED, REPLICATED))(arrays)


def _varying(x: jax.Array) -> tuple[str, ...]:
    return tuple(sorted(jax.typeof(x).mat.varying))


def with_sharding(abstract: Tree, shardings: Tree) -> Tree:
    """Adds shardings to abstract arrays, so that a program can be lowered from them without a device."""
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), abstract, shardings)


def is_names(x: Any) -> bool:
    """Returns whether `x` is a tuple of logical names: a leaf of the trees above."""
    return isinstance(x, tuple)
