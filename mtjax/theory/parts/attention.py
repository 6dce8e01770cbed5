"""Self-attention and cross-attention, split by heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OTHER, Expectation, Kind
from mtjax.theory.parts.part import (
    Elementwise,
    Part,
    Product,
    ResidualStream,
    Scores,
    Weight,
    adapter_products,
    linear,
    norm,
    over_model,
    weight,
)
from mtjax.theory.parts.sublayer import (
    adapters_keep,
    adapters_send,
    own_token_sums,
    own_vector_sums,
    stream_bytes,
    sublayer_keeps,
    sublayer_sends,
)
from mtjax.theory.plan import Plan
from mtjax.theory.rules import CONTEXT


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
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=self.tokens * self.hidden, inside=self.tokens * self.query_size)

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Gradients of scores, or of what flash attention reads; with split sequences what the sublayer gathered and,
        unless ranks share samples, the gradient of that before it is scattered."""
        c, samples = plan.element_bytes, plan.microbatch_size
        read = self.query_size * self.scores.queries + 2 * self.scores.groups * self.head_dim * self.scores.keys
        of_inputs = (
            c * samples * read / plan.mesh.model if plan.flash_attention and not plan.context_parallelism else 0.0
        )
        whole = stream_bytes(self.tokens, self.hidden, plan) if plan.sequence_parallel else 0.0
        return of_inputs + (1 if plan.context_parallelism else 2) * whole + gradient_bytes(self.scores, plan)


@dataclass(frozen=True)
class Attention(_Heads):
    """A norm and self-attention: query, key and value in one product, scores, an output projection."""

    kv_heads: int
    is_causal: bool
    rank: int = 0
    """Of adapters; 0 without any."""
    norms_heads: bool = False
    """Whether every head of queries and of keys has a norm."""

    @property
    def kv_size(self) -> int:
        """k: width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> list[Weight]:
        embed, heads = {"embed": self.hidden}, {"heads": self.heads, "head_dim": self.head_dim}
        bias, rank = self.bias, self.rank
        if self.kv_heads == self.heads:
            inputs = linear("attention.qkv", embed, {"qkv": 3, **heads}, bias=bias, rank=rank)
        else:
            shared = {"kv": 2, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
            inputs = linear("attention.qkv.query", embed, heads, bias=bias, rank=rank)
            inputs += linear("attention.qkv.key_value", embed, shared, bias=bias, rank=rank)
        output = linear("attention.output", heads, embed, bias=bias, rank=rank)
        of_heads = ("query_norm", "key_norm") if self.norms_heads else ()
        norms = [weight(f"attention.{name}.scale", {"head_dim": self.head_dim}) for name in of_heads]
        return [*norm("attention_norm", self.norm, self.hidden), *inputs, *output, *norms]

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.tokens, self.head_dim, self.is_causal, self.kv_heads)

    def products(self, model_ways: int = 1) -> list[Product]:
        """Key and value heads that are fewer than the ways are computed once on every rank."""
        key_size = max(self.kv_heads, model_ways) * self.head_dim
        width, own = (self.query_size + 2 * key_size) / model_ways, self.query_size / model_ways
        return [
            *adapter_products(self.rank, self.tokens, (self.hidden, width, 3), (own, self.hidden)),
            Product(self.tokens, self.hidden, width),
            Product(self.tokens, own, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        inside = plan.local_tokens(self.tokens) / plan.mesh.model
        has_statistics = plan.residuals == "jax" and (plan.flash_attention or plan.context_parallelism is not None)
        return {
            **sublayer_keeps(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: plan.element_bytes * inside * (self.query_size + 2 * self.kv_size),
            ATTENTION_OUTPUT: plan.element_bytes * inside * self.query_size,
            PROBABILITIES: probability_bytes(self.scores, plan),
            STATISTICS: 4 * inside * self.heads if has_statistics else 0.0,
            **adapters_keep(self.rank, 4, self.hidden + self.query_size / plan.tensor_degree, self.tokens, plan),
        }

    def kv_elements(self, context: int) -> int:
        return 2 * self.kv_size * context

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        del plan
        return {"key_width": self.kv_size, "head_width": self.head_dim}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = [*sublayer_sends(stream, "attention", learns=learns), *across_sends(stream)]
        shared = f"2*key_width*{'(hidden + 1)' if self.bias else 'hidden'}"
        if stream.is_frozen:
            if self.rank and stream.shares_heads:
                why = "B of key and value heads that several ranks use"
                settings = {"dtype": "float32", "pooled": True, "also": LAYER_RECOMPUTE}
                lines.append(
                    over_model(LAYER_BACKWARD, "all-reduce", stream.times, "2*key_width*rank", why, **settings)
                )
            return [*lines, *adapters_send(stream, "attention", 3, self.rank)]
        if self.norms_heads:
            lines.append(own_token_sums(stream, f"{stream.side}layers*2*head_width", "norms of each rank's heads"))
        if stream.split:
            lines += own_vector_sums(stream, self.norm, self.bias)
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
        return Scores(self.heads, self.tokens, self.read, self.head_dim, is_causal=False, groups=self.heads)

    def products(self, model_ways: int = 1) -> list[Product]:
        width = self.query_size / model_ways
        return [
            Product(self.tokens, self.hidden, width),
            Product(self.read, self.hidden, 2 * width),
            Product(self.tokens, width, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        each = plan.element_bytes * plan.microbatch_size * self.query_size / plan.mesh.model
        return {
            **sublayer_keeps(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: each * (self.tokens + 2 * self.read),
            ATTENTION_OUTPUT: each * self.tokens,
            PROBABILITIES: probability_bytes(self.scores, plan),
        }

    def kv_elements(self, context: int) -> int:
        del context
        return 2 * self.query_size * self.read

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
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
            *own_vector_sums(stream, self.norm, self.bias),
        ]


QUERY_KEY_VALUE = "query, key, value"
ATTENTION_OUTPUT = "attention output"
STATISTICS = "attention statistics"
"""Of flash attention's softmax, a float32 a query and head."""
PROBABILITIES = "attention probabilities"
"""The kind of what is kept that selective recompute leaves out."""


def probability_bytes(scores: Scores, plan: Plan) -> float:
    """float32 probabilities and a mask; of Megatron's kernels, softmax and dropout in the compute type and a mask."""
    if plan.flash_attention or plan.context_parallelism:
        return 0.0
    masks, c = int(plan.has_attention_dropout), plan.element_bytes
    each = 4 + masks if plan.residuals == "jax" else 2 * c + masks if masks else c
    return each * scores.pairs * plan.microbatch_size / plan.mesh.model


def gradient_bytes(scores: Scores, plan: Plan) -> float:
    """Gradients on the way back through attention, once the probabilities are there.

    The product with the values gives those of the probabilities, and the softmax turns them into those of the scores,
    both in the compute type. The gradient of the output counts in the place of the values, which are read first.
    """
    if plan.context_parallelism:
        return turn_bytes(scores, plan)
    each = 0 if plan.flash_attention else 2 * plan.element_bytes
    return each * scores.pairs * plan.microbatch_size / plan.mesh.model


QUERIES_AT_A_TIME = 512
"""Whose scores XLA's kernel has alive at a time where ranks share samples."""


def turn_bytes(scores: Scores, plan: Plan) -> float:
    """What attention across ranks has alive in its backward pass.

    Keys and values on their way and at work, float32 sums of their gradients likewise, and of a gather those of all
    ranks; of queries, output and gradient the two chunks that a turn computes with, and float32 sums of the queries'
    gradients. XLA's kernel has the scores of some queries, their exponentials and the gradients of both in float32 and
    twice in the compute type.
    """
    c, tokens, ways = plan.element_bytes, plan.local_tokens(scores.queries), plan.mesh.model
    keys = max(scores.groups / ways, 1) * scores.width * tokens
    everyone = (plan.mesh.context - 1) * keys * (2 * c + 2 * 4) if plan.context_method == "all-gather" else 0
    held = everyone + keys * (4 * c + 4 * 4) + scores.heads / ways * scores.width * tokens * (4 * c + 4)
    if plan.flash_attention:
        return held
    alive = min(QUERIES_AT_A_TIME * plan.microbatch_size, tokens) * scores.keys / plan.mesh.context
    return held + (3 * 4 + 2 * c) * scores.heads / ways * alive


def across_sends(stream: ResidualStream) -> list[Expectation]:
    """What ranks that share samples send each other for causal self-attention, in every layer.

    A turn needs another rank's keys and values. A ring passes them on c-1 times, and so the float32 sums of their
    gradients, which then go home in the compute type; else all have them from a gather, and scatter the sums. The
    backward pass needs keys and values again; what it would send first a layer that is computed again has just sent.
    """
    if stream.across is None:
        return []
    again, others = f"recomputed_layers*{stream.turns}", "(context_ways - 1)"
    sent_before = "(recomputed_layers - grouped_layers)"
    own = "batch*sequence*rank_key_width"
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, **settings: object) -> None:
        lines.append(Expectation(phase, kind, CONTEXT, count, elements, why=why, **settings))  # pyright: ignore[reportArgumentType]

    if stream.across.method == "ring":
        sent = [(2, own, "keys and values", {})]
        if stream.across.keeps_documents_apart:
            sent.append((1, "batch*sequence", "numbers of the keys' documents", {"dtype": "int32"}))
        for arrays, elements, what, settings in sent:
            each = f"{arrays}*{others}" if arrays > 1 else others
            forward, hops = stream.forward_times, each
            if arrays == 1:  # the same in all layers: the compiler may send them once on their first hop
                hops, first = "(context_ways - 2)", {"pooled": True, "hoisted": True, **settings}
                line(LAYER_FORWARD, "collective-permute", forward, elements, f"{what}, to the next", **first)
            line(LAYER_FORWARD, "collective-permute", f"{hops}*{forward}", elements, f"{what}, on", **settings)
            line(LAYER_RECOMPUTE, "collective-permute", f"{each}*{again}", elements, f"{what}, again", **settings)
            back = f"{arrays}*({others}*layers - {sent_before})*{stream.turns}"
            line(LAYER_BACKWARD, "collective-permute", back, elements, f"{what}, once more", **settings)
        why, dtype = "sums of their gradients", "compute" if stream.across.sends_rounded else "float32"
        line(LAYER_BACKWARD, "collective-permute", f"2*{others}*{stream.times}", own, why, dtype=dtype)
        line(LAYER_BACKWARD, "collective-permute", f"2*{stream.times}", own, f"{why}, home")
        return lines
    every, back = f"context_ways*{own}", f"(layers - {sent_before})*{stream.turns}"
    line(LAYER_FORWARD, "all-gather", f"2*{stream.forward_times}", every, "keys and values of all")
    line(LAYER_RECOMPUTE, "all-gather", f"2*{again}", every, "keys and values of all, again")
    line(LAYER_BACKWARD, "all-gather", f"2*{back}", every, "keys and values of all, once more")
    if stream.across.keeps_documents_apart:
        elements, why = "context_ways*batch*sequence", "numbers of the keys' documents, the same for all layers"
        settings: dict[str, object] = {"dtype": "int32", "pooled": True, "hoisted": True, "also": LAYER_RECOMPUTE}
        line(LAYER_FORWARD, "all-gather", f"3*{stream.times}", elements, why, **settings)
    line(LAYER_BACKWARD, "reduce-scatter", f"2*{stream.times}", every, "sums of their gradients", dtype="float32")
    return lines
