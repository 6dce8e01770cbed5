"""T5 (arXiv 1910.10683): an encoder reads text with gaps, a decoder writes what was in them.

By its settings T5's own - relative positions, RMS norm, no biases, ReLU or gated GELU, tied or untied output - or
Megatron-LM's: learned positions, layer norm, biases. A decoder layer has three sublayers, each with its all-reduce.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Float, Int, Key

from mtjax.config import Config, Model
from mtjax.config.sizes import decoder_layers, decoder_length, head_dim, padded_vocab_size
from mtjax.models.attention import Context, FusedQKV, core_attention
from mtjax.models.layers import Linear, dropout, make_norm, normal
from mtjax.models.recompute import ATTENTION_OUTPUT, Recompute
from mtjax.models.transformer import EMBEDDING_SITE, RESIDUAL, Layer, Stack
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy, vocab_parallel_embedding

DECODER_SITE = 2**31 - 2
"""Sets the decoder's dropout keys apart from the encoder's."""


class CrossAttention(nnx.Module):
    """Attention from the decoder's tokens to the encoder's, split by heads."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        query_key, kv_key, output_key = jax.random.split(key, 3)
        embed, heads = {"embed": model.hidden_size}, {"heads": model.num_heads, "head_dim": head_dim(model)}
        query_std = model.init_std * _query_scale(model)
        self.query = Linear(embed, heads, std=query_std, bias=model.bias, key=query_key)
        self.key_value = Linear(embed, {"kv": 2, **heads}, std=model.init_std, bias=model.bias, key=kv_key)
        self.output = Linear(heads, embed, std=output_std, bias=model.bias, key=output_key)
        self.rate = model.attention_dropout

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: Context, keys: Key[Array, " batch"] | None
    ) -> Float[Array, "batch act_seq embed"]:
        """Attends from each token to those of the encoder that are no padding."""
        assert context.encoded is not None
        whole = spec("batch", "seq", "embed")
        query = self.query(reshard(x, whole))
        key, value = (a.squeeze(2) for a in jnp.split(self.key_value(reshard(context.encoded, whole)), 2, axis=2))
        mask = jnp.ones((1, 1, 1, key.shape[1]), bool)
        if context.encoded_mask is not None:
            mask = context.encoded_mask[:, None, None, :] > 0
        mixed = core_attention(query, key, value, mask, self.rate, keys, scale=context.scale, site=3)
        return self.output(checkpoint_name(mixed, ATTENTION_OUTPUT))


class EncoderLayer(Layer):
    """Attention and an MLP; initial queries are small where scores aren't scaled."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        super().__init__(model, dtype, key=key)
        assert isinstance(self.attention.qkv, FusedQKV)  # check_model has asked for it
        query_key_value = jnp.array([_query_scale(model), 1.0, 1.0])[None, :, None, None]
        self.attention.qkv.weight[...] = self.attention.qkv.weight[...] * query_key_value


class DecoderLayer(EncoderLayer):
    """Attention, cross-attention and an MLP."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        super().__init__(model, dtype, key=key)
        output_std = model.init_std / (2 * model.num_layers) ** 0.5 if model.scaled_init else model.init_std
        self.cross_norm = make_norm(model, dtype)
        self.cross = CrossAttention(model, output_std=output_std, key=jax.random.fold_in(key, 1))

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: Context, keys: Key[Array, " batch"] | None
    ) -> Float[Array, "batch act_seq embed"]:
        """Adds what the three sublayers find to the residual stream."""
        with jax.named_scope("attention"):
            attend = partial(self.attention, context=context, keys=keys)
            x = self.connect(x, self.attention_norm, attend, self.dropout(1, keys))
            cross = partial(self.cross, context=context, keys=keys)
            x = self.connect(x, self.cross_norm, cross, self.dropout(4, keys))
        with jax.named_scope("mlp"):
            return self.connect(x, self.mlp_norm, self.mlp, self.dropout(2, keys))


class RelativeBias(nnx.Module):
    """A number per head and kind of distance, added to the scores of every layer of a stack (section 2.1 of T5)."""

    def __init__(self, model: Model, *, is_causal: bool, key: Array) -> None:
        sizes = {"buckets": model.relative_buckets, "heads": model.num_heads}
        self.table = normal(key, sizes, model.init_std)
        self.buckets = partial(
            relative_buckets,
            is_causal=is_causal,
            num_buckets=model.relative_buckets,
            max_distance=model.relative_max_distance,
        )

    def __call__(self, length: int) -> Float[Array, "1 heads seq seq"]:
        """float32 biases, each rank those of its own heads."""
        chosen = self.buckets(length)
        found = self.table[...].at[chosen].get(out_sharding=spec("seq", "seq", "heads"))
        return found.transpose(2, 0, 1)[None]


def relative_buckets(length: int, *, is_causal: bool, num_buckets: int, max_distance: int) -> Int[Array, "seq seq"]:
    """The kind of distance from each query (first dimension) to each key.

    Half of the kinds are single distances, the other half reach up to `max_distance` in steps that grow like a
    logarithm. Where tokens look both ways, keys after the query have the upper half of all kinds; where they look back,
    these are kind 0.
    """
    place = jnp.arange(length)
    back = place[:, None] - place[None, :]
    kinds = num_buckets if is_causal else num_buckets // 2
    first = 0 if is_causal else jnp.where(back < 0, kinds, 0)
    distance = jnp.maximum(back, 0) if is_causal else jnp.abs(back)
    single = kinds // 2
    growth = jnp.log(jnp.maximum(distance, 1) / single) / jnp.log(max_distance / single)
    far = jnp.minimum(single + (growth * (kinds - single)).astype(jnp.int32), kinds - 1)
    return first + jnp.where(distance < single, distance, far)


class Half(nnx.Module):
    """The encoder or the decoder: layers, their relative positions if any, a norm and dropout at both ends."""

    def __init__(
        self, model: Model, dtype: jnp.dtype, kind: type[Layer], *, recompute: Recompute, is_causal: bool, key: Array
    ) -> None:
        bias_key, stack_key = jax.random.split(key)
        is_relative = model.position == "relative"
        self.relative = RelativeBias(model, is_causal=is_causal, key=bias_key) if is_relative else None
        self.stack = Stack(model, dtype, recompute=recompute, kind=kind, key=stack_key)
        self.final_norm = make_norm(model, dtype)
        self.rate = model.hidden_dropout
        self.scale = 1.0 if is_relative else None
        self.is_causal = is_causal

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: Context, keys: Key[Array, " batch"] | None
    ) -> Float[Array, "batch act_seq embed"]:
        """Hidden states of the embedded tokens `x`, normalised."""
        with jax.named_scope("embedding"):
            bias = None if self.relative is None else self.relative(x.shape[1])
            x = dropout(x, self.rate, keys, EMBEDDING_SITE, RESIDUAL)
        context = dataclasses.replace(context, bias=bias, scale=self.scale, is_causal=self.is_causal)
        return dropout(self.final_norm(self.stack(x, context, keys)), self.rate, keys, EMBEDDING_SITE - 2, RESIDUAL)


class T5(nnx.Module):
    """An encoder-decoder that shares one embedding table."""

    def __init__(self, config: Config, *, key: Array) -> None:
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, encoder_key, decoder_key, output_key = jax.random.split(key, 5)
        rows, embed = {"vocab": padded_vocab_size(model)}, {"embed": model.hidden_size}
        length = {"seq": max(model.sequence_length, decoder_length(model))}
        is_learned, recompute = model.position == "learned", Recompute.of(config.training)
        writer = dataclasses.replace(model, num_layers=decoder_layers(model))
        is_scaled = model.tie_embeddings and not is_learned
        # A scaled output reads a table of unit variance (T5's own), or it starts, and stays for long, with tiny logits.
        self.embedding = normal(table_key, {**rows, **embed}, 1.0 if is_scaled else model.init_std)
        self.positions = normal(position_key, {**length, **embed}, model.init_std) if is_learned else None
        self.encoder = Half(model, dtype, EncoderLayer, recompute=recompute, is_causal=False, key=encoder_key)
        self.decoder = Half(writer, dtype, DecoderLayer, recompute=recompute, is_causal=True, key=decoder_key)
        self.output = None if model.tie_embeddings else normal(output_key, {**rows, **embed}, model.init_std)
        self.output_scale = model.hidden_size**-0.5 if is_scaled else 1.0
        self.dtype = dtype

    def __call__(
        self,
        encoder_tokens: Int[Array, "batch seq"],
        decoder_tokens: Int[Array, "batch seq"],
        encoder_mask: Int[Array, "batch seq"] | None = None,
        keys: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """The decoder's final hidden states, as the output table reads them.

        Args:
          encoder_tokens: ids of the text.
          decoder_tokens: ids before those to be predicted.
          encoder_mask: 1 on tokens, 0 on padding, which nobody sees; no padding when None.
          keys: one dropout key per sample; None turns dropout off.
        """
        encoded = self.encoder(self._embed(encoder_tokens), Context(encoder_mask), keys)
        own = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, DECODER_SITE))(keys)
        context = Context(encoded=encoded, encoded_mask=encoder_mask)
        return self.decoder(self._embed(decoder_tokens), context, own) * self.output_scale

    def _embed(self, tokens: Array) -> Array:
        with jax.named_scope("embedding"):
            x = vocab_parallel_embedding(self.embedding[...], tokens, self.dtype)
            if self.positions is None:
                return x
            positions = self.positions[...].astype(self.dtype)[: tokens.shape[1]]
            return x + reshard(positions, spec("act_seq", "embed"))

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Corrupted text and its spans: `mtjax.data.samples.t5`."""
        reads, writes = (config.model.sequence_length,), (decoder_length(config.model),)
        return {
            "encoder_tokens": jax.ShapeDtypeStruct(reads, jnp.int32),
            "encoder_mask": jax.ShapeDtypeStruct(reads, jnp.int32),
            "decoder_tokens": jax.ShapeDtypeStruct(writes, jnp.int32),
            "labels": jax.ShapeDtypeStruct(writes, jnp.int32),
            "loss_mask": jax.ShapeDtypeStruct(writes, jnp.float32),
        }

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Each token that the decoder must write counts once."""
        return {"loss": batch["loss_mask"]}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """The encoder's tokens that are no padding."""
        return batch["encoder_mask"].sum().astype(jnp.float32)

    def batch_losses(
        self, batch: Mapping[str, Array], keys: Key[Array, " batch"] | None, options: LossOptions
    ) -> dict[str, Array]:
        """Cross-entropy of each token that the decoder writes."""
        hidden = self(batch["encoder_tokens"], batch["decoder_tokens"], batch["encoder_mask"], keys)
        return {"loss": vocab_parallel_cross_entropy(hidden, self._output_table, batch["labels"], options)}

    def logits(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq vocab"]:
        """float32 logits over the padded vocabulary, split over the mesh; training never makes them."""
        x, place = reshard(hidden, spec("batch", "seq", "embed")), spec("batch", "seq", "vocab")
        table = self._output_table.astype(self.dtype)
        return jnp.einsum("bsh,vh->bsv", x, table, preferred_element_type=jnp.float32, out_sharding=place)

    @property
    def _output_table(self) -> Array:
        return (self.embedding if self.output is None else self.output)[...]


def _query_scale(model: Model) -> float:
    """What initial queries are multiplied with: what the scores are not."""
    return head_dim(model) ** -0.5 if model.position == "relative" else 1.0
