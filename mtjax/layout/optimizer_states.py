"""What an optimizer keeps of each parameter, as plain data: the step builds these arrays, the analysis counts them."""

import math
from dataclasses import dataclass
from typing import Literal

from mtjax.config import Config
from mtjax.layout.layouts import LAYERS, is_matrix

OptimizerName = Literal["adamw", "muon", "adafactor", "lion", "sgd", "schedule-free"]

MOMENTUM, SQUARE, SQUARE_ROWS, SQUARE_COLUMNS, ITERATE = "mu", "nu", "v_row", "v_col", "z"
"""Names of state arrays: moving averages of gradients, of their squares and of the squares' rows and columns, and
Schedule-Free's iterate."""

STACKED = (LAYERS, "expert", "qkv", "kv", "gate")
"""Logical names of dimensions along which several matrices are stacked in one array."""
HEADS = ("heads", "kv_heads", "head_dim", "groups", "state")
"""Logical names of dimensions that are one dimension of a matrix together."""
ITERATIONS = 5
"""Of Newton-Schulz."""
FACTORED_FROM = 128
"""Adafactor factors a parameter if two of its dimensions have at least this size, as optax and T5X do."""


@dataclass(frozen=True)
class OptimizerStates:
    """The optimizer of a run, as far as its states depend on it."""

    name: OptimizerName = "adamw"
    momentum: bool = True
    """Whether SGD has momentum."""
    mu_bytes: int = 4
    nu_bytes: int = 4
    """Bytes of an element of AdamW's moments."""
    newton_schulz: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which Muon's matrices are exchanged and orthogonalized."""
    clips_scores: bool = False
    """Whether weights are scaled by the largest attention scores (QK-clip)."""

    @property
    def is_plain(self) -> bool:
        """Whether they are float32 moments of AdamW, which optax's has."""
        return self.name == "adamw" and self.mu_bytes == self.nu_bytes == 4


BYTES = {"float32": 4, "bfloat16": 2}
"""Of an element."""
ADAMW = OptimizerStates()


def optimizer_states(config: Config) -> OptimizerStates:
    """Returns the optimizer of a config."""
    options = config.optimizer
    is_narrow = config.training.compute_dtype == "bfloat16"
    return OptimizerStates(
        options.optimizer,
        options.sgd_momentum > 0,
        BYTES[options.adam_mu_dtype],
        BYTES[options.adam_nu_dtype],
        "bfloat16" if is_narrow else "float32",
        options.qk_clip > 0,
    )


@dataclass(frozen=True)
class MatrixDims:
    """The dimensions of an array of stacked matrices."""

    stacked: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Returns the number of matrices in an array of this shape, their rows and their columns."""
        stacked, rows, columns = (math.prod(shape[i] for i in dims) for dims in (self.stacked, self.rows, self.columns))
        return stacked, rows, columns


def matrices_of(names: tuple[str, ...]) -> MatrixDims | None:
    """Returns the dimensions of a parameter whose matrices Muon orthogonalizes, each layer's, expert's, and each of
    query, key, value and of a gated MLP's two by itself; None for a parameter that AdamW updates.

    Those are vectors and what is outside the layers: embeddings, positions and heads.
    """
    if names[0] != LAYERS or not is_matrix(names):
        return None
    groups: list[list[int]] = []
    for i, name in enumerate(names):
        if name in STACKED:
            continue
        # Heads and their width are one dimension of the matrix: it maps to, or from, all heads together.
        if name in HEADS and groups and names[groups[-1][-1]] in HEADS:
            groups[-1].append(i)
        else:
            groups.append([i])
    if len(groups) != 2:
        return None
    stacked = tuple(i for i, name in enumerate(names) if name in STACKED)
    return MatrixDims(stacked, tuple(groups[0]), tuple(groups[1]))


def factored_dimensions(names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Returns the second largest and the largest dimension of one layer's parameter, over which Adafactor averages
    squares; None where it keeps each element's.

    They index the stacked parameter. Of equal sizes the later dimension counts as the larger one, as in optax.
    """
    first = int(names[0] == LAYERS)
    # Vectors have nothing to factor.
    if len(shape) - first < 2:
        return None
    # A stable sort: of equal sizes the later one is last.
    by_size = sorted(range(first, len(shape)), key=lambda i: shape[i])
    second, largest = by_size[-2:]
    return (second, largest) if shape[second] >= FACTORED_FROM else None


def kept_arrays(states: OptimizerStates, names: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Returns the arrays that an optimizer keeps of a parameter: name -> the parameter's dimensions that it has."""
    every = tuple(range(len(shape)))
    match states.name:
        case "adamw":
            return {MOMENTUM: every, SQUARE: every}
        case "muon":
            return {MOMENTUM: every} if matrices_of(names) else {MOMENTUM: every, SQUARE: every}
        case "lion":
            return {MOMENTUM: every}
        case "sgd":
            return {MOMENTUM: every} if states.momentum else {}
        case "schedule-free":
            return {ITERATE: every, SQUARE: every}
        case "adafactor":
            factored = factored_dimensions(names, shape)
            if factored is None:
                return {SQUARE: every}
            second, largest = factored
            without = lambda dim: tuple(i for i in every if i != dim)  # noqa: E731
            return {SQUARE_ROWS: without(largest), SQUARE_COLUMNS: without(second)}
