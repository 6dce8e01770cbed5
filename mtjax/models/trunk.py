"""Divides a model where pipeline stages can begin: embedding, sections of layers, and head.

A model's sections run one after the other. A section is a stack of layers, with the function that computes its input
from the batch and the output of the section before. So different stages can run the embedding, some layers of a stack
(`mtjax.models.stack.run_layers`), and the losses, if they send each other the hidden states.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Float, Key

from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.routers import router_reports
from mtjax.models.stack import InterleavedStacks, Stack
from mtjax.sharding.vocab import LossOptions

if TYPE_CHECKING:
    from mtjax.models.pattern_stacks import PatternStacks
    from mtjax.models.retro_stacks import RetroStacks

Batch = Mapping[str, Any]
Keys = Key[Array, " batch"] | None
"""A dropout key per sample; None turns dropout off."""
LOSS_WEIGHTS = "loss_weights"
"""Weights of a batch's losses, with which a decoder sums them at once."""


class HiddenStates(NamedTuple):
    """The activations between two layers, and between two sections."""

    x: Float[Array, "batch act_seq embed"]
    """Hidden states (the residual stream)."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """The output of an earlier section, which layers of this one read by cross-attention."""


class Section(NamedTuple):
    """A stack of layers, or several, and the functions that compute its inputs."""

    stack: "Stack | InterleavedStacks | PatternStacks | RetroStacks"
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
        context = section.context(batch, keys, hidden)
        x, after[name] = section.stack(hidden.x, context, (states or {}).get(name))
        hidden = hidden._replace(x=x)
    assert hidden is not None, "a model has a section"
    return hidden, after


def batch_losses(trunk: Trunk, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
    """Computes the values of each loss of a batch, float32, not weighted, and the routers' losses and counters.

    Args:
      trunk: the model.
      batch: its arrays, [batch, ...].
      keys: dropout keys; None turns dropout off.
      options: of the cross-entropy.
    """
    output, states = run_sections(trunk, batch, keys)
    return trunk.losses(output, batch, keys, options) | router_reports(list(states.values()))
