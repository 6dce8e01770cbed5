"""Heads, from hidden states to logits and losses: the output table, BERT's two heads, and those of finetuning."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard
from jaxtyping import Bool, Float, Int, Key

from mtjax.config import Model
from mtjax.config.sizes import GATED, embedding_width, most_masked, padded_vocab_size
from mtjax.layout.weights import head_products, output_weights
from mtjax.models.ops import Linear, activation_of, constant, dropout, make_norm
from mtjax.sharding.axes import spec
from mtjax.sharding.context.zigzag import sample_length

PADDING_LOGIT = -1e30
HEAD_SITE = 2**31 - 4
"""Dropout site of a head."""


class MaskedPositions(NamedTuple):
    """The masked tokens: the masked-LM head and its logits are computed for these few only."""

    chosen: Float[Array, "batch masked seq"]
    """One-hot positions of a sample's masked tokens; zeros where there are fewer."""
    is_left_out: Bool[Array, "batch seq"]
    """Masked tokens beyond the maximum of a sample."""

    @classmethod
    def of(cls, loss_mask: Float[Array, "batch seq"]) -> "MaskedPositions":
        """Finds the masked tokens of a batch's mask."""
        # A cumulative sum and comparisons instead of gathers, which would communicate between shards. With context
        # parallelism all masked tokens of a sample may be on one rank, so each rank needs positions for all of them.
        is_masked = loss_mask > 0
        number = jnp.cumsum(is_masked, axis=1) - 1
        length = loss_mask.shape[1]
        # The same static number for every sample, so that the head has fixed shapes.
        most = min(most_masked(sample_length(length)), length)
        chosen = (number[:, None] == jnp.arange(most)[:, None]) & is_masked[:, None]
        return cls(chosen.astype(jnp.float32), is_masked & (number >= most))

    def take(self, hidden: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch masked embed"]:
        """Returns the hidden states of the masked tokens, zeros where there are fewer.

        With sequence parallelism the product is reduced over the shards of the sequence.
        """
        chosen = reshard(self.chosen.astype(hidden.dtype), spec("batch", None, "act_seq"))
        return jnp.einsum("bms,bsh->bmh", chosen, hidden, out_sharding=spec("batch", "seq", "embed"))

    def take_labels(self, labels: Int[Array, "batch seq"]) -> Int[Array, "batch masked"]:
        """Returns the labels of the masked tokens, 0 where there are fewer."""
        return (self.chosen.astype(labels.dtype) * labels[:, None]).sum(-1)

    def put(self, losses: Float[Array, "batch masked"]) -> Float[Array, "batch seq"]:
        """Puts each loss at its token: 0 at unmasked tokens, NaN at those left out, whose loss is unknown."""
        # With NaN the step is skipped and reported; a loss of 0 would be a wrong number that no check finds.
        return jnp.where(self.is_left_out, jnp.nan, jnp.where(self.chosen > 0, losses[..., None], 0).sum(1))


class MaskedLMHead(nnx.Module):
    """A dense layer, activation and norm before the output table, and a bias per vocabulary entry.

    As in Megatron, the dense layer and its input are replicated over `model`, so it has no communication.
    """

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, key: Array) -> None:
        """Draws the parameters; the bias is 0."""
        width = model.hidden_size
        self.dense = Linear(*head_products(width)["dense"], std=model.init_std, bias=model.head_bias, key=key)
        self.norm = make_norm(model, dtype)
        self.bias = constant(0.0, output_weights(padded_vocab_size(model), width)["output_bias"])
        ungated = "gelu" if model.activation in GATED else model.activation
        self.activation = activation_of("gelu_exact" if model.activation == "geglu_exact" else ungated)

    def __call__(self, hidden: Float[Array, "batch masked embed"]) -> Float[Array, "batch masked embed"]:
        """Computes the vectors that are multiplied with the output table."""
        return self.norm(self.activation(self.dense(hidden)))


class PoolerHead(nnx.Module):
    """A pooler (dense and tanh, or ReLU, on the first token) and a linear layer: BERT's sentence order, and finetuning.

    It is replicated over `model`.
    """

    def __init__(self, model: Model, outputs: int, *, rate: float = 0.0, activation: str = "tanh", key: Array) -> None:
        """Draws the parameters for `outputs` logits; `rate` is that of dropout, `activation` tanh or relu."""
        pooler_key, classifier_key = jax.random.split(key)
        products = head_products(model.hidden_size, outputs)
        self.pooler = Linear(*products["pooler"], std=model.init_std, key=pooler_key)
        self.classifier = Linear(*products["classifier"], std=model.init_std, key=classifier_key)
        self.dropout_rate = rate
        self.activation = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]

    def __call__(
        self, hidden: Float[Array, "batch act_seq embed"], keys: Key[Array, " batch"] | None = None
    ) -> Float[Array, "batch classes"]:
        """Computes float32 logits; `keys` turn on the dropout between the two layers."""
        # A product, not a slice: with sequence parallelism one rank has the first token, and the product's reduction
        # broadcasts it.
        first = jax.nn.one_hot(jnp.zeros(1, jnp.int32), hidden.shape[1], dtype=hidden.dtype)
        first = reshard(first, spec(None, "act_seq"))
        sharding = spec("batch", None, "embed")
        pooled = self.activation(self.pooler(jnp.einsum("bsh,qs->bqh", hidden, first, out_sharding=sharding)))
        pooled = dropout(pooled, self.dropout_rate, keys, HEAD_SITE, ("batch", "seq", "embed"))
        return self.classifier(pooled)[:, 0].astype(jnp.float32)


class LastTokenHead(nnx.Module):
    """A linear layer without bias on a text's last token, which attends to all tokens: finetuning of decoders.

    It is replicated over `model`.
    """

    def __init__(self, model: Model, outputs: int, *, key: Array) -> None:
        """Draws the parameters for `outputs` logits."""
        sizes = head_products(embedding_width(model), outputs)["classifier"]
        self.classifier = Linear(*sizes, std=model.init_std, bias=False, key=key)

    def __call__(
        self, hidden: Float[Array, "batch act_seq embed"], padding_mask: Int[Array, "batch seq"]
    ) -> Float[Array, "batch classes"]:
        """Computes float32 logits; the mask is 1 on the tokens, at the beginning of each row, and 0 on padding."""
        # A product, as in `PoolerHead`: one rank of the sequence has the token.
        last = jax.nn.one_hot(padding_mask.sum(1, keepdims=True) - 1, hidden.shape[1], dtype=hidden.dtype)
        last = reshard(last, spec("batch", None, "act_seq"))
        hidden_of_last = jnp.einsum("bqs,bsh->bqh", last, hidden, out_sharding=spec("batch", None, "embed"))
        return self.classifier(hidden_of_last)[:, 0].astype(jnp.float32)


class SpanHead(nnx.Module):
    """A linear layer on every token: logits of being the first and the last token of an answer.

    It is replicated over `model`; with sequence parallelism each rank computes its tokens' logits, and they are
    gathered.
    """

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the parameters."""
        sizes = head_products(model.hidden_size)["spans"]
        self.spans = Linear(*sizes, std=model.init_std, sequence="act_seq", key=key)

    def __call__(
        self, hidden: Float[Array, "batch act_seq embed"], padding_mask: Int[Array, "batch seq"]
    ) -> Float[Array, "batch seq 2"]:
        """Computes float32 logits; those of padding are so low that its probability is 0."""
        logits = reshard(self.spans(hidden).astype(jnp.float32), spec("batch", "seq", "classes"))
        return jnp.where(padding_mask[..., None] > 0, logits, PADDING_LOGIT)


def class_losses(logits: Float[Array, "*batch classes"], labels: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Computes the cross-entropy of each sample."""
    return jax.nn.logsumexp(logits, axis=-1) - (jax.nn.one_hot(labels, logits.shape[-1]) * logits).sum(-1)


def divergences(
    logits: Float[Array, "*batch classes"], teacher: Float[Array, "*batch classes"], temperature: float
) -> Float[Array, "*batch"]:
    """Computes T^2 KL(softmax(teacher / T) || softmax(logits / T)) of each sample (arXiv 1503.02531)."""
    logits, teacher = (jax.nn.log_softmax(a / temperature) for a in (logits, teacher))
    return temperature**2 * (jnp.exp(teacher) * (teacher - logits)).sum(-1)
