"""BERT: bidirectional attention over two sentences, masked-LM head and sentence-order head (section 5 of the paper).

By its settings the paper's pre-LN layers with a final norm (Figure 7b), or the original's post-LN layers with a norm on
the embeddings (Figure 7a).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Bool, Float, Int, Key

from mtjax.config import Config, Model
from mtjax.config.sizes import GATED, most_masked, padded_vocab_size
from mtjax.models.attention import Context
from mtjax.models.layers import Linear, constant, dropout, make_norm, normal
from mtjax.models.recompute import Recompute
from mtjax.models.transformer import ACTIVATIONS, EMBEDDING_SITE, RESIDUAL, Stack
from mtjax.sharding.axes import spec
from mtjax.sharding.vocab import LossOptions, vocab_parallel_cross_entropy, vocab_parallel_embedding


class Masked(NamedTuple):
    """The tokens to guess, as few as they are: all that the masked-LM head and its logits are computed for."""

    chosen: Float[Array, "batch masked seq"]
    """1 where the n-th of a sample's masked tokens stands."""
    is_left_out: Bool[Array, "batch seq"]
    """Masked tokens beyond the most that there may be."""

    @classmethod
    def of(cls, loss_mask: Float[Array, "batch seq"]) -> "Masked":
        """By a product and a sum instead of gathers, which would not stay on their shard."""
        is_masked = loss_mask > 0
        number = jnp.cumsum(is_masked, axis=1) - 1
        most = most_masked(loss_mask.shape[1])
        chosen = (number[:, None] == jnp.arange(most)[:, None]) & is_masked[:, None]
        return cls(chosen.astype(jnp.float32), is_masked & (number >= most))

    def take(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch masked embed"]:
        """Hidden states of the masked tokens, zeros where there are fewer; of a split sequence a sum over its parts."""
        chosen = reshard(self.chosen.astype(hidden.dtype), spec("batch", None, "act_seq"))
        return jnp.einsum("bms,bsh->bmh", chosen, hidden, out_sharding=spec("batch", "seq", "embed"))

    def take_labels(self, labels: Int[Array, "batch seq"]) -> Int[Array, "batch masked"]:
        """Labels of the masked tokens, 0 where there are fewer."""
        return (self.chosen.astype(labels.dtype) * labels[:, None]).sum(-1)

    def put(self, losses: Float[Array, "batch masked"]) -> Float[Array, "batch seq"]:
        """Each loss at its token, 0 at the others; NaN at masked tokens that were left out, for theirs is unknown."""
        return jnp.where(self.is_left_out, jnp.nan, jnp.where(self.chosen > 0, losses[..., None], 0).sum(1))


class MaskedLMHead(nnx.Module):
    """What stands between the hidden states and the vocabulary: dense, activation, norm; and a bias per token.

    Every model rank has the dense layer whole, as in Megatron, and all of what it is applied to: it sends nothing.
    """

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        width = model.hidden_size
        self.dense = Linear({"embed": width}, {"features": width}, std=model.init_std, key=key)
        self.norm = make_norm(model, dtype)
        self.bias = constant(0.0, {"vocab": padded_vocab_size(model)})
        self.activation = ACTIVATIONS["gelu" if model.activation in GATED else model.activation]

    def __call__(self, hidden: Float[Array, "batch masked embed"]) -> Float[Array, "batch masked embed"]:
        """What is multiplied with the output table."""
        return self.norm(self.activation(self.dense(hidden)))


class SentenceOrderHead(nnx.Module):
    """The pooler - dense and tanh on the first token - and a classifier of two answers: in order, or swapped."""

    def __init__(self, model: Model, *, key: Array) -> None:
        pooler_key, classifier_key = jax.random.split(key)
        embed = {"embed": model.hidden_size}
        self.pooler = Linear(embed, {"features": model.hidden_size}, std=model.init_std, key=pooler_key)
        self.classifier = Linear(embed, {"classes": 2}, std=model.init_std, key=classifier_key)

    def pooled(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch 1 embed"]:
        """A vector per sample."""
        # A product, not a slice: where the sequence is split, one rank has the first token and all get it by a sum.
        first = jax.nn.one_hot(jnp.zeros(1, jnp.int32), hidden.shape[1], dtype=hidden.dtype)
        first = reshard(first, spec(None, "act_seq"))
        place = spec("batch", None, "embed")
        return jnp.tanh(self.pooler(jnp.einsum("bsh,qs->bqh", hidden, first, out_sharding=place)))

    def __call__(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch classes"]:
        """float32 logits."""
        return self.classifier(self.pooled(hidden))[:, 0].astype(jnp.float32)

    def losses(
        self, hidden: Float[Array, "batch act_seq embed"], swapped: Int[Array, " batch"]
    ) -> Float[Array, " batch"]:
        """Cross-entropy of each sample."""
        logits = self(hidden)
        return jax.nn.logsumexp(logits, axis=-1) - (jax.nn.one_hot(swapped, 2) * logits).sum(-1)


class BERT(nnx.Module):
    """An encoder with the two heads of its pretraining.

    Parameters count those of a GPT of the same size, `h (h + 3) + V` of the masked-LM head, `h (h + 1) + 2 (h + 1)` of
    the sentence-order head and `h` for each token type.
    """

    def __init__(self, config: Config, *, key: Array) -> None:
        model, dtype = config.model, jnp.dtype(config.training.compute_dtype)
        table_key, position_key, type_key, stack_key, head_key, order_key, output_key = jax.random.split(key, 7)
        embed, rows = {"embed": model.hidden_size}, {"vocab": padded_vocab_size(model)}
        types, std = {"token_types": model.num_token_types}, model.init_std
        self.embedding = normal(table_key, {**rows, **embed}, std)
        self.positions = normal(position_key, {"seq": model.sequence_length, **embed}, std)
        self.token_types = normal(type_key, {**types, **embed}, std) if model.num_token_types else None
        self.stack = Stack(model, dtype, recompute=Recompute.of(config.training), key=stack_key)
        self.embedding_norm = make_norm(model, dtype) if model.norm_placement == "post" else _unchanged
        self.final_norm = make_norm(model, dtype) if model.norm_placement == "pre" else _unchanged
        self.head = MaskedLMHead(model, dtype, key=head_key)
        self.order = SentenceOrderHead(model, key=order_key) if model.sentence_order else None
        self.output = None if model.tie_embeddings else normal(output_key, {**rows, **embed}, std)
        self.rate = model.hidden_dropout
        self.dtype = dtype

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        token_types: Int[Array, "batch seq"] | None = None,
        padding_mask: Int[Array, "batch seq"] | None = None,
        keys: Key[Array, " batch"] | None = None,
    ) -> Float[Array, "batch act_seq embed"]:
        """Final hidden states.

        Args:
          tokens: ids.
          token_types: 0 in the first sentence, 1 in the second; all 0 when None.
          padding_mask: 1 on tokens, 0 on padding, which no token sees; no padding when None.
          keys: one dropout key per sample; None turns dropout off.
        """
        with jax.named_scope("embedding"):
            x = vocab_parallel_embedding(self.embedding[...], tokens, self.dtype)
            x = x + reshard(self.positions[...].astype(self.dtype)[: tokens.shape[1]], spec("act_seq", "embed"))
            x = x + self._types(jnp.zeros_like(tokens) if token_types is None else token_types)
            x = dropout(self.embedding_norm(x), self.rate, keys, EMBEDDING_SITE, RESIDUAL)
        return self.final_norm(self.stack(x, Context(padding_mask, is_causal=False), keys))

    def _types(self, token_types: Array) -> Array | float:
        """Token-type embeddings, [batch, act_seq, embed]; a product in float32, and so the table's gradient."""
        if self.token_types is None:
            return 0.0
        table = self.token_types[...]
        chosen = reshard(jax.nn.one_hot(token_types, len(table)), spec("batch", "act_seq", None))
        return jnp.einsum("bst,th->bsh", chosen, table, out_sharding=spec(*RESIDUAL)).astype(self.dtype)

    @staticmethod
    def batch_arrays(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
        """Masked sentence pairs: `mtjax.data.samples.bert`."""
        names = {"tokens": jnp.int32, "token_types": jnp.int32, "padding_mask": jnp.int32}
        names |= {"labels": jnp.int32, "loss_mask": jnp.float32}
        arrays = {name: jax.ShapeDtypeStruct((config.model.sequence_length,), kind) for name, kind in names.items()}
        return arrays | {"sentence_order": jax.ShapeDtypeStruct((), jnp.int32)}

    @staticmethod
    def loss_weights(batch: Mapping[str, Array]) -> dict[str, Array]:
        """Each masked token counts once in the masked-LM loss, each sample in that of the sentence order."""
        return {"masked_lm": batch["loss_mask"], "sentence_order": jnp.ones_like(batch["sentence_order"], jnp.float32)}

    @staticmethod
    def num_tokens(batch: Mapping[str, Array]) -> Array:
        """Tokens that are no padding."""
        return batch["padding_mask"].sum().astype(jnp.float32)

    def batch_losses(
        self, batch: Mapping[str, Array], keys: Key[Array, " batch"] | None, options: LossOptions
    ) -> dict[str, Array]:
        """Cross-entropy of each masked token, 0 of the others, and of each sample's sentence order."""
        hidden = self(batch["tokens"], batch["token_types"], batch["padding_mask"], keys)
        with jax.named_scope("loss"):
            masked = Masked.of(batch["loss_mask"])
            features, labels = self.head(masked.take(hidden)), masked.take_labels(batch["labels"])
            bias = self.head.bias[...]
            losses = vocab_parallel_cross_entropy(features, self._output_table, labels, options, bias, sequence="seq")
            order = {} if self.order is None else {"sentence_order": self.order.losses(hidden, batch["sentence_order"])}
            return {"masked_lm": masked.put(losses), **order}

    def logits(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq vocab"]:
        """float32 logits over the padded vocabulary, split over the mesh; training never makes them."""
        x = self.head(reshard(hidden, spec("batch", "seq", "embed")))
        table, place = self._output_table.astype(self.dtype), spec("batch", "seq", "vocab")
        product = jnp.einsum("bsh,vh->bsv", x, table, preferred_element_type=jnp.float32, out_sharding=place)
        return product + self.head.bias[...]

    @property
    def _output_table(self) -> Array:
        return (self.embedding if self.output is None else self.output)[...]


def _unchanged(x: Array) -> Array:
    return x
