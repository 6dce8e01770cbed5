"""The communication contract: which collectives a layout must compile to, and no others.

Counts and sizes are formulas in the symbols of `Sizes`; what is printed is what is checked. Per pre-LN layer and
microbatch the tensor layout sends what Figure 4 of the paper (arXiv 1909.08053) says: two all-reduces forward, two
backward, and one more when the layer is computed again - the second one's result is not needed then.
"""

import ast
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from mtjax.config import Config, mlp_size, padded_vocab_size
from mtjax.errors import UserError, nearest
from mtjax.sharding.axes import DATA, MODEL
from mtjax.sharding.layouts import TENSOR, Layout, num_microbatches
from mtjax.sharding.mesh import AXES, MeshShape

EMBEDDING_FORWARD = "embedding forward"
EMBEDDING_BACKWARD = "embedding backward"
LAYER_FORWARD = "layer forward"
LAYER_RECOMPUTE = "layer recompute"
LAYER_BACKWARD = "layer backward"
LOSS_FORWARD = "loss forward"
LOSS_BACKWARD = "loss backward"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
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
    full: int
    """1 when whole layers are computed again in the backward pass, else 0."""
    smoothing: int
    """1 with label smoothing, else 0."""

    @classmethod
    def of(cls, config: Config, mesh: MeshShape) -> "Sizes":
        """The sizes of a run on a mesh."""
        count = num_microbatches(config, mesh)
        return cls(
            b=config.training.global_batch_size // (mesh.data * count),
            s=config.model.sequence_length,
            h=config.model.hidden_size,
            f=mlp_size(config.model),
            l=config.model.num_layers,
            V=padded_vocab_size(config.model),
            m=count,
            data=mesh.data,
            model=mesh.model,
            full=int(config.training.recompute == "full"),
            smoothing=int(config.optimizer.label_smoothing > 0),
        )


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
    dtype: Literal["compute", "float32"] = "compute"
    pooled: bool = False
    """Only the total counts: the compiler packs these arrays as it likes."""
    why: str = ""


@dataclass(frozen=True)
class Contract:
    """All that a layout may send, beside scalars outside the layers."""

    name: str
    lines: tuple[Expectation, ...]
    split: tuple[str, ...] = ()
    """Logical axes whose parameters must be split over `model`."""


TENSOR_CONTRACT = Contract(
    "tensor",
    (
        Expectation(EMBEDDING_FORWARD, "all-reduce", MODEL, "m", "b*s*h", why="rows that other ranks own"),
        Expectation(LAYER_FORWARD, "all-reduce", MODEL, "2*l*m", "b*s*h", why="g after attention and after the MLP"),
        Expectation(LAYER_RECOMPUTE, "all-reduce", MODEL, "full*l*m", "b*s*h", why="g after attention, again"),
        Expectation(LAYER_BACKWARD, "all-reduce", MODEL, "2*l*m", "b*s*h", why="f before the MLP and before attention"),
        Expectation(
            LOSS_FORWARD, "all-reduce", MODEL, "(3+smoothing)*m", "b*s", "float32", why="max, sum, target logit"
        ),
        Expectation(LOSS_BACKWARD, "all-reduce", MODEL, "m", "b*s*h", why="gradient of the hidden states"),
        Expectation(
            GRADIENTS,
            "all-reduce",
            DATA,
            "1",
            "l*((4*h*h + 2*h*f + 3*h + f)/model + 6*h) + V*h/model + (s+2)*h",
            "float32",
            pooled=True,
            why="every gradient once a step, however many microbatches",
        ),
    ),
    split=("heads", "mlp", "vocab"),
)
"""The paper's layout: `mtjax.sharding.layouts.TENSOR`."""

CONTRACTS: Mapping[str, Contract] = {TENSOR.name: TENSOR_CONTRACT}


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


def contract_of(layout: Layout) -> Contract:
    """The contract declared for a layout.

    Raises:
      UserError: none is declared.
    """
    if layout.name not in CONTRACTS:
        raise UserError(f"no communication contract is declared for the layout {layout.name!r}")
    return CONTRACTS[layout.name]


def due(contract: Contract, sizes: Sizes, compute_dtype: str) -> list[Due]:
    """What a contract asks of one step; lines over an axis of one way, or of count 0, ask nothing.

    Raises:
      UserError: a formula can't be worked out, or comes out negative or broken.
    """
    types = {"compute": {"bfloat16": "bf16", "float32": "f32"}[compute_dtype], "float32": "f32"}
    found = []
    for line in contract.lines:
        if line.axis not in AXES:
            raise UserError(f"contract {contract.name}: no mesh axis is called {line.axis!r}{nearest(line.axis, AXES)}")
        asked = Due(line, evaluate(line.count, sizes), evaluate(line.elements, sizes), types[line.dtype])
        if asked.count and getattr(sizes, line.axis) > 1:
            found.append(asked)
    return found


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
