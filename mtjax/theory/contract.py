"""The communication contract: the collectives that a program must compile to, and no others.

A contract is a list of lines. Counts and sizes are formulas in words ("2*layers*microbatches"); what is printed is what
is checked. `mtjax.theory.communication` says which lines a run has.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from mtjax.errors import UserError, nearest
from mtjax.theory.mesh import AXES, MeshShape
from mtjax.theory.rules import CONTEXT, EXPERT, MODEL, STAGE, Axes

JOINED = "+"
"""Between the axes of a line that crosses several."""

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
SAMPLING = "sampling"
STAGES = "stages"
OTHER = "other"

PHASES = (
    EMBEDDING_FORWARD,
    LAYER_FORWARD,
    LOSS_FORWARD,
    SAMPLING,
    LOSS_BACKWARD,
    LAYER_RECOMPUTE,
    LAYER_BACKWARD,
    EMBEDDING_BACKWARD,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STAGES,
    OTHER,
)
"""Parts of a step, in the order in which it goes through them."""

LAYER_PHASES = (LAYER_FORWARD, LAYER_RECOMPUTE, LAYER_BACKWARD)

SMALL_BYTES = 4096
"""Scalars - a loss, a norm, a token count - may cross any axis outside the layers: at most this much at a time."""

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"]
Dtype = Literal["compute", "float32", "bfloat16", "int32"]
Symbols = Mapping[str, int]
"""Word of the formulas -> its value."""


@dataclass(frozen=True)
class Expectation:
    """One line of a contract."""

    phase: str
    kind: Kind
    axis: str
    """The mesh axis that it crosses; several with a + between them, outermost first: "data+context"."""
    count: str
    """Formula: arrays sent in a step."""
    elements: str
    """Formula: elements of each; of a gather its result, of a scatter its operand, of a ragged all-to-all the longer of
    its two: what there is room for."""
    dtype: Dtype = "compute"
    pooled: bool = False
    """Only the total counts: the compiler packs these arrays as it likes."""
    also: str = ""
    """Another phase in which it may stand, for when the compiler finds two alike and keeps either."""
    hoisted: bool = False
    """For a pooled line: the compiler may move it out of loops, or drop it where nothing needs it. Any total from once
    to `count` times the elements is right; a sum may stand in any phase after the forward pass."""
    why: str = ""
    sent: str = ""
    """Formula: elements of each that are expected to be sent, where that is known at run time; all when empty."""

    @property
    def axes(self) -> Axes:
        """The mesh axes that it crosses together."""
        return tuple(self.axis.split(JOINED))

    def on(self, mesh: MeshShape) -> "Expectation":
        """This line without the axes of one way, as long as another is left."""
        split = tuple(axis for axis in self.axes if mesh.degree((axis,)) > 1)
        return self if split in ((), self.axes) else replace(self, axis=JOINED.join(split))


@dataclass(frozen=True)
class Contract:
    """All that a program may send, besides scalars outside the layers."""

    name: str
    lines: tuple[Expectation, ...]
    split: tuple[str, ...] = ()
    """Logical axes whose parameters must be split over `model`."""


def sum_expectations(lines: Iterable[Expectation]) -> tuple[Expectation, ...]:
    """One line for all that ask for the same arrays in the same phase.

    Exact lines of equal arrays add their counts; pooled ones of equal counts add their elements.
    """
    alike: dict[tuple[Any, ...], list[Expectation]] = {}
    for line in lines:
        kind = (line.phase, line.kind, line.axis, line.dtype, line.pooled, line.also, line.hoisted, line.sent)
        alike.setdefault((*kind, line.count if line.pooled else line.elements), []).append(line)
    return tuple(_added(same) for same in alike.values())


def _added(lines: list[Expectation]) -> Expectation:
    first, why = lines[0], "; ".join(dict.fromkeys(line.why for line in lines))
    if first.pooled:
        return replace(first, elements=_sum([line.elements for line in lines]), why=why)
    return replace(first, count=_sum([line.count for line in lines]), why=why)


def _sum(formulas: list[str]) -> str:
    """The sum of formulas, equal ones counted: "2*layers*microbatches"."""
    times = {formula: formulas.count(formula) for formula in formulas}
    return " + ".join(
        formula if n == 1 else f"{n}*({formula})" if "+" in formula or "-" in formula else f"{n}*{formula}"
        for formula, n in times.items()
    )


@dataclass(frozen=True)
class Requirement:
    """A line of a contract with its formulas worked out."""

    line: Expectation
    count: int
    elements: int
    dtype: str
    """As HLO spells it: bf16, f32."""
    sent: int | None = field(default=None, kw_only=True)
    """Elements of each that are expected to be sent, where that is not all."""

    @property
    def total(self) -> int:
        """Elements in a step."""
        return self.count * self.elements

    @property
    def min_elements(self) -> int:
        """The fewest elements with which nothing is missing."""
        return self.elements if self.line.hoisted else self.total


def requirements(contract: Contract, symbols: Symbols, mesh: MeshShape, compute_dtype: str) -> list[Requirement]:
    """What a contract asks of one step; lines over an axis of one way, or with count 0, ask nothing.

    Raises:
      UserError: a formula can't be worked out, or comes out negative or broken.
    """
    types = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32"}
    types["compute"] = types[compute_dtype]
    asked = []
    for line in contract.lines:
        for axis in line.axes:
            if axis not in AXES:
                raise UserError(f"contract {contract.name}: no mesh axis is called {axis!r}{nearest(axis, AXES)}")
        count, elements = evaluate(line.count, symbols), evaluate(line.elements, symbols)
        if count and mesh.degree(line.axes) > 1:
            sent = evaluate(line.sent, symbols) if line.sent else None
            asked.append(Requirement(line.on(mesh), count, elements, types[line.dtype], sent=sent))
    return asked


def phase_over(kind: str, axes: tuple[str, ...] | None) -> str | None:
    """The phase of a collective by its axes only: nothing but gradients and parameters crosses `data`, and nothing but
    gradients and what goes from stage to stage crosses `stage`. All-reduces over `context` and `expert` are of
    gradients, and so is all that crosses several of these axes."""
    if axes == (STAGE,):
        return STAGES if kind == "collective-permute" else GRADIENTS
    if not axes or MODEL in axes or (axes in ((CONTEXT,), (EXPERT,)) and kind != "all-reduce"):
        return None
    return PARAMETERS if kind == "all-gather" else GRADIENTS


# --- formulas


def evaluate(formula: str, symbols: Symbols) -> int:
    """A formula of +, -, *, exact / and the words of `symbols`: "2*layers*microbatches".

    Raises:
      UserError: it is not such a formula, or not a whole number of 0 or more.
    """
    words, work_out = _compiled(formula)
    for word in words:
        if word not in symbols:
            raise UserError(f"{formula!r} uses {word!r}{nearest(word, symbols)}; the symbols are {', '.join(symbols)}")
    try:
        result = work_out(symbols)
    except _NotWhole as e:
        raise UserError(f"{e} in {formula!r} is not a whole number for {dict(symbols)}") from e
    if result < 0:
        raise UserError(f"{formula!r} comes out at {result} for {dict(symbols)}; counts and sizes are 0 or more")
    return result


class _NotWhole(Exception):
    """A division leaves a remainder."""


@cache
def _compiled(formula: str) -> tuple[tuple[str, ...], Callable[[Symbols], int]]:
    """The words of a formula, and a function of their values."""
    try:
        tree = ast.parse(formula, mode="eval").body
    except SyntaxError as e:
        raise UserError(f"{formula!r} is not a formula: {e.msg}") from e
    words: dict[str, None] = {}
    work_out = _function(tree, formula, words)
    return tuple(words), work_out


def _function(node: ast.expr, formula: str, words: dict[str, None]) -> Callable[[Symbols], int]:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return lambda symbols: number
        case ast.Name(id=name):
            words[name] = None
            return lambda symbols: symbols[name]
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            left, right = _function(node.left, formula, words), _function(node.right, formula, words)
            match node.op:
                case ast.Add():
                    return lambda symbols: left(symbols) + right(symbols)
                case ast.Sub():
                    return lambda symbols: left(symbols) - right(symbols)
                case ast.Mult():
                    return lambda symbols: left(symbols) * right(symbols)
            text = ast.unparse(node)
            return lambda symbols: _quotient(left(symbols), right(symbols), text)
    raise UserError(f"{formula!r} is not a formula of words, whole numbers and +, -, *, /")


def _quotient(dividend: int, divisor: int, text: str) -> int:
    if not divisor or dividend % divisor:
        raise _NotWhole(text)
    return dividend // divisor
