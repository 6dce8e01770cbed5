"""Self-attention and cross-attention, sharded by heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.theory.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OTHER, Expectation, Kind
from mtjax.theory.parts.part import (
    Elementwise,
    Norms,
    Part,
    Product,
    ResidualStream,
    Scores,
    Weight,
    adapter_products,
    linear,
    over_model,
    weight,
)
from mtjax.theory.parts.score_blocks import QUERIES_AT_A_TIME, block_bytes, documents_at_most, score_bytes
from mtjax.theory.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.theory.plan import Plan
from mtjax.theory.rules import CONTEXT


@dataclass(frozen=True)
class _Heads(Part):
    """Formulas of both kinds of attention."""

    hidden: int
    tokens: int
    """Query tokens of a sample."""
    heads: int
    """Query heads."""
    head_dim: int
    norm: Norms
    biases: tuple[bool, bool]
    """Of query, key and value; of the output projection."""

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
        """Returns the bytes of the gradients of scores, or of flash attention's inputs; with sequence parallelism also
        of the gathered input and, without context parallelism, its gradient before the reduce-scatter."""
        c, samples = plan.element_bytes, plan.microbatch_size
        inputs = self.query_size * self.scores.queries + 2 * self.scores.groups * self.head_dim * self.scores.keys
        has_all = not plan.keeps_scores and not plan.context_parallelism
        input_gradients = c * samples * inputs / plan.mesh.model if has_all else 0.0
        gathered = stream_bytes(self.tokens, self.hidden, plan) if plan.sequence_parallel else 0.0
        copies = 1 if plan.context_parallelism else 2
        return input_gradients + copies * gathered + gradient_bytes(self.scores, plan)


@dataclass(frozen=True)
class Attention(_Heads):
    """A norm and self-attention: query, key and value in one matmul, scores, an output projection."""

    kv_heads: int
    is_causal: bool
    rank: int = 0
    """Of LoRA adapters; 0 without any."""
    qk_norm: tuple[str, ...] = ()
    """Vectors of the norm of queries, and of that of keys; none without QK norm."""
    qk_norm_scope: str = "head"
    """What QK norm normalizes: `head`, `each_head` or `width`."""
    has_sinks: bool = False
    is_capped: bool = False
    """Whether scores have a cap, whose backward pass reads their hyperbolic tangents."""
    buckets: int = 0
    """Of the layer's own relative position bias; 0 without one."""

    @property
    def kv_size(self) -> int:
        """k: width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> list[Weight]:
        embed, heads = {"embed": self.hidden}, {"heads": self.heads, "head_dim": self.head_dim}
        (bias, output_bias), rank = self.biases, self.rank
        if self.kv_heads == self.heads:
            inputs = linear("attention.qkv", embed, {"qkv": 3, **heads}, bias=bias, rank=rank)
        else:
            kv_heads = {"kv": 2, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
            inputs = linear("attention.qkv.query", embed, heads, bias=bias, rank=rank)
            inputs += linear("attention.qkv.key_value", embed, kv_heads, bias=bias, rank=rank)
        output = linear("attention.output", heads, embed, bias=output_bias, rank=rank)
        sinks = [weight("attention.sinks", {"heads": self.heads})] if self.has_sinks else []
        if self.buckets:
            output += [weight("attention.relative.table", {"buckets": self.buckets, "heads": self.heads})]
        return [*self.norm.weights("attention", self.hidden), *inputs, *output, *self._head_norms(), *sinks]

    def _head_norms(self) -> list[Weight]:
        """Returns the vectors of QK norm: one for all heads, or one for each."""
        found, is_shared = [], self.qk_norm_scope == "head"
        for name, heads in (("query_norm", {"heads": self.heads}), ("key_norm", {"kv_heads": self.kv_heads})):
            sizes = {**({} if is_shared else heads), "head_dim": self.head_dim}
            found += [weight(f"attention.{name}.{vector}", sizes) for vector in self.qk_norm]
        return found

    @property
    def normalizes_width(self) -> bool:
        """Whether QK norm is over all heads together, which tensor parallel ranks share."""
        return bool(self.qk_norm) and self.qk_norm_scope == "width"

    @property
    def scores(self) -> Scores:
        return Scores(
            self.heads, self.tokens, self.tokens, self.head_dim, self.is_causal, self.kv_heads, self.is_capped
        )

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the matmuls; a rank computes one key and one value head where there are fewer than ranks."""
        key_size = max(self.kv_heads, tensor_degree) * self.head_dim
        qkv_width, query_width = (self.query_size + 2 * key_size) / tensor_degree, self.query_size / tensor_degree
        return [
            *adapter_products(self.rank, self.tokens, (self.hidden, qkv_width, 3), (query_width, self.hidden)),
            Product(self.tokens, self.hidden, qkv_width),
            Product(self.tokens, query_width, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        tokens = plan.local_tokens(self.tokens) / plan.mesh.model
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: plan.element_bytes * tokens * (self.query_size + 2 * self.kv_size),
            ATTENTION_OUTPUT: plan.element_bytes * tokens * self.query_size,
            PROBABILITIES: probability_bytes(self.scores, plan),
            STATISTICS: statistics_bytes(self.scores, plan),
            **({WIDTH_STATISTICS: 2 * 4 * plan.local_tokens(self.tokens)} if self.normalizes_width else {}),
            **adapter_saved_bytes(self.rank, 4, self.hidden + self.query_size / plan.tensor_degree, self.tokens, plan),
        }

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns those of any attention, and the float32 biases of all pairs of tokens with their gradients."""
        biases = 2 * 4 * self.scores.pairs / plan.mesh.model if self.buckets else 0.0
        return super().backward_peak_bytes(plan) + biases

    def kv_elements(self, context: int) -> int:
        return 2 * self.kv_size * context

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        del plan
        return {"key_width": self.kv_size, "head_width": self.head_dim}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = [*sublayer_collectives(stream, "attention", learns=learns), *context_collectives(stream)]
        lines += width_norm_collectives(stream, learns=learns) if self.normalizes_width else []
        # Fewer key heads than ranks: ranks that share one all-reduce its gradient.
        per_head = 0 if self.qk_norm_scope == "head" else len(self.qk_norm)
        inputs = "(hidden + 1)" if self.biases[0] else "hidden"
        kv_gradients = f"(2*{inputs} + {per_head})*key_width" if per_head else f"2*key_width*{inputs}"
        if stream.is_frozen:
            if self.rank and stream.shares_heads:
                why = "gradient of B of replicated key and value heads"
                settings = {"dtype": "float32", "pooled": True, "also": LAYER_RECOMPUTE}
                lines.append(
                    over_model(LAYER_BACKWARD, "all-reduce", stream.times, "2*key_width*rank", why, **settings)
                )
            return [*lines, *adapter_collectives(stream, "attention", 3, self.rank)]
        if self.qk_norm and self.qk_norm_scope == "head":
            vectors = f"{stream.side}layers*{2 * len(self.qk_norm)}*head_width"
            lines.append(local_gradient_sums(stream, vectors, "gradients of QK norms"))
        if stream.split:
            lines += vector_gradient_sums(stream, self.norm, self.biases[1])
            if stream.shares_heads:
                lines.append(
                    local_gradient_sums(stream, f"{stream.side}layers*{kv_gradients}", "replicated key and value heads")
                )
        elif stream.shares_heads:
            why = "gradients of replicated key and value heads"
            settings = {"dtype": "float32", "pooled": True}
            lines.append(over_model(LAYER_BACKWARD, "all-reduce", stream.times, kv_gradients, why, **settings))
        return lines


@dataclass(frozen=True)
class CrossAttention(_Heads):
    """A norm and attention from a decoder's tokens to the encoder's, which every layer projects to keys and values."""

    read: int
    """The encoder's tokens of a sample."""

    @property
    def weights(self) -> list[Weight]:
        embed, heads = {"embed": self.hidden}, {"heads": self.heads, "head_dim": self.head_dim}
        bias, output_bias = self.biases
        return [
            *self.norm.weights("cross", self.hidden),
            *linear("cross.query", embed, heads, bias=bias),
            *linear("cross.key_value", embed, {"kv": 2, **heads}, bias=bias),
            *linear("cross.output", heads, embed, bias=output_bias),
        ]

    @property
    def scores(self) -> Scores:
        return Scores(self.heads, self.tokens, self.read, self.head_dim, is_causal=False, groups=self.heads)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        width = self.query_size / tensor_degree
        return [
            Product(self.tokens, self.hidden, width),
            Product(self.read, self.hidden, 2 * width),
            Product(self.tokens, width, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        each = plan.element_bytes * plan.microbatch_size * self.query_size / plan.mesh.model
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: each * (self.tokens + 2 * self.read),
            ATTENTION_OUTPUT: each * self.tokens,
            PROBABILITIES: probability_bytes(self.scores, plan),
        }

    def kv_elements(self, context: int) -> int:
        del context
        return 2 * self.query_size * self.read

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sublayer's collectives, and those of the encoder's output: its gradient is all-reduced, or, with
        sequence parallelism, it is all-gathered and its gradient reduce-scattered."""
        lines = sublayer_collectives(stream, "cross-attention")
        layers, grouped = f"{stream.side}layers", f"{stream.side}grouped_layers"
        encoded, every = "batch*sequence*hidden", f"{stream.turns}*batch*sequence*hidden"
        # XLA: may merge the collectives of all layers, which read the same array.
        merged = {"pooled": True, "hoisted": True}
        if not stream.split:
            why = "gradient of the encoder's output, in each layer or once for their sum"
            return [*lines, over_model(LAYER_BACKWARD, "all-reduce", layers, every, why, **merged)]
        what, forward = "encoder's output", f"{stream.forward_turns}*batch*sequence*hidden"
        recomputes = f"({layers} - {grouped})*{stream.turns}"
        return [
            *lines,
            over_model(LAYER_RECOMPUTE, "all-gather", recomputes, encoded, f"{what}, again"),
            over_model(LAYER_BACKWARD, "reduce-scatter", stream.times, encoded, f"gradient of the {what}"),
            over_model(
                LAYER_FORWARD, "all-gather", layers, forward, f"{what}, in each layer or once", also=OTHER, **merged
            ),
            over_model(
                LAYER_RECOMPUTE, "all-gather", f"2*{grouped}", every, f"{what}, twice a layer or once a group", **merged
            ),
            *vector_gradient_sums(stream, self.norm, self.biases[1]),
        ]


QUERY_KEY_VALUE = "query, key, value"
ATTENTION_OUTPUT = "attention output"
STATISTICS = "attention statistics"
"""Of flash attention's softmax (logsumexp): a float32 per query and head."""
WIDTH_STATISTICS = "QK norm statistics"
"""Of QK norm over all heads: a float32 per token of the queries, and of the keys."""
PROBABILITIES = "attention probabilities"
"""The kind of activations that selective recompute does not save."""


def probability_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the saved bytes of float32 probabilities, of the tangents of capped scores and of the dropout mask; with
    Megatron's kernels, of the outputs of softmax and dropout in the compute dtype and the mask."""
    if not plan.keeps_scores:
        return 0.0
    masks, c = int(plan.has_attention_dropout), plan.element_bytes
    each = 4 + masks if plan.residuals == "jax" else 2 * c + masks if masks else c
    each += 4 if scores.is_capped else 0
    return each * scores.pairs * plan.microbatch_size / plan.mesh.model


def statistics_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the saved bytes of the softmax's statistics; cuDNN's within documents has them of each."""
    if plan.residuals != "jax" or plan.keeps_scores:
        return 0.0
    rows = documents_at_most(scores.keys) if plan.packs_documents else 1
    return 4 * rows * plan.local_tokens(scores.queries) * scores.heads / plan.mesh.model


def gradient_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the bytes of gradients in attention's backward pass, with the probabilities saved or recomputed.

    These are the gradients of probabilities and of scores, both in the compute dtype. The output's gradient takes the
    memory of the values, which are read before it.
    """
    if plan.context_parallelism:
        return ring_step_bytes(scores, plan)
    if plan.packs_documents:  # the larger of both branches: keys and values, and their gradients, of all query heads
        heads = 4 * plan.element_bytes * plan.microbatch_size * scores.heads * scores.width * scores.keys
        return max(heads / plan.mesh.model, block_bytes(scores, plan))
    if plan.flash_attention:
        return 0.0
    if plan.attention_in_blocks:
        return block_bytes(scores, plan)
    return 2 * plan.element_bytes * scores.pairs * plan.microbatch_size / plan.mesh.model


def ring_step_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the bytes alive in a ring step of the backward pass of context parallel attention.

    Of keys and values those in flight and those in use, and likewise the float32 sums of their gradients; with
    all-gather those of all ranks. Of queries, output and its gradient the two chunks of the step, and the float32 sum
    of the queries' gradients. XLA's kernel has those of `score_bytes`, of `QUERIES_AT_A_TIME` queries.
    """
    c, tokens, degree = plan.element_bytes, plan.local_tokens(scores.queries), plan.mesh.model
    keys = max(scores.groups / degree, 1) * scores.width * tokens
    gathered = (plan.mesh.context - 1) * keys * (2 * c + 2 * 4) if plan.context_method == "all-gather" else 0
    held = gathered + keys * (4 * c + 4 * 4) + scores.heads / degree * scores.width * tokens * (4 * c + 4)
    if plan.flash_attention:
        return held
    pairs = min(QUERIES_AT_A_TIME * plan.microbatch_size, tokens) * scores.keys / plan.mesh.context
    return held + score_bytes(plan) * scores.heads / degree * pairs


def width_norm_collectives(stream: ResidualStream, *, learns: bool) -> list[Expectation]:
    """Returns the all-reduces of a QK norm over all heads: of each token the sum of squares, and in the backward pass
    the sum of its gradient's products, for queries and for keys.

    The sums are saved, so that only full recompute repeats those of the forward pass.
    """
    sums, settings = "2*batch*sequence", {"dtype": "float32", "pooled": True}
    recomputed = f"{stream.side}recomputed_layers*{stream.turns}"
    back = stream.times if learns else stream.input_gradients
    why = "of queries and of keys, for their norms over all heads"
    return [
        over_model(LAYER_FORWARD, "all-reduce", stream.forward_times, sums, f"squares {why}", **settings),
        over_model(LAYER_RECOMPUTE, "all-reduce", recomputed, sums, f"squares {why}, again", **settings),
        over_model(LAYER_BACKWARD, "all-reduce", back, sums, f"gradients {why}", **settings),
    ]


def context_collectives(stream: ResidualStream) -> list[Expectation]:
    """Returns the collectives of context parallel self-attention, in every layer.

    A ring permutes keys and values c-1 times, and in the backward pass the float32 sums of their gradients, which one
    more hop returns to their rank in the compute dtype. Otherwise keys and values are all-gathered, and the gradients
    reduce-scattered. The backward pass needs keys and values again.
    """
    if stream.across is None:
        return []
    recomputed, hops = f"recomputed_layers*{stream.turns}", "(context_ways - 1)"
    # XLA: the backward pass's first transfer is the recompute's last, but for layers in groups.
    sent_before = "(recomputed_layers - grouped_layers)"
    local = "batch*sequence*rank_key_width"
    lines: list[Expectation] = []

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, **settings: object) -> None:
        lines.append(Expectation(phase, kind, CONTEXT, count, elements, why=why, **settings))  # pyright: ignore[reportArgumentType]

    if stream.across.method == "ring":
        sent = [(2, local, "keys and values", {})]
        if stream.across.keeps_documents_apart:
            sent.append((1, "batch*sequence", "document ids of keys", {"dtype": "int32"}))
        for arrays, elements, what, settings in sent:
            permutes = f"{arrays}*{hops}" if arrays > 1 else hops
            forward, forward_permutes = stream.forward_times, permutes
            if arrays == 1:  # XLA: ids are the same in all layers, so that their first hop may be sent once
                forward_permutes, first = "(context_ways - 2)", {"pooled": True, "hoisted": True, **settings}
                line(LAYER_FORWARD, "collective-permute", forward, elements, f"{what}, first ring step", **first)
            count = f"{forward_permutes}*{forward}"
            line(LAYER_FORWARD, "collective-permute", count, elements, f"{what}, ring steps", **settings)
            count = f"{permutes}*{recomputed}"
            line(LAYER_RECOMPUTE, "collective-permute", count, elements, f"{what}, ring steps", **settings)
            count = f"{arrays}*({hops}*layers - {sent_before})*{stream.turns}"
            line(LAYER_BACKWARD, "collective-permute", count, elements, f"{what}, ring steps", **settings)
        why, dtype = "gradients of keys and values", "compute" if stream.across.sends_rounded else "float32"
        line(LAYER_BACKWARD, "collective-permute", f"2*{hops}*{stream.times}", local, f"{why}, ring steps", dtype=dtype)
        line(LAYER_BACKWARD, "collective-permute", f"2*{stream.times}", local, f"{why}, back to their rank")
        return lines
    every, count = f"context_ways*{local}", f"(layers - {sent_before})*{stream.turns}"
    line(LAYER_FORWARD, "all-gather", f"2*{stream.forward_times}", every, "keys and values")
    line(LAYER_RECOMPUTE, "all-gather", f"2*{recomputed}", every, "keys and values")
    line(LAYER_BACKWARD, "all-gather", f"2*{count}", every, "keys and values")
    if stream.across.keeps_documents_apart:
        elements, why = "context_ways*batch*sequence", "document ids of keys, the same for all layers"
        settings: dict[str, object] = {"dtype": "int32", "pooled": True, "hoisted": True, "also": LAYER_RECOMPUTE}
        line(LAYER_FORWARD, "all-gather", f"3*{stream.times}", elements, why, **settings)
    why = "gradients of keys and values"
    line(LAYER_BACKWARD, "reduce-scatter", f"2*{stream.times}", every, why, dtype="float32")
    return lines
