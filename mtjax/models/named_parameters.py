"""Some parameters of a model on a mesh: by their names, or those that another model has, too."""

from collections.abc import Collection
from typing import Any

import jax
from jax import Array

from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.param_specs import dotted

Tree = Any


def draw_named(sharded_model: ShardedModel, seed: int, names: Collection[str]) -> dict[str, Array]:
    """Draws some of the initial parameters of a run with this seed, by their dotted names."""

    def chosen(tree: Tree) -> dict[str, Any]:
        named = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: named[name] for name in names}

    # The compiler removes what draws the other parameters.
    draw = jax.jit(lambda key: chosen(sharded_model.draw(key)), out_shardings=chosen(sharded_model.parameter_sharding))
    return sharded_model.on_mesh(draw, jax.random.key(seed))


def without_other_modules(sharded_model: ShardedModel, parameters: Tree) -> Tree:
    """Selects a model's parameters from those of one with more modules, such as layers that only training runs."""

    def select(wanted: Tree, tree: Tree) -> Tree:
        return {k: select(below, tree[k]) for k, below in wanted.items()} if isinstance(wanted, dict) else tree

    return select(sharded_model.abstract_parameters, parameters)


def replicated_names(sharded_model: ShardedModel) -> list[str]:
    """Returns the names of parameters that ZeRO leaves replicated because none of their dimensions is divisible."""
    records = jax.tree.leaves(sharded_model.records) if sharded_model.layout.zero else []
    return [record.name for record in records if record.grad_reduction.axes and not record.has_zero_dimension]
