"""What is said of a part of a model: the weights it holds, and what it computes, keeps and sends.

Symbols of the docstrings: b samples of a microbatch, s tokens of the stream, h hidden size, q and k the widths of all
query and of all key heads together, f MLP width, g projections into the MLP (1, gated 2), a heads, V padded vocabulary
rows, t model ways, c bytes of an element. A product [m,k] x [k,n] costs 2mkn FLOPs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtjax.theory.adapters import ADAPTER, adapter_sizes
from mtjax.theory.contract import Expectation
from mtjax.theory.plan import ContextParallelism, ExpertDispatch, Plan
from mtjax.theory.rules import MODEL


@dataclass(frozen=True)
class Weight:
    """A parameter; of a part of a layer, one layer of it."""

    name: str
    """Dotted, within the part."""
    names: tuple[str, ...]
    """Logical names of its dimensions."""
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def weight(name: str, sizes: Mapping[str, int]) -> Weight:
    """A weight with these dimensions: logical name -> size."""
    return Weight(name, tuple(sizes), tuple(sizes.values()))


def linear(
    name: str, inputs: Mapping[str, int], outputs: Mapping[str, int], *, bias: bool = True, rank: int = 0
) -> list[Weight]:
    """The weights of `mtjax.models.linear.Linear`: a matrix over named dimensions, a bias, an adapter of this rank."""
    matrix = [weight(f"{name}.weight", {**inputs, **outputs}), *([weight(f"{name}.bias", outputs)] if bias else [])]
    if not rank:
        return matrix
    a, b = adapter_sizes(inputs, outputs, rank)
    return [*matrix, weight(f"{name}.{ADAPTER}.a", a), weight(f"{name}.{ADAPTER}.b", b)]


NORM_VECTORS = {"layernorm": ("scale", "bias"), "rmsnorm": ("scale",)}
"""Norm -> vectors of h parameters that it has."""


def norm(name: str, kind: str, width: int) -> list[Weight]:
    """The vectors of a norm."""
    return [weight(f"{name}.{vector}", {"embed": width}) for vector in NORM_VECTORS[kind]]


@dataclass(frozen=True)
class Product:
    """A product of a sample's tokens with weights, on one device: [tokens, inner] x [inner, outer]."""

    tokens: float
    inner: float
    outer: float
    is_adapter: bool = False
    experts: int = 0
    """Matrices of all experts, among which the tokens' rows are shared; 0 where one matrix is for all."""
    again: bool = False
    """Whether its own backward pass computes it once more."""
    is_repeated: bool = False
    """Whether every model rank computes it for all tokens that it has."""

    @property
    def flops(self) -> float:
        """FLOPs."""
        return 2 * self.tokens * self.inner * self.outer


def unrepeated(products: Sequence[Product]) -> list[Product]:
    """Those of a layer's products whose results no product of the layer's backward pass reads, so that a layer which is
    computed again leaves them out: the last, and experts'."""
    return [product for product in products if product.experts or product is products[-1]]


def adapter_products(
    rank: int, tokens: float, columns: tuple[float, float, int], row: tuple[float, float]
) -> list[Product]:
    """Products of the adapters of a sublayer; none without a rank.

    Args:
      rank: of all of them.
      tokens: of a sample.
      columns: inner and outer width of the column-parallel products together, and their number.
      row: inner and outer width of the row-parallel one.
    """
    inner, outer, count = columns
    sizes = ((inner, count * rank), (rank, outer), (row[0], rank), (rank, row[1]))
    return [Product(tokens, *size, is_adapter=True) for size in sizes] if rank else []


@dataclass(frozen=True)
class Scores:
    """Attention's scores and their use: queries x keys for every head of a sample."""

    heads: int
    queries: int
    keys: int
    width: int
    """Of a head."""
    is_causal: bool
    groups: int = 0
    """Heads of keys and of values."""

    @property
    def pairs(self) -> int:
        """Scores of a sample."""
        return self.heads * self.queries * self.keys

    def flops(self, *, causal: bool = False) -> float:
        """Forward FLOPs of a sample: 4 s q for each query; where `causal`, of the half that a causal model needs."""
        return 4 * self.pairs * self.width * (0.5 if causal and self.is_causal else 1)


@dataclass(frozen=True)
class Elementwise:
    """Elements of a sample that element-wise kernels go over, of one layer, before any split over the model ways."""

    stream: float = 0
    """Of the residual stream: a norm, a dropout and a residual add."""
    inside: float = 0
    """Of attention's heads."""
    mlp: float = 0
    """Of the MLP's inner width."""


@dataclass(frozen=True)
class ResidualStream:
    """The residual stream that a part reads and writes."""

    side: str = ""
    """What the words of its sizes begin with in formulas: `decoder_` makes `decoder_sequence`."""
    split: bool = False
    """Whether each model rank has its own part of every sequence."""
    needed_again: bool = False
    """Whether a layer that is computed again needs this part's output: all but the last one's of a pre-LN layer."""
    shares_heads: bool = False
    """Whether key and value heads are fewer than the model ways, so that several ranks share one."""
    label_smoothing: bool = False
    distils: bool = False
    """Whether a teacher's probabilities of tokens are learnt."""
    is_frozen: bool = False
    """Whether only adapters and a task's head are trained: other weights have no gradients, and no layer below the
    first has one to give."""
    learns_before: bool = True
    """Whether something before the part, in its own layer or below the layers, is trained: else nobody reads the
    gradient of what the first layer's reads."""
    turns: str = "microbatches"
    """Formula: how often a step goes through the part and back. Stages of a pipeline run layers in every tick, idle or
    not, and what is outside the layers once a microbatch."""
    embedding_turns: str = "microbatches"
    """Formula: how often a step makes the input of the first layer: on stages also in the first stage's idle ticks."""
    forward_turns: str = "microbatches"
    """Formula: how often it goes through the part forward, without what the backward pass computes again by itself."""
    across: ContextParallelism | None = None
    """How attention reaches the tokens of other ranks; None where a rank has all tokens of its samples."""
    expert_dispatch: ExpertDispatch = "all-gather"
    """How tokens come to the experts of other ranks."""

    @property
    def elements(self) -> str:
        """Of a microbatch on a rank: where several share samples, `sequence` is the tokens of one."""
        return f"batch*{self.side}sequence*hidden"

    @property
    def times(self) -> str:
        """Layers that the part stands in, as often as a step goes through them."""
        return f"{self.side}layers*{self.turns}"

    @property
    def forward_times(self) -> str:
        """The same, forward."""
        return f"{self.side}layers*{self.forward_turns}"

    @property
    def input_gradients(self) -> str:
        """How often a step makes the gradient of what the part reads. The compiler leaves it out where nobody reads it
        and the first layer stands in no loop with others: `unread_gradients` times."""
        return self.times if self.learns_before else f"({self.times} - {self.side}unread_gradients)"


def over_model(phase: str, kind: str, count: str, elements: str, why: str, **settings: object) -> Expectation:
    """A line of a contract over the model ways."""
    return Expectation(phase, kind, MODEL, count, elements, why=why, **settings)  # pyright: ignore[reportArgumentType]


class Part:
    """A part of a model. Sizes are of the whole part; what a device has of it follows from mesh and rules.

    A part that has nothing of a kind inherits the answer from here.
    """

    @property
    def weights(self) -> list[Weight]:
        """Its parameters; of a part of a layer, those of one layer."""
        return []

    @property
    def scores(self) -> Scores | None:
        """Attention's scores, where it has any."""
        return None

    @property
    def elementwise(self) -> Elementwise:
        """What its element-wise kernels go over."""
        return Elementwise()

    def products(self, model_ways: int = 1) -> list[Product]:
        """Forward products of one sample with its weights, on one of `model_ways` devices; the last one comes last."""
        del model_ways
        return []

    def saved_bytes(self, plan: Plan) -> Mapping[str, float]:
        """Bytes on a device that wait for the backward pass, of one layer and microbatch, by kind."""
        del plan
        return {}

    def backward_peak_bytes(self, plan: Plan) -> float:
        """Bytes on a device at the fullest moment of its backward pass, beside what it keeps."""
        del plan
        return 0.0

    def pending_bytes(self, plan: Plan) -> float:
        """Bytes that wait for gradients of its weights while the sublayer before it is on its way back."""
        del plan
        return 0.0

    def kv_elements(self, context: int) -> int:
        """Elements of a sequence of `context` tokens that generating the next token reads: keys and values."""
        del context
        return 0

    def over_context(self, ways: int) -> "Part":
        """What ranks that share a sample compute of it together, where that is more than one of them would alone."""
        del ways
        return self

    def symbols(self, plan: Plan) -> Mapping[str, int]:
        """Words of its lines beside those that every stream has, with their values."""
        del plan
        return {}

    def collectives(self, stream: ResidualStream) -> list[Expectation]:
        """What it sends over the model ways in a step."""
        del stream
        return []
