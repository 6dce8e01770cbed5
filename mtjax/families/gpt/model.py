"""GPT-2: learned positions, pre-LN layers, output projection tied to the embedding (section 4.2 of the paper).

Other settings choose rotary positions, other norms and activations, grouped-query attention, an untied output, and
experts.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Config, Model
from mtjax.config.sizes import embedding_width, output_shape, padded_vocab_size
from mtjax.layout.attention_kernel import ContextMethod
from mtjax.layout.plan import ExpertDispatch
from mtjax.layout.stacks import stacks_of
from mtjax.layout.weights import output_weights
from mtjax.models.language_model import (
    EMBEDDING_SITE,
    LOSS_WEIGHTS,
    Batch,
    HiddenStates,
    Keys,
    Section,
    WithVocabulary,
    embed_tokens,
    position_table,
    run_sections,
    vocabulary_table,
)
from mtjax.models.layer import Layer, Stack
from mtjax.models.layer_context import PADDING_MASK, RESIDUAL, TEXT_LENGTH, LayerContext
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.models.ops import constant, dropout, make_norm
from mtjax.sharding.axes import local_positions, num_shards
from mtjax.sharding.vocab import LossOptions, OutputOptions, vocab_parallel_cross_entropy

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.rotary import QueryScale, Rotary


class Decoder(nnx.Module):
    """A decoder without its head: embedding and layers."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, stack_key = jax.random.split(key, 3)
        self.embedding = vocabulary_table(model, table_key)
        self.positions = position_table(model, model.sequence_length, position_key)
        self.rotary, self.query_scale = _rotary(model)
        loop_settings = LayerLoopSettings.of(config.training)
        stack = partial(Stack, dtype=dtype, loop_settings=loop_settings, parallel=config.parallel)
        self.dtype = dtype
        self._draw_stacks(model, stack, stack_key)
        self.embedding_norm = make_norm(model, dtype) if model.embedding_norm else None
        # Post-LN layers normalize the residual stream themselves.
        self.final_norm = make_norm(model, dtype) if model.norm_placement != "post" else None
        if embedding_width(model) == model.hidden_size:
            self.project_in = self.project_out = None
        else:
            from mtjax.models.table_width import table_projections

            self.project_in, self.project_out = table_projections(model, key)
        self.rate, self.scale = model.hidden_dropout, model.embedding_scale
        self.method: ContextMethod = config.parallel.context_method
        self.expert_dispatch: ExpertDispatch = config.parallel.expert_dispatch

    def _draw_stacks(self, model: Model, stack: Callable[..., Stack], key: Array) -> None:
        """Draws the layers: a stack of each kind, whose attribute has the name of its parameters."""
        stacks = stacks_of(model)
        for of in stacks:
            setattr(self, of.path, stack(model, layer_stack=of, key=key, layer_type=self.layer_type(of.kind)))
        self.paths = tuple(of.path for of in stacks)
        self.letters = "".join(of.letter for of in stacks)

    @staticmethod
    def layer_type(kind: str) -> type[Layer]:
        """Returns the class of the layers of a kind."""
        del kind
        return Layer

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        position_ids: Int[Array, "batch seq"] | None = None,
        segment_ids: Int[Array, "batch seq"] | None = None,
        keys: Keys = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the final hidden states, as the output table reads them.

        Args:
          tokens: ids.
          position_ids: of each token in its document; 0, 1, ... when None.
          segment_ids: when given, tokens attend within their segment only.
          keys: one dropout key per sample; None turns dropout off.
        """
        batch = {"tokens": tokens, "position_ids": position_ids, "segment_ids": segment_ids}
        return self.final_hidden(run_sections(self, batch, keys)[0].x)

    def final_hidden(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Normalizes the hidden states after the last layer, and takes them to the width of the output table."""
        x = x if self.final_norm is None else self.final_norm(x)
        if self.project_out is None:
            return x
        with jax.named_scope("loss"):
            return self.project_out(x)

    @property
    def sections(self) -> dict[str, Section]:
        """One section, of one stack, or of several where layers differ."""
        (name, *others), (stack, *_) = self.paths, self.decoder_stacks
        if not others:
            return {name: Section(stack, self._embed, self._context)}
        from mtjax.models.pattern_stacks import PatternStacks

        stacks = PatternStacks(dict(zip(self.letters, self.decoder_stacks, strict=True)))
        return {name: Section(stacks, self._embed, self._context, tuple(others))}

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers, whose layers generate text."""
        return tuple(getattr(self, path) for path in self.paths)

    def _embed(
        self, batch: Batch, keys: Keys, before: HiddenStates | None, positions: Array | None = None
    ) -> HiddenStates:
        """Embeds tokens and positions: [batch, act_seq, embed]."""
        with jax.named_scope("embedding"):
            tokens = batch["tokens"]
            positions = local_positions(tokens.shape[1]) if positions is None else positions
            ids, into = batch.get("position_ids"), self.project_in
            x = embed_tokens(self.embedding, self.positions, tokens, self.dtype, ids, positions, self.scale, into)
            x = x if self.embedding_norm is None else self.embedding_norm(x)
            return HiddenStates(dropout(x, self.rate, keys, EMBEDDING_SITE, RESIDUAL, positions=positions))

    def _context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Collects segments, positions, rotation and padding of a batch for the layers."""
        length, ids = batch["tokens"].shape[1], batch.get("position_ids")
        positions = local_positions(length)
        context = LayerContext(
            keys,
            batch.get("segment_ids"),
            positions=positions,
            context_method=self.method,
            expert_dispatch=self.expert_dispatch,
        )
        if TEXT_LENGTH in batch:
            from mtjax.models.routers import Padding

            context = dataclasses.replace(context, padding=Padding.of(batch))
        if self.rotary is None and self.query_scale is None:
            return context
        # Without position ids, all samples have the same positions: [1, seq], broadcast over the batch.
        if ids is None:
            ids = (jnp.arange(length) if positions is None else positions)[None]
        rotation = None if self.rotary is None else self.rotary(ids, length * num_shards("seq"))
        scale = None if self.query_scale is None else self.query_scale(ids)
        return dataclasses.replace(context, rotation=rotation, query_scale=scale)


def _rotary(model: Model) -> "tuple[Rotary | None, QueryScale | None]":
    """Builds the rotary embedding and the factors of queries by position, if the model has them."""
    if model.position != "rope" and not model.attention_scale_beta:
        return None, None
    from mtjax.models.rotary import QueryScale, Rotary

    rotary = Rotary(model) if model.position == "rope" else None
    return rotary, QueryScale(model) if model.attention_scale_beta else None


class GPT(Decoder, WithVocabulary):
    """A decoder-only language model.

    A GPT-2 has `V h + s h + l (12 h^2 + 13 h) + 2 h` parameters for V padded vocabulary rows; a Llama
    `2 V h + l (2 h (q + k) + 3 h f + 2 h) + h` for an MLP width f, and q and k the widths of all query and of all key
    heads together: in the 70B models k = q / 8.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(config, key=key)
        model = config.model
        # From a key of its own, so that the other parameters are drawn alike with and without it.
        self.output = None if model.tie_embeddings else vocabulary_table(model, jax.random.fold_in(key, 1))
        bias = output_weights(*self.output_table.shape)["output_bias"]
        self.output_bias = constant(0.0, bias) if model.output_bias else None
        self.output_options = OutputOptions(padded_vocab_size(model), **output_shape(model))

    def embed_new(
        self, tokens: Int[Array, "batch seq"], cache_positions: "CachePositions", length: int
    ) -> tuple[Float[Array, "batch act_seq embed"], LayerContext]:
        """Embeds new tokens of sequences in KV caches of `length` tokens; returns the layers' inputs."""
        from mtjax.models.kv_cache import in_table

        del length
        batch = {"tokens": tokens, "position_ids": in_table(self.positions, cache_positions.positions)}
        hidden = self._embed(batch, None, None)
        return hidden.x, dataclasses.replace(self._context(batch, None, hidden), cache_positions=cache_positions)

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the losses of each token, by name, [batch, seq]."""
        # The final norm belongs to the head: with pipeline stages the last one computes it.
        return self.token_losses(self.final_hidden(trunk_output.x), batch, keys, options)

    def token_losses(self, hidden: Array, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of each next token, [batch, seq], from final hidden states."""
        del keys
        # The logits are never gathered: the loss is fused with the product with the sharded output table.
        table, bias, _ = self.output_head()
        if LOSS_WEIGHTS in batch:
            from mtjax.sharding.vocab_weighted import weighted_cross_entropy

            return {"loss": weighted_cross_entropy(hidden, table, batch["labels"], batch[LOSS_WEIGHTS], options, bias)}
        return {"loss": vocab_parallel_cross_entropy(hidden, table, batch["labels"], options, bias)}

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of next-token prediction."""
        # With positions and segments if the data resets them at document ends, with a padding mask for packed chats.
        names = {"tokens": jnp.int32, "labels": jnp.int32, "loss_mask": jnp.float32}
        names |= {"position_ids": jnp.int32} if config.data.reset_position_ids else {}
        names |= {"segment_ids": jnp.int32} if config.data.reset_attention_mask else {}
        names |= {PADDING_MASK: jnp.int32} if config.finetuning.task == "chat" else {}
        return {name: jax.ShapeDtypeStruct((config.model.sequence_length,), kind) for name, kind in names.items()}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns a weight of 1 for each unmasked token."""
        return {"loss": batch["loss_mask"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Counts unmasked tokens."""
        return batch["loss_mask"].sum()
