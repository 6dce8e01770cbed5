"""Divides a model where pipeline stages can begin: embedding, sections of layers, and head.

A model's sections run one after the other. A section is a stack of layers, with the function that computes its input
from the batch and the output of the section before. So different stages can run the embedding, some layers of a stack
(`mtjax.models.stack_chunks`), and the losses, if they send each other the hidden states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import jax
from jax import Array
from jaxtyping import Float, Key

from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.recompute import LoopOverLayers
from mtjax.sharding.vocab import LossOptions

Tree = Any
Batch = Mapping[str, Any]
Keys = Key[Array, " batch"] | None
"""A dropout key per sample; None turns dropout off."""
Microbatch = tuple[Batch, Batch, Keys]
"""A (micro)batch, the weights of its losses by name, and each sample's dropout key; None turns dropout off."""
LOSS_WEIGHTS = "loss_weights"
"""Weights of a batch's losses, with which a decoder sums them at once."""


class HiddenStates(NamedTuple):
    """The activations between two layers, and between two sections."""

    x: Float[Array, "batch act_seq embed"]
    """Hidden states (the residual stream)."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """The output of an earlier section, which layers of this one read by cross-attention."""


class RunsLayers(Protocol):
    """A stack of layers, or several."""

    def over_layers(self, context: LayerContext, states: State = None) -> LoopOverLayers:
        """See `mtjax.models.stack.Stack.over_layers`."""
        ...


class Section(NamedTuple):
    """A stack of layers, or several, and the functions that compute its inputs."""

    stack: RunsLayers
    embed: Callable[[Batch, Keys, HiddenStates | None], HiddenStates]
    """(batch, keys, output of the section before, None for the first) -> input of the first layer."""
    context: Callable[[Batch, Keys, HiddenStates], LayerContext]
    """(batch, keys, hidden states) -> other inputs of every layer; without communication."""
    other_stacks: tuple[str, ...] = ()
    """Names of the parameters of the section's other stacks; the section has the name of its first."""


class Headless(Protocol):
    """A model up to its head."""

    @property
    def sections(self) -> Mapping[str, Section]:
        """The sections in their order; the name of each is that of its stack's parameters: "encoder.stack"."""
        ...


class Trunk(Headless, Protocol):
    """A model with its head."""

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Runs the head on the output of the last section.

        Returns:
          The values of each loss, float32 [batch] or [batch, seq], not weighted; or their weighted sum, [], if the
          batch has `LOSS_WEIGHTS`.
        """
        ...


def run_sections(
    trunk: Headless, batch: Batch, keys: Keys, states: Mapping[str, State] | None = None
) -> tuple[HiddenStates, dict[str, State]]:
    """Runs a model up to its head.

    Args:
      trunk: the model.
      batch: its arrays, [batch, ...].
      keys: dropout keys.
      states: of the layers of sections that have any, by the sections' names.

    Returns:
      The output of the last section, and every section's states, None where its layers have none.
    """
    # T5's decoder embeds its input and reads the encoder's output: `embed` gets the hidden states of the section
    # before.
    hidden, after = None, {}
    for name, section in trunk.sections.items():
        hidden = section.embed(batch, keys, hidden)
        # Outside the loop over layers: all layers read the same positions, rotations and segments.
        context = section.context(batch, keys, hidden)
        with jax.named_scope("layers"):
            run_layers = section.stack.over_layers(context, (states or {}).get(name))
            x, after[name] = run_layers(hidden.x)
        hidden = hidden._replace(x=x)
    assert hidden is not None, "a model has a section"
    return hidden, after


@dataclass(frozen=True)
class TrunkLosses:
    """A trunk as a function of its parameters: the `LossModel` of ranks that have all layers."""

    model: Callable[[Tree], Trunk]
    """Builds the model from its parameters."""
    options: LossOptions
    sections: Sequence[tuple[str, ...]]
    """Names of the parameters of each section's stacks, in the order in which sections run."""

    def with_frozen(self, frozen: Tree) -> Self:
        """See `LossModel.with_frozen`."""
        from mtjax.sharding.trainable import merge_trees

        return replace(self, model=lambda parameters: self.model(merge_trees(parameters, frozen)))

    def loss_sums(self, parameters: Tree, microbatch: Microbatch) -> dict[str, Array]:
        """Computes the losses of a microbatch, each a weighted sum, [], and the routers' losses and counters."""
        model, (batch, weights, keys) = self.model(parameters), microbatch
        if self.options.at_once and "loss" in weights:
            # A decoder sums its loss itself, so that its gradients are computed with it.
            batch = {**batch, LOSS_WEIGHTS: weights["loss"]}
        output, states = run_sections(model, batch, keys)
        losses = model.losses(output, batch, keys, self.options)
        if any(state is not None for state in states.values()):
            from mtjax.models.routers import router_reports

            losses |= router_reports(list(states.values()))
        return weighted_sums(losses, weights)

    def final_boundary(self, parameters: Tree, microbatch: Microbatch) -> HiddenStates:
        """See `LossModel.final_boundary`."""
        batch, _, keys = microbatch
        return run_sections(self.model(parameters), batch, keys)[0]


def weighted_sums(values: dict[str, Array], weights: Batch) -> dict[str, Array]:
    """Sums values over samples and tokens, weighted.

    Args:
      values: by name, [batch, ...] or [batch, seq, ...]; or [] if they are a weighted sum already.
      weights: by name, [batch] or [batch, seq]; values without a weight are left out.

    Returns:
      [...] by name: scalars for losses.
    """

    def one(values: Array, weights: Array) -> Array:
        """Sums a loss times its weights, [batch, seq] each, or of samples."""
        # Summed already, with its gradients (`LOSS_WEIGHTS`).
        if not values.ndim:
            return values
        each = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
        return (values * each).sum(range(weights.ndim))

    with jax.named_scope("loss"):
        return {name: one(values[name], weight) for name, weight in weights.items()}
