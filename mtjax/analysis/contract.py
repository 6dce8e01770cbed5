"""The communication contract: the collectives that a program must compile to, and no others.

A contract is a list of lines. Counts and sizes are formulas of symbols ("2*layers*microbatches"), printed as they are
checked. `mtjax.analysis.communication` has the lines of a run.
"""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from mtjax.errors import UserError, nearest
from mtjax.layout.mesh import AXES, MeshShape
from mtjax.layout.rules import CONTEXT, EXPERT, MODEL, STAGE, Axes

JOINED = "+"
"""Separator between the axes of a line that crosses several."""

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
"""Phases of a step, in their order."""

LAYER_PHASES = (LAYER_FORWARD, LAYER_RECOMPUTE, LAYER_BACKWARD)

SMALL_BYTES = 4096
"""Scalars - a loss, a norm, a token count - may cross any axis outside the layers: at most this much at a time."""

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"]
Dtype = Literal["compute", "float32", "bfloat16", "int32", "float8_e4m3fn", "float8_e5m2"]
Symbols = Mapping[str, int]
"""Symbol of the formulas -> its value."""


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
    """Formula: elements of each array; of an all-gather its result, of a reduce-scatter its operand, of a ragged
    all-to-all the longer of the two: the allocated size."""
    dtype: Dtype = "compute"
    pooled: bool = False
    """Whether only the total is checked: XLA may combine these arrays in any way."""
    also: str = ""
    """Another phase in which it is allowed. XLA: of two equal collectives it keeps either (CSE)."""
    hoisted: bool = False
    """In a pooled line: whether XLA may hoist it out of loops, or drop it where nothing reads it. Any total from once
    to `count` times the elements is allowed; a reduction may be in any phase after the forward pass."""
    why: str = ""
    """What is sent, for tables and messages."""
    sent: str = ""
    """Formula: elements of each array expected to be sent, where only run time decides; empty: all."""

    @cached_property
    def axes(self) -> Axes:
        """The mesh axes that it crosses together."""
        return tuple(self.axis.split(JOINED))

    def on(self, mesh: MeshShape) -> "Expectation":
        """Returns this line without axes of degree 1, as long as another axis is left."""
        # XLA's groups over an axis of degree 1 are those without it, so the program does not name it.
        used = tuple(axis for axis in self.axes if mesh.degree((axis,)) > 1)
        return self if used in ((), self.axes) else replace(self, axis=JOINED.join(used))


@dataclass(frozen=True)
class Contract:
    """All collectives that a program may have, in addition to those of scalars outside the layers."""

    name: str
    lines: tuple[Expectation, ...]
    split: tuple[str, ...] = ()
    """Logical axes whose parameters must be sharded over `model`."""

    def extended(self, lines: tuple[Expectation, ...]) -> "Contract":
        """Returns the contract with further lines."""
        return replace(self, lines=(*self.lines, *lines))


def sum_expectations(lines: Iterable[Expectation]) -> tuple[Expectation, ...]:
    """Merges the lines of equal arrays in the same phase.

    Exact lines of equal arrays add their counts; pooled ones of equal counts add their elements.
    """
    alike: dict[tuple[Any, ...], list[Expectation]] = {}
    for line in lines:
        kind = (line.phase, line.kind, line.axis, line.dtype, line.pooled, line.also, line.hoisted, line.sent)
        alike.setdefault((*kind, line.count if line.pooled else line.elements), []).append(line)
    return tuple(_added(same) for same in alike.values())


def _added(lines: list[Expectation]) -> Expectation:
    """Merges lines that differ in `why`, and in their counts or, if pooled, in their elements."""
    first, why = lines[0], "; ".join(dict.fromkeys(line.why for line in lines))
    if first.pooled:
        sent = _sum([line.sent for line in lines]) if first.sent else ""
        return replace(first, elements=_sum([line.elements for line in lines]), sent=sent, why=why)
    return replace(first, count=_sum([line.count for line in lines]), why=why)


def _sum(formulas: list[str]) -> str:
    """Returns the sum of formulas, with equal ones counted: "2*layers*microbatches"."""
    times = {formula: formulas.count(formula) for formula in formulas}
    return " + ".join(
        formula if n == 1 else f"{n}*({formula})" if "+" in formula or "-" in formula else f"{n}*{formula}"
        for formula, n in times.items()
    )


@dataclass(frozen=True)
class Requirement:
    """A line of a contract with its formulas evaluated."""

    line: Expectation
    count: int
    elements: int
    dtype: str
    """As HLO spells it: bf16, f32."""
    sent: int | None = field(default=None, kw_only=True)
    """Elements of each array expected to be sent, where that is not all."""

    @property
    def total(self) -> int:
        """Elements in a step."""
        return self.count * self.elements

    @property
    def min_elements(self) -> int:
        """The fewest elements that meet the line."""
        if not self.line.hoisted:
            return self.total
        return self.elements if self.sent is None else min(self.elements, self.sent)


def requirements(contract: Contract, symbols: Symbols, mesh: MeshShape, compute_dtype: str) -> list[Requirement]:
    """Evaluates a contract for one step; lines over axes of degree 1, or with count 0, are omitted.

    Raises:
      UserError: a formula can't be evaluated, or its value is negative or not an integer.
    """
    types = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "s32"}
    types |= {"float8_e4m3fn": "f8e4m3fn", "float8_e5m2": "f8e5m2"}
    types["compute"] = types[compute_dtype]
    required = []
    for line in contract.lines:
        axes = line.axes
        for axis in axes:
            if axis not in AXES:
                raise UserError(f"contract {contract.name}: no mesh axis is called {axis!r}{nearest(axis, AXES)}")
        count, elements = evaluate(line.count, symbols), evaluate(line.elements, symbols)
        # Formulas are evaluated before this condition, so that a wrong one is an error on every mesh.
        if count and mesh.degree(axes) > 1:
            sent = evaluate(line.sent, symbols) if line.sent else None
            required.append(Requirement(line.on(mesh), count, elements, types[line.dtype], sent=sent))
    return required


def phase_over(kind: str, axes: tuple[str, ...] | None) -> str | None:
    """Returns the phase of a collective if its kind and axes determine it, else None."""
    # Only gradients and parameters cross `data`, only gradients and stage-boundary activations cross `stage`.
    # All-reduces over `context` and `expert` are of gradients, and so is all that crosses several of these axes.
    if axes == (STAGE,):
        return STAGES if kind == "collective-permute" else GRADIENTS
    if not axes or MODEL in axes or (axes in ((CONTEXT,), (EXPERT,)) and kind != "all-reduce"):
        return None
    return PARAMETERS if kind == "all-gather" else GRADIENTS


# --- formulas


def evaluate(formula: str, symbols: Symbols) -> int:
    """Evaluates a formula of +, -, *, exact /, integers and symbols: "2*layers*microbatches".

    Raises:
      UserError: it is not such a formula, or its value is negative or not an integer.
    """
    names, function = _compiled(formula)
    for name in names:
        if name not in symbols:
            raise UserError(f"{formula!r} uses {name!r}{nearest(name, symbols)}; the symbols are {', '.join(symbols)}")
    try:
        result = function(symbols)
    except _NotAnInteger as e:
        raise UserError(f"{e} in {formula!r} is not an integer for {dict(symbols)}") from e
    if result < 0:
        raise UserError(f"{formula!r} is {result} for {dict(symbols)}, and must be 0 or more")
    return result


class _NotAnInteger(Exception):
    """A division leaves a remainder."""


@cache
def _compiled(formula: str) -> tuple[tuple[str, ...], Callable[[Symbols], int]]:
    """Returns the symbols of a formula, and a function from their values to the formula's."""
    try:
        tree = ast.parse(formula, mode="eval").body
    except SyntaxError as e:
        raise UserError(f"{formula!r} is not a formula: {e.msg}") from e
    names: dict[str, None] = {}
    # A function, and no eval: contract files are input, and formulas are evaluated thousands of times in a search.
    function = _function(tree, formula, names)
    return tuple(names), function


def _function(node: ast.expr, formula: str, names: dict[str, None]) -> Callable[[Symbols], int]:
    """Returns a function that evaluates a node of a formula, and adds its symbols to `names`."""
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return lambda symbols: number
        case ast.Name(id=name):
            names[name] = None
            return lambda symbols: symbols[name]
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            left, right = _function(node.left, formula, names), _function(node.right, formula, names)
            match node.op:
                case ast.Add():
                    return lambda symbols: left(symbols) + right(symbols)
                case ast.Sub():
                    return lambda symbols: left(symbols) - right(symbols)
                case ast.Mult():
                    return lambda symbols: left(symbols) * right(symbols)
            text = ast.unparse(node)
            return lambda symbols: _quotient(left(symbols), right(symbols), text)
    raise UserError(f"{formula!r} is not a formula of symbols, integers and +, -, *, /")


def _quotient(dividend: int, divisor: int, text: str) -> int:
    # Rounding would make a wrong formula pass on some meshes.
    if not divisor or dividend % divisor:
        raise _NotAnInteger(text)
    return dividend // divisor
