"""Base class of the components of a model: their weights, FLOPs, saved activations and collectives.

Symbols of the docstrings: b samples of a microbatch, s sequence length, h hidden size, q and k the widths of all query
and of all key heads together, f MLP width, g projections into the MLP (1, gated 2), a heads, V padded vocabulary rows,
t tensor parallel degree, c bytes of an element. A product [m,k] x [k,n] costs 2mkn FLOPs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from mtjax.analysis.contract import Dtype, Expectation
from mtjax.analysis.parts.loop import LoopOverPieces
from mtjax.analysis.parts.scan_kernels import ScanKernels
from mtjax.config import Model
from mtjax.config.adapters import ADAPTER, adapter_sizes
from mtjax.config.sizes import norm_vectors, sublayer_norms
from mtjax.layout.attention_kernel import ContextParallelism
from mtjax.layout.plan import ExpertDispatch, Plan
from mtjax.layout.rules import MODEL


@dataclass(frozen=True)
class Weight:
    """A parameter; in a layer's component, that of one layer."""

    name: str
    """Dotted, within the component."""
    names: tuple[str, ...]
    """Logical names of its dimensions."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def weight(name: str, sizes: Mapping[str, int]) -> Weight:
    """Builds a weight with these dimensions: logical name -> size."""
    return Weight(name, tuple(sizes), tuple(sizes.values()))


def weights_of(declared: Mapping[str, Mapping[str, int]], prefix: str = "") -> list[Weight]:
    """Builds the weights of a declaration in `mtjax.layout.weights`: name -> dimensions."""
    return [weight(f"{prefix}{name}", sizes) for name, sizes in declared.items()]


def linear(
    name: str, inputs: Mapping[str, int], outputs: Mapping[str, int], *, bias: bool = True, rank: int = 0
) -> list[Weight]:
    """Returns the weights of `mtjax.models.ops.Linear`: a matrix, a bias, a LoRA adapter of this rank."""
    matrix = [weight(f"{name}.weight", {**inputs, **outputs}), *([weight(f"{name}.bias", outputs)] if bias else [])]
    if not rank:
        return matrix
    a, b = adapter_sizes(inputs, outputs, rank)
    return [*matrix, weight(f"{name}.{ADAPTER}.a", a), weight(f"{name}.{ADAPTER}.b", b)]


def norm(name: str, vectors: Sequence[str], width: int) -> list[Weight]:
    """Returns the vectors of a norm, whose names are `mtjax.config.sizes.norm_vectors`."""
    return [weight(f"{name}.{vector}", {"embed": width}) for vector in vectors]


@dataclass(frozen=True)
class Norms:
    """The norms of a sublayer."""

    vectors: tuple[str, ...]
    """Names of the parameters of each."""
    kinds: tuple[str, ...] = ("norm",)
    """Kinds: `mtjax.config.sizes.sublayer_norms`."""

    @classmethod
    def of(cls, model: Model, *, is_first: bool = False, kind: str = "") -> "Norms":
        """Returns the norms of the first sublayer of a kind of layers, or of another."""
        return cls(norm_vectors(model), sublayer_norms(model, is_first=is_first, kind=kind))

    @property
    def count(self) -> int:
        """Vectors of h parameters."""
        return len(self.kinds) * len(self.vectors)

    def weights(self, sublayer: str, width: int) -> list[Weight]:
        """Returns the parameters of the norms of a sublayer with this name."""
        return [vector for kind in self.kinds for vector in norm(f"{sublayer}_{kind}", self.vectors, width)]


@dataclass(frozen=True)
class Product:
    """A matmul of a sample's tokens with weights, on one device: [tokens, inner] x [inner, outer]."""

    tokens: float
    inner: float
    outer: float
    is_adapter: bool = False
    is_of_model: bool = False
    """Of an adapter: whether the model itself has it (Zamba2), so that LoRA freezes it."""
    is_unsaved: bool = False
    """Of an adapter: whether it is the second matmul, which is not saved with the products with weights."""
    reads_input: bool = False
    """Whether its input is that of a layer's component, after the norm: the gradient goes to the layers below."""
    experts: int = 0
    """Experts whose matrices share the rows of tokens (a grouped matmul); 0 for a single matrix."""
    again: bool = False
    """Whether its backward pass recomputes it."""
    in_scan: bool = False
    """Whether it has no weight, but is one of a scan over tokens, which saves nothing for the backward pass."""
    is_unread: bool = False
    """Of a scan: whether its result is not needed in the backward pass."""
    gradients: float = 2
    """FLOPs of its gradients, as a multiple of its FLOPs."""
    is_repeated: bool = False
    """Whether it is replicated: every tensor parallel rank computes it, for all its tokens."""
    is_output: bool = False
    """Whether its result is only added to the residual stream, though it is not the last of the matmuls."""
    is_wide: bool = False
    """Whether it is computed in float32, whatever the compute type."""

    @property
    def flops(self) -> float:
        """FLOPs."""
        return 2 * self.tokens * self.inner * self.outer

    def adapter(self, rank: int) -> list["Product"]:
        """Returns the two matmuls of its LoRA adapter, which are where it is; none where `rank` is 0."""
        sizes = ((self.inner, rank), (rank, self.outer)) if rank else ()
        # A reads what the matmul reads; B's input is A's output, whose gradient stays inside.
        both = [replace(self, inner=inner, outer=outer, is_adapter=True) for inner, outer in sizes]
        return [*both[:1], *(replace(second, reads_input=False, is_unsaved=True) for second in both[1:])]


def unrepeated(products: Sequence[Product]) -> list[Product]:
    """Returns the matmuls that the recompute of a layer omits: the last one, experts', and those of their biases, whose
    results its backward pass does not read."""
    # XLA removes what is not read: the layer's output is saved already, as the input of the next layer.
    return [product for product in products if product.experts or product.is_output or product is products[-1]]


def adapter_products(
    rank: int, tokens: float, columns: tuple[float, float, int], row: tuple[float, float]
) -> list[Product]:
    """Returns the matmuls of a sublayer's LoRA adapters; none where `rank` is 0.

    Args:
      rank: of every adapter.
      tokens: of a sample.
      columns: inner and outer width of the column-parallel matmuls together, and their number.
      row: inner and outer width of the row-parallel matmul.
    """
    inner, outer, count = columns
    # A and B of the column-parallel matmuls, which read the same input and so count as one pair, then those of the
    # row-parallel one, whose result is only added.
    sizes = ((inner, count * rank), (rank, outer), (row[0], rank), (rank, row[1]))
    factors = [Product(tokens, *size, is_adapter=True, is_unsaved=n % 2 > 0) for n, size in enumerate(sizes) if rank]
    return [replace(p, reads_input=n == 0, is_output=n == 3) for n, p in enumerate(factors)]


@dataclass(frozen=True)
class Scores:
    """Attention's scores and their product with the values: queries x keys for every head of a sample."""

    heads: int
    queries: int
    keys: int
    width: int
    """Of a head's query and key."""
    is_causal: bool
    groups: int = 0
    """Heads of keys and of values."""
    is_capped: bool = False
    visible: float = 0.5
    """Share of the scores that a causal model needs, in the mean of its layers: half without windows."""
    narrower: int = 0
    """By how much a head's value is narrower than its key."""
    is_biased: bool = False
    """Whether each has a trained bias: relative positions."""

    @property
    def pairs(self) -> int:
        """Scores of a sample."""
        return self.heads * self.queries * self.keys

    @property
    def widths(self) -> int:
        """Widths of a head's key and of its value together."""
        return 2 * self.width - self.narrower

    def flops(self, *, causal: bool = False) -> float:
        """Returns the forward FLOPs of a sample: 4 s q per query; with `causal`, of a causal model only those of scores
        that it needs."""
        # With full attention all scores count, as papers count them: MFU then compares with published numbers.
        return 2 * self.pairs * self.widths * (self.visible if causal and self.is_causal else 1)


@dataclass(frozen=True)
class Elementwise:
    """Elements of a sample that one layer's element-wise kernels process, before tensor parallelism shards them."""

    stream: float = 0
    """Of the residual stream: a norm, a dropout and a residual add."""
    inside: float = 0
    """Of attention's heads."""
    mlp: float = 0
    """Of the MLP's inner width."""
    gate: float = 0
    """Of those, the ones that XLA multiplies with a gate."""
    normed: float = 0
    """Of queries and keys that are normalized (QK norm)."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream that a component reads and writes."""

    side: str = ""
    """Prefix of the stream's sizes in formulas: `decoder_` makes `decoder_sequence`."""
    of: str | None = None
    """That of its tokens, where stacks with other prefixes have the same stream."""
    split: bool = False
    """Whether it is sharded over the tensor parallel ranks, along the sequence (sequence parallelism) or its width."""
    width_sums: int = 0
    """Numbers per token that a norm all-reduces where the stream is sharded along its width (2D); 0 where it is not."""
    needed_again: bool = False
    """Whether the recompute of a layer needs this component's output: all but the last one's of a pre-LN layer."""
    shares_heads: bool = False
    """Whether key and value heads are fewer than tensor parallel ranks, so that several ranks share one."""
    shares_groups: bool = False
    """Likewise groups of heads of state-space layers."""
    label_smoothing: bool = False
    distils: bool = False
    """Whether a teacher's token probabilities are distilled."""
    is_frozen: bool = False
    """Whether only adapters and a task's head are trained: other weights have no gradients, and no gradient leaves the
    first layer."""
    learns_before: bool = True
    """Whether a weight before the component, in its layer or below the layers, is trained: else nothing reads the first
    layer's input gradient."""
    joins_output: bool = False
    """Whether the component's output is added to that of the next one before the ranks reduce both (parallel
    layers)."""
    joins_input: bool = False
    """Likewise its input gradient, where both read the same norm."""
    turns: str = "microbatches"
    """Formula: how often a step runs the component forward and backward. Pipeline stages run layers in every tick, also
    in those of the bubble, and everything outside the layers once per microbatch."""
    embedding_turns: str = "microbatches"
    """Formula: how often a step computes the input of the first layer: in a pipeline, also in the first stage's idle
    ticks."""
    forward_turns: str = "microbatches"
    """Formula: how often it runs forward, without the recompute of a layer's backward pass."""
    gathers: tuple[Dtype, Dtype] = ("compute", "compute")
    """Types in which sequences are gathered for matmuls with a single weight, and their gradients."""
    unstacked: bool = False
    """Whether each layer has separate arrays of gradients, and not a part of a stack's: unrolled layers, and those of
    multi-token prediction."""
    matrix_gradients: Dtype = "compute"
    """Type in which the gradients of matrices are computed, and added up over tensor parallel ranks."""
    across: ContextParallelism | None = None
    """How attention reads the tokens of other context parallel ranks; None without context parallelism."""
    expert_dispatch: ExpertDispatch = "all-gather"
    """The collective that brings tokens to the experts of other ranks."""
    joins_shared: bool = True
    """Whether a shared expert's output is added to the other experts' before the ranks reduce both, and likewise its
    input gradient."""

    @property
    def elements(self) -> str:
        """Formula: elements of a microbatch on a rank; `sequence` is a context parallel rank's tokens."""
        return f"batch*{self.side if self.of is None else self.of}sequence*hidden"

    @property
    def times(self) -> str:
        """Formula: layers with the component x how often a step runs them."""
        return f"{self.side}layers*{self.turns}"

    @property
    def forward_times(self) -> str:
        """Formula: layers with the component x how often a step runs them forward."""
        return f"{self.side}layers*{self.forward_turns}"

    @property
    def input_gradients(self) -> str:
        """Formula: how often a step computes the component's input gradient."""
        # XLA: drops it where nothing reads it and the first layer is in no loop with others, `unread_gradients` times.
        return self.with_input_gradients(1)

    def with_input_gradients(self, count: int) -> str:
        """Returns the formula of how often a step sends `count` arrays, of which one is for an input gradient."""
        times = self.times if count == 1 else f"{count}*{self.times}"
        return times if self.learns_before else f"({times} - {self.side}unread_gradients)"


def over_model(phase: str, kind: str, count: str, elements: str, why: str, **settings: object) -> Expectation:
    """Builds a line of a contract over the tensor parallel ranks."""
    return Expectation(phase, kind, MODEL, count, elements, why=why, **settings)  # pyright: ignore[reportArgumentType]


class Part:
    """A component of a model. Sizes are unsharded; a device's shard follows from mesh and rules.

    Defaults are those of a component without any; subclasses override what they have.
    """

    is_read_by_layers: ClassVar[bool] = False
    """Of a component outside the layers: whether layers read its weights, and not the embedding."""
    reduces_output: ClassVar[bool] = True
    """Whether tensor parallel ranks add up the output of a layer's component."""

    @property
    def weights(self) -> list[Weight]:
        """Its parameters; of a layer's component, those of one layer."""
        return []

    @property
    def shared_weights(self) -> list[Weight]:
        """Parameters that a layer's component reads, and that are outside the layers, as several read them."""
        return []

    @property
    def scores(self) -> Scores | None:
        """Attention's scores, where it has any."""
        return None

    @property
    def elementwise(self) -> Elementwise:
        """Elements that its element-wise kernels process."""
        return Elementwise()

    def products(self, tensor_degree: int = 1) -> list[Product]:
        """Returns the forward matmuls of one sample with its weights, on one of `tensor_degree` devices, in order."""
        del tensor_degree
        return []

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Returns the bytes on a device saved for the backward pass, of one layer and microbatch, by kind."""
        del plan
        return {}

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Returns the bytes on a device at the peak of its backward pass, in addition to `saved_bytes`."""
        del plan
        return 0.0

    def scans_in_blocks(self, plan: Plan) -> bool:
        """Returns whether its scan is a loop over blocks of tokens, whose backward pass recomputes each block."""
        del plan
        return False

    def step_loops(self, plan: Plan) -> Sequence[LoopOverPieces]:
        """Returns its loops over pieces of a sample, whose steps take the latency of their kernels."""
        del plan
        return ()

    def scan_kernels(self, plan: Plan) -> ScanKernels | None:
        """Returns the kernels of its scan and of what surrounds it, where they are known one by one: then its
        element-wise elements are those of the residual stream alone."""
        del plan
        return None

    def pending_bytes(self, plan: Plan) -> float:
        """Returns the bytes held for its weight gradients while the backward pass of the sublayer before it runs."""
        del plan
        return 0.0

    def waiting_bytes(self, plan: Plan) -> float:
        """Returns the bytes that wait for its backward pass while those of later components of its layer run, besides
        what every loop over layers copies out of its stacks."""
        del plan
        return 0.0

    def kv_elements(self, context: int) -> int:
        """Returns the elements of the KV cache of a sequence of `context` tokens, of one layer."""
        del context
        return 0

    def state_bytes(self, tensor_degree: int, element_bytes: float) -> float:
        """Returns the bytes on a device of what generation keeps of a sequence whatever its length, of one layer."""
        del tensor_degree, element_bytes
        return 0.0

    def over_context(self, degree: int) -> "Part":
        """Returns the component with the work of `degree` context parallel ranks together, padding included."""
        del degree
        return self

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        """Returns the symbols of its formulas, other than those of every stream, with their values."""
        del plan
        return {}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """Returns its collectives in a step over the tensor, context and expert parallel ranks."""
        del stream
        return []
