"""Self-attention and cross-attention, sharded by heads."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, OTHER, Expectation
from mtjax.analysis.parts.attention_collectives import context_collectives, width_norm_collectives
from mtjax.analysis.parts.part import (
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
    weights_of,
)
from mtjax.analysis.parts.score_blocks import block_bytes, score_bytes
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    matrix_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
    vector_gradient_sums,
)
from mtjax.layout.attention_kernel import QUERIES_AT_A_TIME, documents_at_most
from mtjax.layout.plan import Plan
from mtjax.layout.weights import attention_products, attention_sinks, cross_products, head_norm_weights, relative_table


@dataclass(frozen=True)
class _HeadsPart(Part):
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
        # A fused kernel writes the gradients of query, key and value at once.
        has_all = not plan.keeps_scores and not plan.context_parallelism
        input_gradients = c * samples * inputs / plan.mesh.model if has_all else 0.0
        gathered = stream_bytes(self.tokens, self.hidden, plan) if plan.splits_stream else 0.0
        copies = 1 if plan.context_parallelism else 2
        return input_gradients + copies * gathered + gradient_bytes(self.scores, plan)


@dataclass(frozen=True)
class AttentionPart(_HeadsPart):
    """A norm and self-attention: query, key and value in one matmul, scores, an output projection."""

    kv_heads: int
    is_causal: bool
    rank: int = 0
    """Of LoRA adapters; 0 without any."""
    qk_norm: int = 0
    """Vectors of the norm of queries, and of that of keys: a scale, perhaps a bias; 0 without QK norm."""
    qk_norm_scope: str = "head"
    """What QK norm normalizes: `head`, `each_head` or `width`."""
    has_sinks: bool = False
    has_gate: bool = False
    """Whether the output passes a gate, a product of the input."""
    is_capped: bool = False
    """Whether scores have a cap, whose backward pass reads their hyperbolic tangents."""
    visible: float = 0.5
    """Share of the scores that a causal model needs, in the mean of its layers."""
    buckets: int = 0
    """Of the layer's own relative position bias; 0 without one."""
    is_biased: bool = False
    """Whether scores have a relative position bias, of the layer or of its stack."""

    @property
    def kv_size(self) -> int:
        """k: width of all key heads together, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> list[Weight]:
        (bias, output_bias), weights = self.biases, self.norm.weights("attention", self.hidden)
        heads = (self.heads, self.kv_heads, self.head_dim)
        for name, sizes in attention_products(self.hidden, *heads, is_gated=self.has_gate).items():
            has_bias = output_bias if name == "output" else bias
            weights += linear(f"attention.{name}", *sizes, bias=has_bias, rank=self.rank)
        if self.buckets:
            weights.append(weight("attention.relative.table", relative_table(self.buckets, self.heads)))
        if self.qk_norm:
            is_shared = self.qk_norm_scope == "head"
            for name, vectors in head_norm_weights(*heads, is_shared=is_shared, bias=self.qk_norm > 1).items():
                weights += weights_of(vectors, f"attention.{name}.")
        return [*weights, *([weight("attention.sinks", attention_sinks(self.heads))] if self.has_sinks else [])]

    @property
    def elementwise(self) -> Elementwise:
        """Elements of element-wise kernels, those of QK norm included."""
        normed = self.tokens * (self.query_size + self.kv_size) if self.qk_norm else 0
        return replace(super().elementwise, normed=normed)

    @property
    def normalizes_width(self) -> bool:
        """Whether QK norm is over all heads together, which tensor parallel ranks share."""
        return self.qk_norm > 0 and self.qk_norm_scope == "width"

    @property
    def scores(self) -> Scores:
        sizes = (self.heads, self.tokens, self.tokens, self.head_dim)
        return Scores(*sizes, self.is_causal, self.kv_heads, self.is_capped, self.visible, is_biased=self.is_biased)

    @property
    def _columns(self) -> int:
        """Column-parallel matmuls, each of which has an adapter."""
        return 3 + self.has_gate

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the matmuls; a rank computes one key and one value head where there are fewer than ranks."""
        key_size = max(self.kv_heads, tensor_degree) * self.head_dim
        qkv_width, query_width = (self.query_size + 2 * key_size) / tensor_degree, self.query_size / tensor_degree
        columns = (self.hidden, qkv_width + self.has_gate * query_width, self._columns)
        return [
            *adapter_products(self.rank, self.tokens, columns, (query_width, self.hidden)),
            Product(self.tokens, self.hidden, qkv_width, reads_input=True),
            *([Product(self.tokens, self.hidden, query_width, reads_input=True)] if self.has_gate else []),
            Product(self.tokens, query_width, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        tokens = plan.local_tokens(self.tokens) / plan.mesh.model
        read = self.hidden + self.query_size / plan.tensor_degree
        return {
            **sublayer_saved_bytes(self.tokens, self.hidden, plan),
            QUERY_KEY_VALUE: plan.element_bytes * tokens * (self.query_size + 2 * self.kv_size),
            ATTENTION_OUTPUT: plan.element_bytes * tokens * self.query_size,
            **({GATE: plan.element_bytes * tokens * self.query_size} if self.has_gate else {}),
            PROBABILITIES: probability_bytes(self.scores, plan),
            STATISTICS: statistics_bytes(self.scores, plan),
            **({WIDTH_STATISTICS: 2 * 4 * plan.local_tokens(self.tokens)} if self.normalizes_width else {}),
            **adapter_saved_bytes(self.rank, 1 + self._columns, read, self.tokens, plan),
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
        # Fewer key heads than ranks: those with the same one all-reduce its gradient.
        # A weight for all heads is replicated anyway, and has a line of its own below.
        per_head = 0 if self.qk_norm_scope == "head" else self.qk_norm
        inputs = "(hidden + 1)" if self.biases[0] else "hidden"
        kv_gradients = f"(2*{inputs} + {per_head})*key_width" if per_head else f"2*key_width*{inputs}"
        if stream.is_frozen:
            if self.rank and stream.shares_heads:
                why = "gradient of B of replicated key and value heads"
                lines.append(matrix_gradient_sums(stream, "2*key_width*rank", why, "float32", LAYER_RECOMPUTE))
            return [*lines, *adapter_collectives(stream, "attention", self._columns, self.rank)]
        if self.qk_norm and self.qk_norm_scope == "head":
            vectors = f"{stream.side}layers*{2 * self.qk_norm}*head_width"
            lines.append(local_gradient_sums(stream, vectors, "gradients of QK norms"))
        if stream.split:
            lines += vector_gradient_sums(stream, self.norm, self.biases[1])
            if stream.shares_heads:
                lines.append(
                    local_gradient_sums(stream, f"{stream.side}layers*{kv_gradients}", "replicated key and value heads")
                )
        elif stream.shares_heads:
            why = "gradients of replicated key and value heads"
            lines.append(matrix_gradient_sums(stream, kv_gradients, why, "float32"))
        return lines


@dataclass(frozen=True)
class CrossAttentionPart(_HeadsPart):
    """A norm and attention from a decoder's tokens to the encoder's, which every layer projects to keys and values."""

    read: int
    """The encoder's tokens of a sample."""

    @property
    def weights(self) -> list[Weight]:
        (bias, output_bias), weights = self.biases, self.norm.weights("cross", self.hidden)
        for name, sizes in cross_products(self.hidden, self.heads, self.head_dim).items():
            weights += linear(f"cross.{name}", *sizes, bias=output_bias if name == "output" else bias)
        return weights

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
GATE = "attention gate"
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
    """Returns the saved bytes of the softmax's statistics; cuDNN's kernel saves them for each document of its bound."""
    if plan.residuals != "jax" or plan.keeps_scores:
        return 0.0
    rows = documents_at_most(scores.keys) if plan.packs_documents else 1
    return 4 * rows * plan.local_tokens(scores.queries) * scores.heads / plan.mesh.model


def gradient_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the bytes of gradients in attention's backward pass, with the probabilities saved or recomputed."""
    if plan.context_parallelism:
        return ring_step_bytes(scores, plan)
    if plan.packs_documents:  # the larger of both branches: keys and values, and their gradients, of all query heads
        heads = 4 * plan.element_bytes * plan.microbatch_size * scores.heads * scores.width * scores.keys
        return max(heads / plan.mesh.model, block_bytes(scores, plan))
    if plan.flash_attention:
        return 0.0
    if plan.attention_in_blocks:
        return block_bytes(scores, plan)
    # Gradients of probabilities and of scores. The output's gradient takes the memory of the values, which are read
    # before it.
    return 2 * plan.element_bytes * scores.pairs * plan.microbatch_size / plan.mesh.model


def ring_step_bytes(scores: Scores, plan: Plan) -> float:
    """Returns the bytes alive in a ring step of the backward pass of context parallel attention."""
    c, tokens, degree = plan.element_bytes, plan.local_tokens(scores.queries), plan.mesh.model
    keys = max(scores.groups / degree, 1) * scores.widths / 2 * tokens
    gathered = (plan.mesh.context - 1) * keys * (2 * c + 2 * 4) if plan.context_method == "all-gather" else 0
    # Keys and values in flight and in use, and as many float32 sums of their gradients; the queries, output and its
    # gradient of the step's two chunks, and the float32 sum of the queries' gradients.
    held = gathered + keys * (4 * c + 4 * 4) + scores.heads / degree * scores.widths / 2 * tokens * (4 * c + 4)
    if plan.flash_attention:
        return held
    pairs = min(QUERIES_AT_A_TIME * plan.microbatch_size, tokens) * scores.keys / plan.mesh.context
    return held + score_bytes(plan) * scores.heads / degree * pairs
