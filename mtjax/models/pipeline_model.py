"""A model as a schedule sees it: whole, or cut where stages of a pipeline send each other the stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from mtjax.models.mixers.experts import COUNTS, REPORTED, router_reports
from mtjax.models.stack import Chunk
from mtjax.models.trunk import TEACHER, Batch, HiddenStates, Keys, Section, Trunk, batch_losses, run_sections
from mtjax.sharding.vocab import LossOptions

Tree = Any
Part = tuple[Batch, Batch, Keys]
"""A (micro)batch, the weights of its losses by name, and each sample's dropout key; None turns dropout off."""


@dataclass(frozen=True)
class TrunkPipeline:
    """`mtjax.sharding.schedules.microbatch_schedule.CutModel` of a trunk with one section or two.

    The wire is the stream of the last section. On its way through the first of two, a stream is the wire's `encoded`,
    where the second section will look for it.
    """

    model: Callable[[Tree], Trunk]
    """Of parameters."""
    options: LossOptions
    sections: Sequence[tuple[str, ...]]

    def loss_sums(self, parameters: Tree, microbatch: Part) -> dict[str, Array]:
        """Weighted sums of the losses."""
        batch, weights, keys = microbatch
        return _weighted(batch_losses(self.model(parameters), batch, keys, self.options), weights)

    def final_boundary(self, parameters: Tree, microbatch: Part) -> HiddenStates:
        """The stream behind the last section."""
        batch, _, keys = microbatch
        return run_sections(self.model(parameters), batch, keys)[0]

    def boundary(self, parameters: Tree, microbatch: Part) -> HiddenStates:
        """The input of the last section, with the other sections left out."""
        batch, _, keys = microbatch
        stream = None
        for section in self.model(parameters).sections.values():
            stream = section.embed(batch, keys, stream)
        assert stream is not None, "a model has a section"
        return stream

    def embed(self, section: int, parameters: Tree, wire: HiddenStates, microbatch: Part) -> HiddenStates:
        """The input of a section, from the wire behind the one before."""
        batch, _, keys = microbatch
        before = self._stream(section - 1, wire) if section else None
        return self._wire(section, self._section(parameters, section).embed(batch, keys, before), wire)

    def forward_layers(
        self, section: int, parameters: Tree, wire: HiddenStates, microbatch: Part, stage: Array, chunk: Array
    ) -> tuple[HiddenStates, dict[str, Array]]:
        """The layers of a chunk, and the weighted sums of what their routers report: those of a stage's layers are
        added up with those of the other stages once a step, and nothing of them travels with the stream."""
        batch, weights, keys = microbatch
        of, stream = self._section(parameters, section), self._stream(section, wire)
        part = Chunk(stage, chunk)
        x, states = of.stack(stream.x, of.context(batch, keys, stream), chunk=part)
        own = {name: weight for name, weight in weights.items() if name in REPORTED}
        sums = _weighted(router_reports([states]), own)
        sums = {name: of.stack.scatter_counts(a, part) if name in COUNTS else a for name, a in sums.items()}
        return self._wire(section, stream._replace(x=x), wire), sums

    def head_losses(self, parameters: Tree, wire: HiddenStates, microbatch: Part) -> dict[str, Array]:
        """Weighted sums of the losses of the head."""
        batch, weights, keys = microbatch
        own = {name: weight for name, weight in weights.items() if name not in REPORTED}
        return _weighted(self.model(parameters).losses(wire, batch, keys, self.options), own)

    def _section(self, parameters: Tree, number: int) -> Section:
        return self.model(parameters).sections[self.sections[number][0]]

    def _stream(self, section: int, wire: HiddenStates) -> HiddenStates:
        if section == len(self.sections) - 1:
            return wire
        assert wire.encoded is not None
        return HiddenStates(wire.encoded)

    def _wire(self, section: int, stream: HiddenStates, before: HiddenStates) -> HiddenStates:
        return stream if section == len(self.sections) - 1 else before._replace(encoded=stream.x)


@dataclass(frozen=True)
class DistilledTrunkPipeline(TrunkPipeline):
    """Beside a teacher: its output table stands among the parameters, frozen, and the losses find it in the batch."""

    def loss_sums(self, parameters: Tree, microbatch: Part) -> dict[str, Array]:
        """Weighted sums of the losses."""
        return super().loss_sums(parameters, _with_table(parameters, microbatch))

    def head_losses(self, parameters: Tree, wire: HiddenStates, microbatch: Part) -> dict[str, Array]:
        """Weighted sums of the losses of the head."""
        return super().head_losses(parameters, wire, _with_table(parameters, microbatch))


def _with_table(parameters: Tree, microbatch: Part) -> Part:
    batch, weights, keys = microbatch
    return {**batch, **parameters[TEACHER]}, weights, keys


def _weighted(values: dict[str, Array], weights: Batch) -> dict[str, Array]:
    """Sums over samples and tokens of what has a weight; of arrays, where there is one for each."""

    def one(values: Array, weights: Array) -> Array:
        each = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
        return (values * each).sum(range(weights.ndim))

    with jax.named_scope("loss"):
        return {name: one(values[name], weight) for name, weight in weights.items()}
