"""The losses of a model on a mesh without dropout, and parameters by their names."""

import dataclasses
from collections.abc import Collection
from functools import cached_property
from typing import Any

import jax
from jax import Array

from mtjax.models.layer_context import with_text_lengths
from mtjax.models.sharded_model import Batch, ShardedModel
from mtjax.sharding.axes import use_rules
from mtjax.sharding.gradients import distributed_losses
from mtjax.sharding.param_specs import dotted

Tree = Any


class Evaluation:
    """Computes losses of a model, by one program for all batches of a size."""

    def __init__(self, placed: ShardedModel) -> None:
        self._placed = placed

    def __call__(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        """Computes each loss of a batch: its weighted sum, and the sum of the weights."""
        return self._placed.on_mesh(self._compiled, parameters, batch)

    def lower(self) -> jax.stages.Lowered:
        """Lowers the program from abstract values."""
        placed = self._placed
        return placed.on_mesh(self._compiled.lower, placed.restore_target, placed.abstract_batch())

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self._losses)

    def _losses(self, parameters: Tree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        placed = self._placed
        # The plain cross-entropy, comparable between runs.
        model = placed.trunk_losses(dataclasses.replace(placed.loss_options, label_smoothing=0.0, z_loss=0.0))
        weights, batch = placed.family.loss_weights(batch), with_text_lengths(placed.config.model, batch)
        with use_rules(placed.layout.rules):
            inputs, schedule = (batch, weights, None), placed.microbatch_schedule(1)
            sums = distributed_losses(model, parameters, inputs, placed.region, schedule)
            return {name: (total, weights[name].sum()) for name, total in sums.items()}


def draw_named(placed: ShardedModel, seed: int, names: Collection[str]) -> dict[str, Array]:
    """Draws some of the initial parameters of a run with this seed, by their dotted names."""

    def chosen(tree: Tree) -> dict[str, Any]:
        named = {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        return {name: named[name] for name in names}

    draw = jax.jit(lambda key: chosen(placed.draw(key)), out_shardings=chosen(placed.parameter_sharding))
    return placed.on_mesh(draw, jax.random.key(seed))


def parameters_of(placed: ShardedModel, parameters: Tree) -> Tree:
    """Selects a model's parameters from those of one with more modules, such as layers that only training runs."""

    def select(wanted: Tree, tree: Tree) -> Tree:
        return {k: select(below, tree[k]) for k, below in wanted.items()} if isinstance(wanted, dict) else tree

    return select(placed.abstract_parameters, parameters)
