"""Parameters that are not trained: apart from those that are, and together with them again where the model runs.

A tree of parameters is a dict of dicts; those that learn are the same tree without the others. Only they are
differentiated, and have gradients, moments and sums over ranks.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from mtjax.sharding.parameters import Frozen
from mtjax.sharding.records import ParameterRecord
from mtjax.sharding.schedules.schedule import CutModel, Schedule, Sums
from mtjax.sharding.zero import materialize_outside_stacks, wrap_for_use

Tree = Any


def learnt(records: Tree, tree: Tree) -> Tree:
    """What a tree like the parameters' has for those that are trained."""
    return _pruned(records, tree, is_learnt=True)


def frozen(records: Tree, tree: Tree) -> Tree:
    """What it has for the others; empty where all are trained."""
    return _pruned(records, tree, is_learnt=False)


def _pruned(records: Tree, tree: Tree, is_learnt: bool) -> Tree:
    kept = {}
    for name, below in records.items():
        if isinstance(below, ParameterRecord):
            if below.is_learnt == is_learnt:
                kept[name] = tree[name]
        elif part := _pruned(below, tree[name], is_learnt):
            kept[name] = part
    return kept


def together(learnt: Tree, frozen: Tree) -> Tree:
    """The whole tree of two of its parts, which have no leaf in common."""
    both = {name: together(learnt[name], frozen[name]) for name in learnt if name in frozen}
    return {**learnt, **frozen, **both}


@dataclass(frozen=True)
class WithFrozen:
    """A model some of whose parameters are not trained, as a schedule sees it: by the others alone."""

    model: CutModel
    frozen: Tree

    @classmethod
    def of(cls, model: CutModel, records: Tree, parameters: Tree, schedule: Schedule) -> CutModel:
        """The model with its frozen parameters, as they are used; itself where it has none.

        Args:
          model: by all parameters.
          records: of all parameters.
          parameters: all of a rank's.
          schedule: how layers take those of stacks.
        """
        own = frozen(records, records)
        if not own:
            return model
        used = materialize_outside_stacks(own, wrap_for_use(own, frozen(records, parameters)))
        mark = lambda record, leaf: Frozen(leaf) if record.is_stacked else leaf  # noqa: E731
        return cls(model, schedule.apart(own, jax.tree.map(mark, own, used)))

    @property
    def sections(self) -> Any:
        """As `CutModel.sections` says; so do the others."""
        return self.model.sections

    def loss_sums(self, parameters: Tree, microbatch: Tree) -> Sums:
        """The losses of the whole model."""
        return self.model.loss_sums(together(parameters, self.frozen), microbatch)

    def output(self, parameters: Tree, microbatch: Tree) -> Tree:
        """The wire behind the last section of the whole model."""
        return self.model.output(together(parameters, self.frozen), microbatch)

    def wire(self, parameters: Tree, microbatch: Tree) -> Tree:
        """Arrays like those that pass between the cuts."""
        return self.model.wire(together(parameters, self.frozen), microbatch)

    def enter(self, section: int, parameters: Tree, wire: Tree, microbatch: Tree) -> Tree:
        """What the first layer of a section reads."""
        return self.model.enter(section, together(parameters, self.frozen), wire, microbatch)

    def run(
        self, section: int, parameters: Tree, wire: Tree, microbatch: Tree, stage: Array, chunk: Array
    ) -> tuple[Tree, Sums]:
        """Runs the layers of a chunk."""
        return self.model.run(section, together(parameters, self.frozen), wire, microbatch, stage, chunk)

    def leave(self, parameters: Tree, wire: Tree, microbatch: Tree) -> Sums:
        """The losses of the head, from the wire behind the last section."""
        return self.model.leave(together(parameters, self.frozen), wire, microbatch)
