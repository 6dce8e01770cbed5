"""Self-attention and cross-attention, split by heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OTHER, Expectation
from mtjax.theory.parts.part import Part, Product, Scores, Stream, Touched, Weight, linear, norm, over_model
from mtjax.theory.parts.sublayer import own_token_sums, own_vector_sums, sublayer_keeps, sublayer_sends
from mtjax.theory.plans import Plan


@dataclass(frozen=True)
class _Heads(Part):
    """What both kinds of attention have."""

    hidden: int
    tokens: int
    """Of a sample, that ask."""
    heads: int
    """Of queries."""
    head_dim: int
    norm: str
    bias: bool

    @property
    def query_size(self) -> int:
        """q: width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def scores(self) -> Scores:
        raise NotImplementedError

    @property
    def touched(self) -> Touched:
        return Touched(stream=self.tokens * self.hidden, inside=self.tokens * self.query_size)

    def working(self, plan: Plan) -> float:
        return gradient_bytes(self.scores, plan)


@dataclass(frozen=True)
class Attention(_Heads):
    """A norm and self-attention: query, key and value in one product, scores, an output projection."""

    kv_heads: int
    is_causal: bool

    @property
    def kv_size(self) -> int:
        """k: width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> list[Weight]:
        embed, heads = {"embed": self.hidden}, {"heads": self.heads, "head_dim": self.head_dim}
        if self.kv_heads == self.heads:
            inputs = linear("attention.qkv", embed, {"qkv": 3, **heads}, bias=self.bias)
        else:
            shared = {"kv": 2, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
            inputs = linear("attention.qkv.query", embed, heads, bias=self.bias)
            inputs += linear("attention.qkv.key_value", embed, shared, bias=self.bias)
        output = linear("attention.output", heads, embed, bias=self.bias)
        return [*norm("attention_norm", self.norm, self.hidden), *inputs, *output]

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.tokens, self.head_dim, self.is_causal)

    def products(self, model_ways: int = 1) -> list[Product]:
        """Key and value heads that are fewer than the ways are computed once on every rank."""
        key_size = max(self.kv_heads, model_ways) * self.head_dim
        width = (self.query_size + 2 * key_size) / model_ways
        return [
            Product(self.tokens, self.hidden, width),
            Product(self.tokens, self.query_size / model_ways, self.hidden),
        ]

    def keeps(self, plan: Plan) -> Mapping[str, float]:
        inside = plan.microbatch_size * self.tokens / plan.mesh.model
        return {
            **sublayer_keeps(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: plan.element_bytes * inside * (self.query_size + 2 * self.kv_size),
            ATTENTION_OUTPUT: plan.element_bytes * inside * self.query_size,
            PROBABILITIES: probability_bytes(self.scores, plan),
            STATISTICS: 4 * inside * self.heads if plan.flash_attention and plan.residuals == "jax" else 0.0,
        }

    def cached(self, context: int) -> int:
        return 2 * self.kv_size * context

    @property
    def symbols(self) -> Mapping[str, int]:
        return {"key_width": self.kv_size}

    def sends(self, stream: Stream) -> list[Expectation]:
        lines = sublayer_sends(stream, "attention")
        shared = f"2*key_width*{'(hidden + 1)' if self.bias else 'hidden'}"
        if stream.split:
            lines.append(own_vector_sums(stream, self.norm, self.bias))
            if stream.shares_heads:
                lines.append(
                    own_token_sums(stream, f"{stream.side}layers*{shared}", "key and value heads of several ranks")
                )
        elif stream.shares_heads:
            why = "gradients of key and value heads that several ranks use"
            settings = {"dtype": "float32", "pooled": True}
            lines.append(over_model(LAYER_BACKWARD, "all-reduce", stream.times, shared, why, **settings))
        return lines


@dataclass(frozen=True)
class CrossAttention(_Heads):
    """A norm and attention from a decoder's tokens to the encoder's, which every layer projects to keys and values."""

    read: int
    """Tokens of the encoder, of a sample."""

    @property
    def weights(self) -> list[Weight]:
        embed, heads = {"embed": self.hidden}, {"heads": self.heads, "head_dim": self.head_dim}
        return [
            *norm("cross_norm", self.norm, self.hidden),
            *linear("cross.query", embed, heads, bias=self.bias),
            *linear("cross.key_value", embed, {"kv": 2, **heads}, bias=self.bias),
            *linear("cross.output", heads, embed, bias=self.bias),
        ]

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.read, self.head_dim, is_causal=False)

    def products(self, model_ways: int = 1) -> list[Product]:
        width = self.query_size / model_ways
        return [
            Product(self.tokens, self.hidden, width),
            Product(self.read, self.hidden, 2 * width),
            Product(self.tokens, width, self.hidden),
        ]

    def keeps(self, plan: Plan) -> Mapping[str, float]:
        each = plan.element_bytes * plan.microbatch_size * self.query_size / plan.mesh.model
        return {
            **sublayer_keeps(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: each * (self.tokens + 2 * self.read),
            ATTENTION_OUTPUT: each * self.tokens,
            PROBABILITIES: probability_bytes(self.scores, plan),
        }

    def cached(self, context: int) -> int:
        del context
        return 2 * self.query_size * self.read

    def sends(self, stream: Stream) -> list[Expectation]:
        """Its own sublayer's, and what it reads: gathered where sequences are split, its gradient summed."""
        lines = sublayer_sends(stream, "cross-attention")
        layers, grouped = f"{stream.side}layers", f"{stream.side}grouped_layers"
        read, every = "batch*sequence*hidden", f"{stream.turns}*batch*sequence*hidden"
        merged = {"pooled": True, "hoisted": True}
        if not stream.split:
            why = "f of what cross-attention reads, in each layer or once for their sum"
            return [*lines, over_model(LAYER_BACKWARD, "all-reduce", layers, every, why, **merged)]
        what, forward = "what cross-attention reads", f"{stream.forward_turns}*batch*sequence*hidden"
        return [
            *lines,
            over_model(LAYER_RECOMPUTE, "all-gather", f"({layers} - {grouped})*{stream.turns}", read, f"{what}, again"),
            over_model(LAYER_BACKWARD, "reduce-scatter", stream.times, read, f"gradient of {what}"),
            over_model(
                LAYER_FORWARD, "all-gather", layers, forward, f"{what}, in each layer or once", also=OTHER, **merged
            ),
            over_model(
                LAYER_RECOMPUTE, "all-gather", f"2*{grouped}", every, "again, twice a layer or once a group", **merged
            ),
            own_vector_sums(stream, self.norm, self.bias),
        ]


QUERY_KEY_VALUE = "query, key, value"
ATTENTION_OUTPUT = "attention output"
STATISTICS = "attention statistics"
"""Of flash attention's softmax, a float32 a query and head."""
PROBABILITIES = "attention probabilities"
"""The kind of what is kept that selective recompute leaves out."""


def probability_bytes(scores: Scores, plan: Plan) -> float:
    """float32 probabilities and a mask; of Megatron's kernels, softmax and dropout in the compute type and a mask."""
    if plan.flash_attention:
        return 0.0
    masks, c = int(plan.drops_probabilities), plan.element_bytes
    each = 4 + masks if plan.residuals == "jax" else 2 * c + masks if masks else c
    return each * scores.pairs * plan.microbatch_size / plan.mesh.model


def gradient_bytes(scores: Scores, plan: Plan) -> float:
    """Gradients on the way back through attention, once the probabilities are there.

    The product with the values gives those of the probabilities in the compute type, and the softmax turns them into
    those of the scores in float32. The gradient of the output counts in the place of the values, which are read first.
    """
    each = 0 if plan.flash_attention else 4 + plan.element_bytes
    return each * scores.pairs * plan.microbatch_size / plan.mesh.model
