"""A model, divided where a schedule may cut it: embedding, one or more stacks of layers, and head.

A model's sections run one after the other. A section is a stack of layers with the function that makes its input, from
the batch and the output of the section before. So different devices can run the embedding, some layers of a stack
(`mtjax.models.stack.run_layers`), and the losses, if they send each other the stream.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jax import Array
from jaxtyping import Float, Key

from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.experts import router_reports
from mtjax.models.mixers.mixer import State
from mtjax.models.stack import InterleavedStacks, Stack
from mtjax.sharding.vocab import LossOptions

Batch = Mapping[str, Any]
Keys = Key[Array, " batch"] | None
"""A dropout key per sample; None turns dropout off."""

TEACHER, TEACHER_TABLE = "teacher", "teacher_table"
"""Arrays of a batch that a teacher adds: its final hidden states, which its output table makes logits of; or, of a task
other than the next token, its outputs alone."""
HARD, SOFT = "hard_loss", "soft_loss"
"""The losses then: by the labels, and by the teacher's probabilities."""


class HiddenStates(NamedTuple):
    """Everything that passes from one layer to the next, and from one section to the next."""

    x: Float[Array, "batch act_seq embed"]
    """The residual stream."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """The output of an earlier section, for the layers of this one to read."""


class Section(NamedTuple):
    """A stack of layers, or two, and what it reads."""

    stack: Stack | InterleavedStacks
    embed: Callable[[Batch, Keys, HiddenStates | None], HiddenStates]
    """(batch, keys, output of the section before, None for the first) -> what the first layer reads."""
    context: Callable[[Batch, Keys, HiddenStates], LayerContext]
    """(batch, keys, stream) -> what every layer reads besides the residual stream; without communication."""
    others: tuple[str, ...] = ()
    """Names of the parameters of other stacks than that which the section is called after."""


class Headless(Protocol):
    """A model up to its head."""

    @property
    def sections(self) -> Mapping[str, Section]:
        """In the order in which they run; the name of each is that of its stack's parameters: "encoder.stack"."""
        ...


class Trunk(Headless, Protocol):
    """A model as a schedule sees it."""

    def losses(self, stream: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """The head: values of each loss, float32, not weighted, from the output of the last section."""
        ...


def run_sections(
    trunk: Headless, batch: Batch, keys: Keys, states: Mapping[str, State] | None = None
) -> tuple[HiddenStates, dict[str, State]]:
    """Runs a model up to its head.

    Args:
      trunk: the model.
      batch: its arrays, [batch, ...].
      keys: dropout's.
      states: of the layers of sections that have any, by the sections' names.

    Returns:
      The output of the last section, and every section's states, None where its layers have none.
    """
    stream, after = None, {}
    for name, section in trunk.sections.items():
        stream = section.embed(batch, keys, stream)
        context = section.context(batch, keys, stream)
        x, after[name] = section.stack(stream.x, context, (states or {}).get(name))
        stream = stream._replace(x=x)
    assert stream is not None, "a model has a section"
    return stream, after


def batch_losses(trunk: Trunk, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
    """The values of each loss of a batch by its name, float32, not weighted, and what routers report; `keys` turn
    dropout on."""
    stream, states = run_sections(trunk, batch, keys)
    return trunk.losses(stream, batch, keys, options) | router_reports(list(states.values()))
