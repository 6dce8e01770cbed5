"""The communication contract: which collectives a layout must compile to, and no others.

Counts and sizes are formulas in the symbols of `Sizes`; what is printed is what is checked. Per pre-LN layer and
microbatch the tensor layout sends what Figure 4 of the paper (arXiv 1909.08053) says: two all-reduces forward, two
backward, and one more when the layer is computed again - the second one's result is not needed then. With the sequence
split each all-reduce becomes a reduce-scatter and an all-gather, which send the same bytes.
"""

import ast
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from mtjax.config import (
    Config,
    decoder_layers,
    decoder_length,
    head_dim,
    layers_again,
    layers_nested,
    mlp_size,
    most_masked,
    num_kv_heads,
    padded_vocab_size,
)
from mtjax.errors import UserError, nearest
from mtjax.sharding.layouts import num_microbatches
from mtjax.theory.layout import TENSOR_RULES, Layout
from mtjax.theory.mesh import AXES, MeshShape
from mtjax.theory.rules import DATA, MODEL

EMBEDDING_FORWARD = "embedding forward"
EMBEDDING_BACKWARD = "embedding backward"
LAYER_FORWARD = "layer forward"
LAYER_RECOMPUTE = "layer recompute"
LAYER_BACKWARD = "layer backward"
LOSS_FORWARD = "loss forward"
LOSS_BACKWARD = "loss backward"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
PARAMETERS = "parameters"
OTHER = "other"

PHASES = (
    EMBEDDING_FORWARD,
    LAYER_FORWARD,
    LOSS_FORWARD,
    LOSS_BACKWARD,
    LAYER_RECOMPUTE,
    LAYER_BACKWARD,
    EMBEDDING_BACKWARD,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    OTHER,
)
"""Parts of a step, in the order in which it goes through them."""

LAYER_PHASES = (LAYER_FORWARD, LAYER_RECOMPUTE, LAYER_BACKWARD)

SMALL_BYTES = 4096
"""Scalars - a loss, a norm, a token count - may cross any axis outside the layers: at most this much at a time."""


@dataclass(frozen=True)
class Sizes:
    """The symbols of the formulas."""

    b: int
    """Samples of a microbatch on one data rank."""
    s: int
    """Tokens of a sample."""
    h: int
    """Hidden size."""
    f: int
    """MLP width."""
    l: int  # noqa: E741
    """Layers."""
    V: int
    """Padded vocabulary."""
    m: int
    """Microbatches in a step."""
    data: int
    """Data-parallel ways."""
    model: int
    """Model-parallel ways."""
    again: int
    """Layers that the backward pass computes again as a whole."""
    nested: int
    """Those of them that share a group: one kept input for several layers, whose last product is computed again too."""
    smoothing: int
    """1 with label smoothing, else 0."""
    P: int
    """Parameters of which a model rank has its share: elements, before `data` splits any."""
    U: int
    """Of those, the ones that no data way divides, so that ZeRO leaves them whole."""
    W: int
    """Of those, matrices of the layers that ZeRO-3 gathers; 0 otherwise."""
    S: int
    """Of those, biases and norms of the layers that ZeRO-3 gathers; 0 otherwise."""
    E: int
    """Of those, matrices outside the layers, such as embeddings, that ZeRO-3 gathers; 0 otherwise."""
    N: int
    """Of those, biases and norms outside the layers that ZeRO-3 gathers; 0 otherwise."""
    k: int = 0
    """Width of all key heads together."""
    r: int = 0
    """1 where key and value heads are fewer than the model ways, so that several ranks share one; else 0."""
    n: int = 2
    """Vectors of a norm: scale and bias, or a scale alone."""
    c: int = 1
    """1 with biases in attention and MLP, else 0."""
    p: int = 1
    """1 with learned positions, else 0."""
    d: int = 0
    """Tokens that an encoder-decoder's decoder writes."""
    L: int = 0
    """Its layers."""
    M: int = 0
    """Tokens of a sample that a masked language model has to guess, at most."""
    decoder_again: int = 0
    """Layers of the decoder that the backward pass computes again as a whole."""
    decoder_nested: int = 0
    """Those of them that share a group."""

    @classmethod
    def of(cls, config: Config, mesh: MeshShape, counts: Mapping[str, int]) -> "Sizes":
        """The sizes of a run on a mesh; `counts` are of its parameters' elements."""
        count = num_microbatches(config, mesh)
        return cls(
            b=config.training.global_batch_size // (mesh.ways(TENSOR_RULES.batch) * count),
            s=config.model.sequence_length,
            h=config.model.hidden_size,
            f=mlp_size(config.model),
            l=config.model.num_layers,
            V=padded_vocab_size(config.model),
            m=count,
            data=mesh.ways(TENSOR_RULES.batch),
            model=mesh.ways(TENSOR_RULES.heads),
            again=layers_again(config.model.num_layers, config.training),
            nested=layers_nested(config.model.num_layers, config.training),
            smoothing=int(config.optimizer.label_smoothing > 0),
            k=num_kv_heads(config.model) * head_dim(config.model),
            r=int(num_kv_heads(config.model) % mesh.ways(TENSOR_RULES.heads) > 0),
            n=2 if config.model.norm == "layernorm" else 1,
            c=int(config.model.bias),
            p=int(config.model.position == "learned"),
            **counts,
            d=decoder_length(config.model),
            L=decoder_layers(config.model),
            M=most_masked(config.model.sequence_length),
            decoder_again=layers_again(decoder_layers(config.model), config.training),
            decoder_nested=layers_nested(decoder_layers(config.model), config.training),
        )


Dtype = Literal["compute", "float32"]


@dataclass(frozen=True)
class Expectation:
    """One line of a contract."""

    phase: str
    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all or collective-permute."""
    axis: str
    count: str
    """Formula: arrays sent in a step."""
    elements: str
    """Formula: elements of each; of a gather its result, of a scatter its operand."""
    dtype: Dtype = "compute"
    pooled: bool = False
    """Only the total counts: the compiler packs these arrays as it likes."""
    also: str = ""
    """Another phase in which it may stand: where the compiler finds two alike and keeps either."""
    hoisted: bool = False
    """Of a pooled line: what the compiler may move out of loops, or drop where nothing needs it. Any total from one
    time the elements to `count` times is right; a sum may stand in any phase after the forward pass."""
    why: str = ""


@dataclass(frozen=True)
class Contract:
    """All that a layout may send, beside scalars outside the layers."""

    name: str
    lines: tuple[Expectation, ...]
    split: tuple[str, ...] = ()
    """Logical axes whose parameters must be split over `model`."""


TENSOR_LINES = (
    Expectation(EMBEDDING_FORWARD, "all-reduce", MODEL, "m", "b*s*h", why="rows that other ranks own"),
    Expectation(LAYER_FORWARD, "all-reduce", MODEL, "2*l*m", "b*s*h", why="g after attention and after the MLP"),
    Expectation(LAYER_RECOMPUTE, "all-reduce", MODEL, "(again+nested)*m", "b*s*h", why="g after attention, again"),
    Expectation(LAYER_BACKWARD, "all-reduce", MODEL, "2*l*m", "b*s*h", why="f before the MLP and before attention"),
    Expectation(LOSS_BACKWARD, "all-reduce", MODEL, "m", "b*s*h", why="gradient of the hidden states"),
    Expectation(
        LAYER_BACKWARD,
        "all-reduce",
        MODEL,
        "r*l*m",
        "2*k*(h + c)",
        "float32",
        pooled=True,
        why="gradients of key and value heads that several ranks use",
    ),
)
"""Over `model`, of the paper's layout: Figure 4."""

SEQUENCE_LINES = (
    Expectation(EMBEDDING_FORWARD, "reduce-scatter", MODEL, "m", "b*s*h", why="rows that other ranks own"),
    Expectation(LAYER_FORWARD, "all-gather", MODEL, "2*l*m", "b*s*h", why="before attention and before the MLP"),
    Expectation(LAYER_FORWARD, "reduce-scatter", MODEL, "2*l*m", "b*s*h", why="after attention and after the MLP"),
    Expectation(
        LOSS_FORWARD, "all-gather", MODEL, "m", "b*s*h", also=LOSS_BACKWARD, why="hidden states of whole sequences"
    ),
    Expectation(LOSS_BACKWARD, "reduce-scatter", MODEL, "m", "b*s*h", why="gradient of the hidden states"),
    Expectation(LAYER_RECOMPUTE, "all-gather", MODEL, "2*(l+nested)*m", "b*s*h", why="again: the split ones are kept"),
    Expectation(LAYER_RECOMPUTE, "reduce-scatter", MODEL, "(again+nested)*m", "b*s*h", why="after attention, again"),
    Expectation(LAYER_BACKWARD, "all-gather", MODEL, "2*l*m", "b*s*h", why="gradients of what was scattered"),
    Expectation(LAYER_BACKWARD, "reduce-scatter", MODEL, "2*l*m", "b*s*h", why="gradients of what was gathered"),
    Expectation(EMBEDDING_BACKWARD, "all-gather", MODEL, "m", "b*s*h", why="gradient of what was scattered"),
    Expectation(EMBEDDING_BACKWARD, "all-gather", MODEL, "p*m", "s*h", why="gradient of the positions"),
    Expectation(
        LAYER_BACKWARD,
        "all-reduce",
        MODEL,
        "m",
        "l*(2*(n + c)*h + 2*r*k*(h + c)) + n*h",
        "float32",
        pooled=True,
        hoisted=True,
        why="gradients of norms and row-parallel biases, of which each rank saw its tokens, and of shared heads",
    ),
)
"""Over `model`, with the residual stream split along the sequence (arXiv 2205.05198, Figure 5)."""

LOSS_LINE = Expectation(
    LOSS_FORWARD, "all-reduce", MODEL, "(3+smoothing)*m", "b*s", "float32", why="max, sum, target logit"
)


def _over_data(zero: int) -> tuple[Expectation, ...]:
    """Gradients and, with ZeRO, parameters: everything that may cross `data`."""

    def line(
        phase: str, kind: str, count: str, elements: str, why: str, dtype: Dtype = "float32", hoisted: bool = False
    ) -> Expectation:
        return Expectation(phase, kind, DATA, count, elements, dtype, pooled=True, hoisted=hoisted, why=why)

    if not zero:
        return (line(GRADIENTS, "all-reduce", "1", "P", "every gradient once a step, however many microbatches"),)
    whole = line(GRADIENTS, "all-reduce", "1", "U", "gradients that no data way divides")
    times = "m" if zero >= 2 else "1"
    often = "in every microbatch, so that full gradients never live" if zero >= 2 else "once a step"
    scatter = line(GRADIENTS, "reduce-scatter", times, "P-U", f"each rank sums its part of the gradients, {often}")
    if zero < 3:
        return (whole, scatter, line(PARAMETERS, "all-gather", "1", "P-U", "the updated parameters"))
    times = "(2 + nested/l)*m"
    often = "forward and again backward; layers of a group also when the whole group is computed again"
    return (
        whole,
        scatter,
        line(PARAMETERS, "all-gather", times, "W", f"matrices of the layers, {often}", "compute"),
        line(PARAMETERS, "all-gather", "m", "E", "matrices outside the layers", "compute", hoisted=True),
        line(PARAMETERS, "all-gather", times, "S + N", "biases and norms, as often as they are needed", hoisted=True),
    )


def contract_of(layout: Layout) -> Contract:
    """The contract of a layout: what the paper's sends, or its counterpart for split sequences, and ZeRO's part."""
    lines = SEQUENCE_LINES if layout.sequence else TENSOR_LINES
    return Contract(layout.name, (*lines, LOSS_LINE, *_over_data(layout.zero)), split=("heads", "mlp", "vocab"))


@dataclass(frozen=True)
class Due:
    """A line of a contract with its formulas worked out."""

    line: Expectation
    count: int
    elements: int
    dtype: str
    """As HLO spells it: bf16, f32."""

    @property
    def total(self) -> int:
        """Elements in a step."""
        return self.count * self.elements

    @property
    def least(self) -> int:
        """Elements below which something is missing."""
        return self.elements if self.line.hoisted else self.total


def due(contract: Contract, sizes: Sizes, compute_dtype: str) -> list[Due]:
    """What a contract asks of one step; lines over an axis of one way, or of count 0, ask nothing.

    Raises:
      UserError: a formula can't be worked out, or comes out negative or broken.
    """
    types = {"compute": {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[compute_dtype], "float32": "f32"}
    found = []
    for line in contract.lines:
        if line.axis not in AXES:
            raise UserError(f"contract {contract.name}: no mesh axis is called {line.axis!r}{nearest(line.axis, AXES)}")
        asked = Due(line, evaluate(line.count, sizes), evaluate(line.elements, sizes), types[line.dtype])
        if asked.count and getattr(sizes, line.axis, 1) > 1:
            found.append(asked)
    return found


def phase_over(kind: str, axes: tuple[str, ...] | None) -> str | None:
    """The phase of a collective by its axes alone: gradients and parameters are all that crosses `data`."""
    if axes != (DATA,):
        return None
    return PARAMETERS if kind == "all-gather" else GRADIENTS


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(formula: str, sizes: Sizes) -> int:
    """A formula of +, -, *, exact / and the symbols of `Sizes`: "2*l*m".

    Raises:
      UserError: it is no such formula, or not a whole number of 0 or more.
    """
    symbols = asdict(sizes)

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.BinOp(op=ast.Div()):
                quotient, rest = divmod(value(node.left), value(node.right) or 1)
                if not rest and value(node.right):
                    return quotient
                raise UserError(f"{ast.unparse(node)} in {formula!r} is no whole number for {symbols}")
            case ast.BinOp(op=op) if type(op) in _OPERATIONS:
                return _OPERATIONS[type(op)](value(node.left), value(node.right))
            case ast.Name(id=name):
                raise UserError(f"{formula!r} uses {name!r}; the symbols are {', '.join(symbols)}")
        raise UserError(f"{formula!r} is no formula of +, -, *, / and {', '.join(symbols)}")

    try:
        result = value(ast.parse(formula, mode="eval").body)
    except SyntaxError as e:
        raise UserError(f"{formula!r} is no formula: {e.msg}") from e
    if result < 0:
        raise UserError(f"{formula!r} comes out at {result} for {symbols}; counts and sizes are 0 or more")
    return result
