"""Some parameters of a model on a mesh: by their names, or those that another model has, too."""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array

from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.param_specs import dotted

Tree = Any


def draw_named(placed: ShardedModel, seed: int, names: Collection[str]) -> dict[str, Array]:
    """Draws some of the initial parameters of a run with this seed, by their dotted names."""

    def chosen(tree: Tree) -> dict[str, Any]:
        named = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: named[name] for name in names}

    # The compiler removes what draws the other parameters.
    draw = jax.jit(lambda key: chosen(placed.draw(key)), out_shardings=chosen(placed.parameter_sharding))
    return placed.on_mesh(draw, jax.random.key(seed))


def without_other_modules(placed: ShardedModel, parameters: Tree) -> Tree:
    """Selects a model's parameters from those of one with more modules, such as layers that only training runs."""

    def select(wanted: Tree, tree: Tree) -> Tree:
        return {k: select(below, tree[k]) for k, below in wanted.items()} if isinstance(wanted, dict) else tree

    return select(placed.abstract_parameters, parameters)


def replicated_names(placed: ShardedModel) -> list[str]:
    """Returns the names of parameters that ZeRO leaves replicated because none of their dimensions is divisible."""
    records = jax.tree.leaves(placed.records) if placed.layout.zero else []
    return [record.name for record in records if record.grad_reduction.axes and not record.is_zero_sharded]
