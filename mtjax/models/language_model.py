"""A language model: its tables, its sections of layers, and its losses.

A model's sections run one after the other. A section is a stack of layers, with the function that computes its input
from the batch and the output of the section before. So different stages can run the embedding, some layers of a stack
(`mtjax.models.stack_chunks`), and the losses, if they send each other the hidden states.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int, Key

from mtjax.config import Config, Model
from mtjax.config.sizes import embedding_width, padded_vocab_size
from mtjax.families.registry import FAMILIES, load_part
from mtjax.layout.weights import embedding_weights
from mtjax.models.layer_context import RESIDUAL, LayerContext, MixerState
from mtjax.models.layer_loop import RunStack
from mtjax.models.ops import Linear, draw_normal
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import LossOptions, OutputOptions, vocab_parallel_embedding

Tree = Any
Batch = Mapping[str, Any]
Keys = Key[Array, " batch"] | None
"""A dropout key per sample; None turns dropout off."""
Microbatch = tuple[Batch, Batch, Keys]
"""A (micro)batch, the weights of its losses by name, and each sample's dropout key; None turns dropout off."""
LOSS_WEIGHTS = "loss_weights"
"""Name of the weights of a decoder's loss, in a batch whose loss and gradient are computed in one pass."""
EMBEDDING_SITE = 2**31 - 1
"""Dropout site of the embeddings, distinct from every layer's number: both are folded into the sample's key."""


def vocabulary_table(model: Model, key: Array, std: float | None = None) -> nnx.Param:
    """Draws a table [vocab, embed] with a row for each token of the padded vocabulary; `std` is init_std when None."""
    sizes = embedding_weights(embedding_width(model), rows=padded_vocab_size(model))
    return draw_normal(key, sizes["embedding"], model.init_std if std is None else std)


def position_table(model: Model, length: int, key: Array) -> nnx.Param | None:
    """Draws a table [positions, embed] of `length` positions; returns None where positions are not learned."""
    sizes = embedding_weights(model.hidden_size, positions=length)["positions"]
    return draw_normal(key, sizes, model.init_std) if model.position == "learned" else None


def embed_tokens(
    table: nnx.Param,
    positions: nnx.Param | None,
    tokens: Int[Array, "batch seq"],
    dtype: jax.typing.DTypeLike,
    position_ids: Int[Array, "batch seq"] | None = None,
    local_positions: Int[Array, " seq"] | None = None,
    scale: float = 1.0,
    project_in: Linear | None = None,
) -> Float[Array, "batch act_seq embed"]:
    """Looks up the tokens' rows of the vocabulary's table, scales them, takes them to the width of the hidden states if
    they have another, and adds the vectors of their positions if learned; the result has type `dtype`.

    Args:
      table: [vocab, embed], float32.
      positions: [positions, embed], float32; None where positions are not learned.
      position_ids: of each token; its position in the sample when None.
      local_positions: of this rank's tokens in their samples; 0, 1, ... when None.
      scale: factor of the rows, rounded to `dtype`, as Gemma's is.
      project_in: the matrix from the table's width to that of the hidden states; None if they are equal.
    """
    x = vocab_parallel_embedding(table[...], tokens, dtype)
    x = x if scale == 1 else x * jnp.asarray(scale, dtype)
    x = x if project_in is None else project_in(x)
    if positions is None:
        return x
    vectors = positions[...].astype(dtype)
    if position_ids is None:
        # The same for all samples: a slice of the table, [seq, embed], sharded like the hidden states' sequence.
        local_vectors = vectors[: tokens.shape[1]] if local_positions is None else vectors[local_positions]
        return x + reshard(local_vectors, spec("act_seq", "act_embed"))
    return x + vectors.at[position_ids].get(out_sharding=spec(*RESIDUAL))


class WithVocabulary(nnx.Module):
    """A model whose last product is with the embedding table (tied), or with a separate output table."""

    embedding: nnx.Param
    output: nnx.Param | None
    """None where it is tied to the embedding table."""
    output_bias: nnx.Param | None = None
    """[vocab]: of the logits, if any."""
    output_options = OutputOptions(0)
    """Factor and soft cap of the logits; the vocabulary's size is an argument of `logit_options`."""

    @property
    def output_table(self) -> nnx.Param:
        """[vocab, embed]"""
        return self.embedding if self.output is None else self.output

    @property
    def output_parameters(self) -> tuple[Any, Array | None]:
        """The output table, and the bias of the logits, if any."""
        return self.output_table[...], None if self.output_bias is None else self.output_bias[...]

    def logit_options(self, vocab_size: int) -> OutputOptions:
        """Returns how logits of this many tokens are computed."""
        return replace(self.output_options, vocab_size=vocab_size)


class HiddenStates(NamedTuple):
    """The activations between two layers, and between two sections: all that a pipeline stage sends to the next."""

    x: Float[Array, "batch act_seq embed"]
    """Hidden states (the residual stream)."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """The output of an earlier section, which layers of this one read by cross-attention."""


class RunsLayers(Protocol):
    """A stack of layers, or several."""

    def over_layers(self, context: LayerContext, states: MixerState = None) -> RunStack:
        """See `mtjax.models.layer.Stack.over_layers`."""
        ...


class Section(NamedTuple):
    """A stack of layers, or several, and the functions that compute its inputs: only the first stage embeds, and each
    stage computes the context itself, as stages send each other hidden states alone."""

    stack: RunsLayers
    embed: Callable[[Batch, Keys, HiddenStates | None], HiddenStates]
    """(batch, keys, output of the section before, None for the first) -> input of the first layer."""
    context: Callable[[Batch, Keys, HiddenStates], LayerContext]
    """(batch, keys, hidden states) -> other inputs of every layer; without communication."""
    other_stacks: tuple[str, ...] = ()
    """Names of the parameters of the section's other stacks; the section has the name of its first."""


class Trunk(Protocol):
    """A model up to its head."""

    @property
    def sections(self) -> Mapping[str, Section]:
        """The sections in their order; the name of each is that of its stack's parameters: "encoder.stack"."""
        ...


class TrunkWithHead(Trunk, Protocol):
    """A model with its head."""

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the values of each loss from the output of the last section: float32 [batch] or [batch, seq], not
        weighted; or their weighted sum, [], if the batch has `LOSS_WEIGHTS`."""
        ...


def run_sections(
    trunk: Trunk, batch: Batch, keys: Keys, states: Mapping[str, MixerState] | None = None
) -> tuple[HiddenStates, dict[str, MixerState]]:
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
    hidden, new_states = None, {}
    for name, section in trunk.sections.items():
        hidden = section.embed(batch, keys, hidden)
        # Outside the loop over layers: all layers read the same positions, rotations and segments.
        context = section.context(batch, keys, hidden)
        with jax.named_scope("layers"):
            run_layers = section.stack.over_layers(context, (states or {}).get(name))
            x, new_states[name] = run_layers(hidden.x)
        hidden = hidden._replace(x=x)
    assert hidden is not None, "a model has a section"
    return hidden, new_states


@dataclass(frozen=True)
class TrunkLossFunction:
    """A trunk's losses as a function of its parameters: the `LossFunction` of ranks that have all layers."""

    build: Callable[[Tree], TrunkWithHead]
    """Builds the model from its parameters."""
    options: LossOptions
    sections: Sequence[tuple[str, ...]]
    """Names of the parameters of each section's stacks, in the order in which sections run."""

    def with_frozen(self, frozen: Tree) -> Self:
        """See `LossFunction.with_frozen`."""
        from mtjax.sharding.trainable import merge_trees

        return replace(self, build=lambda parameters: self.build(merge_trees(parameters, frozen)))

    def loss_sums(self, parameters: Tree, microbatch: Microbatch) -> dict[str, Array]:
        """Computes the losses of a microbatch, each a weighted sum, [], and the routers' losses and counters."""
        model, (batch, weights, keys) = self.build(parameters), microbatch
        if self.options.fuses_gradient and "loss" in weights:
            # A decoder sums its loss itself, so that its gradients are computed with it. In the batch, as `losses` of
            # all families would otherwise have an argument that only decoders read.
            batch = {**batch, LOSS_WEIGHTS: weights["loss"]}
        output, states = run_sections(model, batch, keys)
        losses = model.losses(output, batch, keys, self.options)
        if any(state is not None for state in states.values()):
            from mtjax.models.routers import router_reports

            losses |= router_reports(list(states.values()))
        return weighted_sums(losses, weights)


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
        if not values.ndim:
            return values  # summed already, with its gradients (`LOSS_WEIGHTS`)
        each = weights.reshape(weights.shape + (1,) * (values.ndim - weights.ndim))
        return (values * each).sum(range(weights.ndim))

    with jax.named_scope("loss"):
        return {name: one(values[name], weight) for name, weight in weights.items()}


class LanguageModel(TrunkWithHead, Protocol):
    """A model that a train step can train: a language model, or one with another head for finetuning.

    It has one loss or several, by name. A loss is the mean of its values over the global batch, weighted by
    `loss_weights`; the sum of the losses is minimized.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters; `nnx.Param`s that carry the logical names of their dimensions."""

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch that the model reads, each for one sample: without the batch dimension."""
        ...

    @staticmethod
    def loss_weights(batch: Batch) -> dict[str, Array]:
        """Returns the weight of each value of each loss: float32 [batch] or [batch, seq], in the shapes of `losses`."""
        ...

    @staticmethod
    def num_tokens(batch: Batch) -> Array:
        """Counts tokens, for tokens per second: those that are not padding; of a decoder, those that have a loss."""
        ...


def model_class(config: Config) -> type[LanguageModel]:
    """Returns the class of a config's family with its head, and with the losses of a student where it has a teacher."""
    # Heads, teachers and further predictions are subclasses: the language model knows none of them.
    parts = FAMILIES[config.model.family]
    if config.model.head != "language":
        return load_part(parts.with_head)
    if config.finetuning.teacher is not None:
        return load_part(parts.distilled)
    return load_part(parts.predicting if config.model.mtp_num_layers else parts.model)
