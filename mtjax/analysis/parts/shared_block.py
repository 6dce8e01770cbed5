"""Shared blocks of hybrid models (`mtjax.models.shared_block`): what a layer computes with a block, and the blocks.

A layer's components have the layer's own weights, its adapters; the weights of the blocks are outside the layers. r is
the rank of the adapters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_RECOMPUTE, Expectation
from mtjax.analysis.parts.attention import AttentionPart
from mtjax.analysis.parts.attention_collectives import context_collectives
from mtjax.analysis.parts.mlp import MLPPart
from mtjax.analysis.parts.part import (
    Elementwise,
    Part,
    Product,
    ResidualStream,
    Weight,
    adapter_products,
    linear,
    over_model,
    weights_of,
)
from mtjax.analysis.parts.sublayer import (
    adapter_collectives,
    adapter_saved_bytes,
    local_gradient_sums,
    matrix_gradient_sums,
    stream_bytes,
    sublayer_collectives,
    sublayer_saved_bytes,
)
from mtjax.config.adapters import adapter_sizes, joint_adapter_sizes
from mtjax.layout.layouts import is_matrix
from mtjax.layout.plan import Plan
from mtjax.layout.weights import ProductSizes, block_products, mlp_products, replicated_product

EMBEDDED = "embeddings that shared blocks read"


@dataclass(frozen=True, kw_only=True)
class BlockAttentionPart(AttentionPart):
    """A norm of hidden states and embeddings side by side, and attention, with a layer's adapters of query, key and
    value; `hidden` is the width of the output, half of that of the input."""

    low: int
    """Rank of the adapters; 0 without any."""

    @property
    def weights(self) -> list[Weight]:
        if not self.low:
            return []
        a, b = adapter_sizes(*self._products["qkv"], self.low)
        return weights_of({"a": a, "b": b}, "attention_adapter.")

    @property
    def shared_weights(self) -> list[Weight]:
        # The block's attention is that of a model of twice the width, but for the output projection.
        fields: dict[str, Any] = {**vars(self), "hidden": 2 * self.hidden}
        del fields["low"]
        wide = [of for of in AttentionPart(**fields).weights if not of.name.startswith("attention.output.")]
        return [*wide, *linear("attention.output", *self._products["output"], bias=False, rank=self.rank)]

    @property
    def _products(self) -> dict[str, ProductSizes]:
        """Dimensions of its products, by name."""
        return block_products(self.hidden, self.heads, self.head_dim)

    @property
    def elementwise(self) -> Elementwise:
        return replace(super().elementwise, stream=2 * self.tokens * self.hidden)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        key_size = max(self.kv_heads, tensor_degree) * self.head_dim
        width = (self.query_size + 2 * key_size) / tensor_degree
        into = Product(self.tokens, 2 * self.hidden, width, reads_input=True)
        inner = self.query_size / tensor_degree
        return [
            *_adapter(self.tokens, 2 * self.hidden, 3 * self.low, self.low, width),
            *adapter_products(self.rank, self.tokens, (2 * self.hidden, width, 3), (inner, self.hidden)),
            into,
            Product(self.tokens, inner, self.hidden),
        ]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        return _with_own_adapter(super().saved_bytes(plan), 3, self.low, self.tokens, plan)

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns those of attention, and the wider input, with its gradient."""
        return super().backward_peak_bytes(plan) + 2 * stream_bytes(self.tokens, self.hidden, plan)

    def waiting_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the block's weights in the compute dtype, and of the wider input."""
        return _cast_bytes(self.shared_weights, plan) + 2 * stream_bytes(self.tokens, self.hidden, plan)

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        return {**super().symbols(plan), "block_rank": self.low}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = _wide_input(sublayer_collectives(stream, "attention of a shared block", learns=learns))
        lines += _adapter_gradients(stream, 3 if self.low else 0, "query, key and value of a shared block")
        lines += _adapter_lines(stream, "attention of a shared block", 3, self.rank)
        lines += context_collectives(stream)
        if stream.is_frozen:
            if self.rank and stream.shares_heads:
                why = "gradient of B of replicated key and value heads of a shared block"
                lines.append(local_gradient_sums(stream, f"{stream.side}layers*2*key_width*rank", why))
            return lines
        if stream.shares_heads:
            why = "gradients of replicated key and value heads of a shared block"
            lines.append(local_gradient_sums(stream, f"{stream.side}layers*4*key_width*hidden", why))
        return [*lines, *_norm_gradients(stream, 2 * self.norm.count)]


@dataclass(frozen=True, kw_only=True)
class BlockMLPPart(MLPPart):
    """A norm and a gated MLP, with a layer's adapter, whose gate and up have one A."""

    low: int
    """Rank of the adapter."""

    @property
    def weights(self) -> list[Weight]:
        up = mlp_products(self.hidden, self.inner, is_gated=True)["up"]
        return weights_of(joint_adapter_sizes(self.hidden, self.low, {"b": up.outputs}), "mlp_adapter.")

    @property
    def shared_weights(self) -> list[Weight]:
        return super().weights

    def products(self, tensor_degree: int = 1) -> list[Product]:
        outer = self.inputs * self.inner / tensor_degree
        return [*_adapter(self.tokens, self.hidden, self.low, self.low, outer), *super().products(tensor_degree)]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        return _with_own_adapter(super().saved_bytes(plan), 1, self.low, self.tokens, plan)

    def waiting_bytes(self, plan: Plan) -> float:
        """Returns the bytes of the block's weights in the compute dtype, of what its first product and the adapter
        compute, and of the gate, the other half, and what passes the gate."""
        inner = self.inner / plan.mesh.model
        arrays = plan.element_bytes * plan.local_tokens(self.tokens) * ((2 * self.inputs + 3) * inner + self.low)
        return _cast_bytes(self.shared_weights, plan) + arrays

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        return {"block_rank": self.low}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        learns = self.rank > 0 or not stream.is_frozen
        lines = sublayer_collectives(stream, "the MLP of a shared block", learns=learns)
        lines += _adapter_gradients(stream, 1, "the MLP of a shared block")
        lines += _adapter_lines(stream, "the MLP of a shared block", self.inputs, self.rank)
        return [*lines, *_norm_gradients(stream, self.norm.count)]


@dataclass(frozen=True)
class ProjectionPart(Part):
    """The replicated product of a shared block's output, before it is added to the input of Mamba-2."""

    hidden: int
    tokens: int
    """Of a sample."""
    reduces_output: ClassVar[bool] = False

    @property
    def weights(self) -> list[Weight]:
        return linear("projection", *replicated_product(self.hidden, self.hidden), bias=False)

    @property
    def elementwise(self) -> Elementwise:
        return Elementwise(stream=self.tokens * self.hidden)

    def products(self, tensor_degree: int = 1) -> list[Product]:
        return [Product(self.tokens, self.hidden, self.hidden, is_repeated=True)]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        return sublayer_saved_bytes(self.tokens, self.hidden, plan)

    def backward_peak_bytes(self, plan: Plan) -> float:
        return 2 * stream_bytes(self.tokens, self.hidden, plan) / (plan.mesh.model if plan.splits_stream else 1)

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns the sum of the gradients that each rank computed from its tokens, with sequence parallelism."""
        if not stream.split or stream.is_frozen:
            return []
        # In the compute dtype, as the matmul that computes them.
        why = "gradients of the projection after a shared block, from a rank's tokens"
        return [matrix_gradient_sums(stream, "hidden*hidden", why)]


@dataclass(frozen=True)
class BlockPart(Part):
    """The weights of a shared block, which is outside the layers, and the embeddings that layers read."""

    is_read_by_layers: ClassVar[bool] = True
    name: str
    parts: tuple[BlockAttentionPart, BlockMLPPart]
    keeps_embeddings: bool
    """Whether the embeddings count here: of one of the blocks."""

    @property
    def weights(self) -> list[Weight]:
        own = [weight for part in self.parts for weight in part.shared_weights]
        return [replace(weight, name=f"{self.name}.{weight.name}") for weight in own]

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes of the embeddings and of the sum of their gradients."""
        attention, _ = self.parts
        each = stream_bytes(attention.tokens, attention.hidden, plan) / (plan.mesh.model if plan.splits_stream else 1)
        return {EMBEDDED: 2 * each} if self.keeps_embeddings else {}


def _cast_bytes(weights: list[Weight], plan: Plan) -> float:
    """Returns the bytes of a block's matrices on a device in the compute dtype, to which each layer casts them."""
    matrices = sum(weight.size for weight in weights if is_matrix(weight.names))
    return plan.element_bytes * matrices / plan.mesh.model


def _adapter(tokens: float, inner: float, low: float, rank: float, outer: float) -> list[Product]:
    """Returns the matmuls of a layer's adapter, whose A has `low` outputs; none where `rank` is 0."""
    sizes = ((inner, low), (rank, outer)) if rank else ()
    into = {"is_adapter": True, "is_of_model": True}
    return [Product(tokens, *size, reads_input=n == 0, is_unsaved=n == 1, **into) for n, size in enumerate(sizes)]


def _with_own_adapter(
    saved: Mapping[str, float], count: int, rank: int, tokens: int, plan: Plan
) -> Mapping[str, float]:
    """Adds what a layer's own adapter saves, of so many products, to the bytes of a component."""
    # 0 is the dropout rate: the model's own adapters have no dropout, for which LoRA's save their inputs.
    own = adapter_saved_bytes(rank, count, 0, tokens, plan)
    return {**saved, **{name: size + saved.get(name, 0) for name, size in own.items()}}


def _wide_input(lines: list[Expectation]) -> list[Expectation]:
    """Doubles what is sent of a sublayer's input, and of its gradient, in the lines of `sublayer_collectives`."""

    def is_of_input(line: Expectation) -> bool:
        return line.why.startswith(("before", "f before", "input gradient"))

    return [replace(line, elements=f"2*{line.elements}") if is_of_input(line) else line for line in lines]


def _adapter_gradients(stream: ResidualStream, count: int, name: str) -> list[Expectation]:
    """Returns the sums of partial gradients between the two matmuls of so many adapters."""
    if not count:
        return []
    why = f"gradient in the adapters of {name}"
    elements = f"{count}*batch*sequence*block_rank"
    settings: dict[str, object] = {"pooled": True, "also": LAYER_RECOMPUTE}
    # Frozen adapters have only the gradient of their input.
    times = stream.input_gradients if stream.is_frozen else stream.times
    return [over_model(LAYER_BACKWARD, "all-reduce", times, elements, why, **settings)]


def _adapter_lines(stream: ResidualStream, name: str, columns: int, rank: int) -> list[Expectation]:
    """Returns `adapter_collectives` of a block, which XLA sums once a step, or in each layer where these are in a
    loop."""

    def once(line: Expectation) -> Expectation:
        is_of_block = line.why.startswith("gradients of B")
        every = f"{stream.turns}*{line.elements}"
        return replace(line, count="1", elements=every, sent="rank*hidden") if is_of_block else line

    return [once(line) for line in adapter_collectives(stream, name, columns, rank)]


def _norm_gradients(stream: ResidualStream, vectors: int) -> list[Expectation]:
    """Returns the sum of the gradients of a block's norm, with sequence parallelism."""
    if not stream.split or stream.is_frozen or not vectors:
        return []
    # XLA: once a step, or in each layer that reads the block where these are in a loop.
    every = f"{stream.turns}*{stream.side}layers*{vectors}*hidden"
    line = local_gradient_sums(stream, every, "norms of shared blocks, once for all layers or in each")
    # What is expected to be sent is the least that XLA may do, once for all layers.
    return [replace(line, count="1", sent=f"{vectors}*hidden")]
