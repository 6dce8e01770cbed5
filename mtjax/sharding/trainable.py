"""Parameters that are not trained: apart from those that are, and together with them again where the model runs.

A tree of parameters is a dict of dicts; those that learn are the same tree without the others. Only they are
differentiated, and have gradients, moments and sums over ranks.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from mtjax.sharding.param_comm import NoGrad
from mtjax.sharding.param_specs import ParamSpec
from mtjax.sharding.schedules.microbatch_schedule import MicrobatchSchedule, PipelineModel, Sums
from mtjax.sharding.zero import materialize_outside_stacks, wrap_for_inference

Tree = Any


def select_trainable(records: Tree, tree: Tree) -> Tree:
    """What a tree like the parameters' has for those that are trained."""
    return _pruned(records, tree, is_learnt=True)


def select_frozen(records: Tree, tree: Tree) -> Tree:
    """What it has for the others; empty where all are trained."""
    return _pruned(records, tree, is_learnt=False)


def _pruned(records: Tree, tree: Tree, is_learnt: bool) -> Tree:
    kept = {}
    for name, below in records.items():
        if isinstance(below, ParamSpec):
            if below.is_trainable == is_learnt:
                kept[name] = tree[name]
        elif part := _pruned(below, tree[name], is_learnt):
            kept[name] = part
    return kept


def merge_trees(learnt: Tree, frozen: Tree) -> Tree:
    """The whole tree of two of its parts, which have no leaf in common."""
    both = {name: merge_trees(learnt[name], frozen[name]) for name in learnt if name in frozen}
    return {**learnt, **frozen, **both}


@dataclass(frozen=True)
class WithFrozen:
    """A model some of whose parameters are not trained, as a schedule sees it: by the others alone."""

    model: PipelineModel
    frozen: Tree

    @classmethod
    def of(cls, model: PipelineModel, records: Tree, parameters: Tree, schedule: MicrobatchSchedule) -> PipelineModel:
        """The model with its frozen parameters, as they are used; itself where it has none.

        Args:
          model: by all parameters.
          records: of all parameters.
          parameters: all of a rank's.
          schedule: how layers take those of stacks.
        """
        own = select_frozen(records, records)
        if not own:
            return model
        used = materialize_outside_stacks(own, wrap_for_inference(own, select_frozen(records, parameters)))
        mark = lambda record, leaf: NoGrad(leaf) if record.is_stacked else leaf  # noqa: E731
        return cls(model, schedule.unstack_parameters(own, jax.tree.map(mark, own, used)))

    @property
    def sections(self) -> Any:
        """As `CutModel.sections` says; so do the others."""
        return self.model.sections

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """The losses of the whole model."""
        return self.model.loss_sums(merge_trees(parameters, self.frozen), microbatch)

    def final_boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """The wire behind the last section of the whole model."""
        return self.model.final_boundary(merge_trees(parameters, self.frozen), microbatch)

    def boundary(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Arrays like those that pass between the cuts."""
        return self.model.boundary(merge_trees(parameters, self.frozen), microbatch)

    def embed(self, section: int, parameters: Tree, wire: Tree, microbatch: Tree) -> Tree:
        """What the first layer of a section reads."""
        return self.model.embed(section, merge_trees(parameters, self.frozen), wire, microbatch)

    def forward_layers(
        self, section: int, parameters: Tree, wire: Tree, microbatch: Tree, stage: Array, chunk: Array
    ) -> tuple[Tree, Sums]:
        """Runs the layers of a chunk."""
        return self.model.forward_layers(section, merge_trees(parameters, self.frozen), wire, microbatch, stage, chunk)

    def head_losses(self, parameters: Tree, wire: Tree, microbatch: Tree) -> Sums:
        """The losses of the head, from the wire behind the last section."""
        return self.model.head_losses(merge_trees(parameters, self.frozen), wire, microbatch)
