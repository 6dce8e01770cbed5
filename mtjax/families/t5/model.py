"""T5 (arXiv 1910.10683): an encoder reads text with masked spans, a decoder generates the spans.

Depending on its settings it is the original T5 (relative positions, RMS norm, no biases, ReLU or gated GELU, tied or
untied output) or Megatron-LM's (learned positions, layer norm, biases). A decoder layer has three sublayers, each with
an all-reduce over `model`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Config, Model
from mtjax.config.sizes import decoder_layers, decoder_length, output_shape, padded_vocab_size
from mtjax.layout.stacks import LayerStack, stacks_of
from mtjax.models.kv_cache import CachePositions, in_table
from mtjax.models.language_model import (
    EMBEDDING_SITE,
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
from mtjax.models.layer import Stack
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.layer_loop import LayerLoopSettings
from mtjax.models.ops import dropout, make_norm
from mtjax.models.relative import RelativeBias
from mtjax.sharding.vocab import LossOptions, OutputOptions, vocab_parallel_cross_entropy

DECODER_SITE = 2**31 - 2
"""Folded into the dropout keys, so that the decoder's differ from the encoder's."""
FINAL_SITE = 2**31 - 3
"""Dropout site after a stack's final norm."""


class T5Stack(nnx.Module):
    """The encoder or the decoder: layers, their relative positions if any, and a norm and dropout at the end."""

    def __init__(self, config: Config, model: Model, layer_stack: LayerStack, *, is_causal: bool, key: Array) -> None:
        """Draws the parameters of a stack of layers, with the sizes of `model`."""
        dtype, loop_settings = jnp.dtype(config.training.compute_dtype), LayerLoopSettings.of(config.training)
        bias_key, stack_key = jax.random.split(key)
        is_relative = model.position == "relative"
        has_table = is_relative and model.relative_bias_layers == "first"  # else every layer has one
        self.relative = RelativeBias(model, key=bias_key) if has_table else None
        self.stack = Stack(
            model, dtype, layer_stack=layer_stack, loop_settings=loop_settings, parallel=config.parallel, key=stack_key
        )
        self.final_norm = make_norm(model, dtype)
        self.rate = model.hidden_dropout
        self.is_causal = is_causal

    def context(self, length: int, keys: Keys) -> LayerContext:
        """Computes the other inputs of all layers, for sequences of this length."""
        with jax.named_scope("embedding"):
            bias = None if self.relative is None else self.relative(length, is_causal=self.is_causal)
        return LayerContext(keys, bias=bias, is_causal=self.is_causal)

    def decode_context(self, cache_positions: CachePositions, length: int) -> LayerContext:
        """Computes the same for new tokens of sequences in KV caches of `length` tokens."""
        with jax.named_scope("embedding"):
            bias = None if self.relative is None else self.relative.at(cache_positions.positions, length)
        # Cross-attention reads its own cache: no encoder output is passed.
        return LayerContext(bias=bias, cache_positions=cache_positions)

    def finish(self, x: Float[Array, "batch act_seq embed"], keys: Keys) -> Float[Array, "batch act_seq embed"]:
        """Applies the final norm and dropout to the hidden states after the last layer."""
        return dropout(self.final_norm(x), self.rate, keys, FINAL_SITE, RESIDUAL)


def table_std(model: Model) -> float:
    """Returns the initial standard deviation of the table of a scaled output, times which `output_scale` is that of the
    logits.

    Tiny logits stay so for long. T5's code draws the table with unit variance; with a larger factor, less is enough.
    """
    return max(model.init_std, min(1.0, 1 / model.output_scale))


class T5(WithVocabulary):
    """An encoder-decoder that shares one embedding table."""

    def __init__(self, config: Config, *, key: Array) -> None:
        """Draws the parameters."""
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, encoder_key, decoder_key, output_key = jax.random.split(key, 5)
        # For the initial scale of residual branches, which depends on the number of layers.
        decoder = dataclasses.replace(model, num_layers=decoder_layers(model))
        # As in Google's T5; Megatron-LM's, with learned positions, does not scale.
        is_scaled = model.tie_embeddings and model.position != "learned"
        self.embedding = vocabulary_table(model, table_key, table_std(model) if is_scaled else None)
        self.positions = position_table(model, max(model.sequence_length, decoder_length(model)), position_key)
        encoding, decoding = stacks_of(model)
        self.encoder = T5Stack(config, model, encoding, is_causal=False, key=encoder_key)
        self.decoder = T5Stack(config, decoder, decoding, is_causal=True, key=decoder_key)
        self.output = None if model.tie_embeddings else vocabulary_table(model, output_key)
        self.output_options = OutputOptions(padded_vocab_size(model), **output_shape(model))
        self.hidden_scale = model.hidden_size**-0.5 if is_scaled else 1.0
        self.rate = model.hidden_dropout
        self.dtype = dtype

    def __call__(
        self,
        encoder_tokens: Int[Array, "batch seq"],
        decoder_tokens: Int[Array, "batch seq"],
        encoder_mask: Int[Array, "batch seq"] | None = None,
        keys: Keys = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the decoder's final hidden states, scaled for the output table.

        Args:
          encoder_tokens: ids of the text.
          decoder_tokens: ids before those to be predicted.
          encoder_mask: 1 on tokens, 0 on padding, which no token sees; no padding when None.
          keys: one dropout key per sample; None turns dropout off.
        """
        batch = {"encoder_tokens": encoder_tokens, "decoder_tokens": decoder_tokens, "encoder_mask": encoder_mask}
        return self._finish_decoder(run_sections(self, batch, keys)[0], keys)

    @property
    def sections(self) -> dict[str, Section]:
        """The encoder, whose hidden states every layer of the decoder reads."""
        return {
            "encoder.stack": Section(self.encoder.stack, self._embed_text, self._text_context),
            "decoder.stack": Section(self.decoder.stack, self._embed_answer, self._answer_context),
        }

    def _embed_text(self, batch: Batch, keys: Keys, before: HiddenStates | None) -> HiddenStates:
        """Embeds the encoder's input."""
        return HiddenStates(self._embed(batch["encoder_tokens"], keys, batch.get("position_ids")))

    def _text_context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Collects the encoder layers' other inputs; padding is a separate segment."""
        context = self.encoder.context(batch["encoder_tokens"].shape[1], keys)
        return dataclasses.replace(context, segment_ids=batch["encoder_mask"])

    def _embed_answer(self, batch: Batch, keys: Keys, before: HiddenStates | None) -> HiddenStates:
        """Finishes the encoder's output, and embeds the decoder's input."""
        assert before is not None
        # The encoder's final norm is part of the decoder's embedding, so that a boundary is the same after every
        # layer.
        encoded = self.encoder.finish(before.x, keys)
        return HiddenStates(self._embed(batch["decoder_tokens"], _decoder_keys(keys)), encoded)

    def _answer_context(self, batch: Batch, keys: Keys, hidden: HiddenStates) -> LayerContext:
        """Collects the decoder layers' other inputs, with the encoder's hidden states."""
        context = self.decoder.context(batch["decoder_tokens"].shape[1], _decoder_keys(keys))
        return dataclasses.replace(context, encoded=hidden.encoded, encoded_mask=batch["encoder_mask"])

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """The decoder's stack."""
        return (self.decoder.stack,)

    def encoded(
        self, tokens: Int[Array, "batch seq"], mask: Int[Array, "batch seq"]
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the encoder's hidden states of texts of any length, for the decoder; `mask` is 1 on tokens."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        batch = {"encoder_tokens": tokens, "encoder_mask": mask, "position_ids": in_table(self.positions, positions)}
        section = self.sections["encoder.stack"]
        hidden = section.embed(batch, None, None)
        with jax.named_scope("layers"):
            # Not `run_sections`, which would run the decoder, too.
            x, _ = section.stack.over_layers(section.context(batch, None, hidden))(hidden.x)
        return self.encoder.finish(x, None)

    def embed_new(
        self, tokens: Int[Array, "batch seq"], cache_positions: CachePositions, length: int
    ) -> tuple[Float[Array, "batch act_seq embed"], LayerContext]:
        """Embeds new tokens of sequences in KV caches of `length` tokens; returns the decoder layers' inputs."""
        x = self._embed(tokens, None, in_table(self.positions, cache_positions.positions))
        return x, self.decoder.decode_context(cache_positions, length)

    def final_hidden(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Prepares the hidden states after the decoder's last layer for the output table."""
        return self._finish_decoder(HiddenStates(x), None)

    def _embed(self, tokens: Array, keys: Keys, position_ids: Array | None = None) -> Array:
        """Embeds tokens [batch, seq] with the shared table: [batch, act_seq, embed]."""
        with jax.named_scope("embedding"):
            x = embed_tokens(self.embedding, self.positions, tokens, self.dtype, position_ids)
            return dropout(x, self.rate, keys, EMBEDDING_SITE, RESIDUAL)

    def losses(self, trunk_output: HiddenStates, batch: Batch, keys: Keys, options: LossOptions) -> dict[str, Array]:
        """Computes the cross-entropy of each token of the decoder, [batch, seq]."""
        hidden = self._finish_decoder(trunk_output, keys)
        return {"loss": vocab_parallel_cross_entropy(hidden, self.output_table[...], batch["labels"], options)}

    def _finish_decoder(self, trunk_output: HiddenStates, keys: Keys) -> Float[Array, "batch act_seq embed"]:
        """Finishes the decoder's output, scaled for a tied output table."""
        # The hidden states are scaled instead of the logits, of which there are more.
        return self.decoder.finish(trunk_output.x, _decoder_keys(keys)) * self.hidden_scale

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of text with masked spans, and of the spans: `mtjax.families.t5.samples`."""
        encoder, decoder = (config.model.sequence_length,), (decoder_length(config.model),)
        return {
            "encoder_tokens": jax.ShapeDtypeStruct(encoder, jnp.int32),
            "encoder_mask": jax.ShapeDtypeStruct(encoder, jnp.int32),
            "decoder_tokens": jax.ShapeDtypeStruct(decoder, jnp.int32),
            "labels": jax.ShapeDtypeStruct(decoder, jnp.int32),
            "loss_mask": jax.ShapeDtypeStruct(decoder, jnp.float32),
        }

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Returns a weight of 1 for each target token of the decoder."""
        return {"loss": batch["loss_mask"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Counts the encoder's tokens that are not padding."""
        return batch["encoder_mask"].sum().astype(jnp.float32)


def _decoder_keys(keys: Keys) -> Keys:
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, DECODER_SITE))(keys)
