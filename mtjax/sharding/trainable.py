"""Separates trainable from frozen parameters, and merges both where the model runs.

A tree of parameters is a dict of dicts; the trainable ones are the same tree without the frozen leaves. Only they are
differentiated, and have gradients, reductions and moments.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mtjax.sharding.gradients import LossFunction, MicrobatchSchedule
from mtjax.sharding.param_comm import ReplicatedParam, ShardedParam, WrappedParam, communicating_param, materialize
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.zero import materialize_outside_stacks, wrap_for_inference

Tree = Any


@partial(jax.tree_util.register_dataclass, data_fields=["parameter"], meta_fields=[])
@dataclass(frozen=True)
class NoGrad(WrappedParam):
    """A frozen parameter of a stack: it has no gradient."""

    parameter: Any
    """An array, or a `ShardedParam`."""
    # Nothing to differentiate by: `differentiable_shards` has None here, so that no gradient and no accumulator exists.
    shard = None

    def materialized(self) -> Any:
        """See `WrappedParam.materialized`."""
        return materialize(self.parameter)

    def with_shard(self, shard: Any) -> "NoGrad":
        """See `WrappedParam.with_shard`."""
        assert shard is None
        return self

    @property
    def communicating(self) -> ShardedParam | ReplicatedParam | None:
        """See `WrappedParam.communicating`."""
        return communicating_param(self.parameter)


def select_trainable(records: Tree, tree: Tree) -> Tree:
    """Selects the leaves of trainable parameters from a tree like the parameters'."""
    return _select(records, tree, is_trainable=True)


def select_frozen(records: Tree, tree: Tree) -> Tree:
    """Selects the leaves of frozen parameters from a tree like the parameters'; empty where all are trainable."""
    return _select(records, tree, is_trainable=False)


def _select(records: Tree, tree: Tree, is_trainable: bool) -> Tree:
    """Returns `tree` without the leaves of other parameters, and without dicts that become empty."""
    selected = {}
    for name, below in records.items():
        if isinstance(below, ParamSpec):
            if below.is_trainable == is_trainable:
                selected[name] = tree[name]
        elif subtree := _select(below, tree[name], is_trainable):
            selected[name] = subtree
    return selected


def merge_trees(trainable: Tree, frozen: Tree) -> Tree:
    """Merges two trees that have no leaf in common."""
    # Dicts that both have; leaves are in one of the two trees.
    both = {name: merge_trees(trainable[name], frozen[name]) for name in trainable if name in frozen}
    return {**trainable, **frozen, **both}


def bind_frozen(
    loss_function: LossFunction, records: Tree, parameters: Tree, schedule: MicrobatchSchedule
) -> LossFunction:
    """Makes a loss a function of its trainable parameters alone.

    Args:
      loss_function: a function of all parameters.
      records: of all parameters.
      parameters: all of them, this rank's shards.
      schedule: decides whether layers read stacked or unstacked parameters.
    """
    frozen = select_frozen(records, records)
    # Frozen parameters are not reduced or accumulated, so they are wrapped as for inference. Those of stacks are
    # marked: loops over layers then have no gradients and accumulators of them.
    used = materialize_outside_stacks(frozen, wrap_for_inference(frozen, select_frozen(records, parameters)))
    mark = lambda record, leaf: NoGrad(leaf) if record.is_stacked else leaf  # noqa: E731
    return loss_function.with_frozen(schedule.prepare_parameters(frozen, jax.tree.map(mark, frozen, used)))
