"""Memory traffic of a layer's element-wise kernels, for software that fuses them and software that doesn't.

Bytes per element of [batch, sequence, hidden], in terms of c, the bytes of an element: a kernel that reads one array
and writes one moves 2c; a dropout mask has one byte.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

PerElement = Callable[[int], float]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one pass over a layer."""

    sublayer: PerElement
    """Of each sublayer outside the tensor-parallel region: a norm, dropout, a residual add."""
    inside: PerElement
    """Of attention, without the scores."""
    mlp: PerElement
    """Of the MLP, per element of its inner width."""
    gate: PerElement = lambda c: 0
    """What a gated MLP moves in addition, per element of its inner width."""
    normed: PerElement = lambda c: 0
    """What QK norm moves, per element of queries and keys."""


@dataclass(frozen=True)
class ElementWise:
    """Element-wise kernels of a code base."""

    name: str
    forward: Traffic
    backward: Traffic
    logits: float
    """Bytes per logit, forward and backward."""
    optimizer_extra: float
    """Bytes per parameter beyond one read and write of the states."""


UNFUSED = ElementWise(
    "unfused",
    # A norm 2c, a bias 2c, dropout 2c+1, a residual add 3c.
    forward=Traffic(
        sublayer=lambda c: 9 * c + 1,
        # Bias of query, key and value 3 x 2c, their copies 3 x 2c, the context's copy 2c.
        inside=lambda c: 14 * c,
        # Bias 2c, GELU 2c.
        mlp=lambda c: 4 * c,
    ),
    # A norm 5c (input and parameter gradients), dropout 2c+1, a bias sum c, a residual add 3c.
    backward=Traffic(
        sublayer=lambda c: 11 * c + 1,
        # Bias sums 3c, joining the three gradients 3 x 2c, the context's copy 2c.
        inside=lambda c: 11 * c,
        # GELU 3c, bias sum c.
        mlp=lambda c: 4 * c,
    ),
    # To float32, maximum, subtract, exponential, sum, divide; gradient back to 16 bit.
    logits=40,
    # Copies of the gradients to float32, unscaling, clipping.
    optimizer_extra=22,
)
FUSED = ElementWise(
    "fused",
    # A norm 2c, bias + dropout + residual add 3c+1.
    forward=Traffic(sublayer=lambda c: 5 * c + 1, inside=lambda c: 6 * c, mlp=lambda c: 2 * c),
    # A norm 4c, dropout and residual 2c+1.
    backward=Traffic(sublayer=lambda c: 6 * c + 1, inside=lambda c: 6 * c, mlp=lambda c: 3 * c),
    logits=16,
    optimizer_extra=0,
)
# XLA: a gated activation reads two arrays and writes one, 3c; its backward pass reads a third, and writes the gradients
# of both and, for the next product, the activation's value, 6c. QK norm's sums read an array, its values are computed
# where RoPE is; the backward pass computes values again, 3c, and reads two arrays for each sum, over heads and over
# tokens.
XLA = replace(
    FUSED,
    forward=replace(FUSED.forward, gate=lambda c: c, normed=lambda c: c),
    backward=replace(FUSED.backward, gate=lambda c: 3 * c, normed=lambda c: 7 * c),
)
KEPT_GATE = 2
"""Passes over the inner width that a loop over layers adds which keeps a gated MLP's product: it computes the
activation's value again in a kernel of its own, which reads gate and product once more."""


@dataclass(frozen=True)
class Core:
    """Bytes per attention score without flash attention; `dropout` adds its kernels."""

    forward: Callable[[int, bool], float]
    backward: Callable[[int, bool], float]


CORE = {
    # Scale, mask (multiply and subtract), softmax: 4 x 2c; dropout 2c+1. Back: softmax 3c, mask and scale 2 x 2c.
    "unfused": Core(
        lambda c, dropout: 8 * c + (2 * c + 1 if dropout else 0),
        lambda c, dropout: 7 * c + (2 * c + 1 if dropout else 0),
    ),
    # float32 scores read twice (maximum, sum), probabilities written; dropout's mask. Back: gradients through softmax.
    "fused": Core(
        lambda c, dropout: 8 + c + (c + 1 if dropout else 0),
        lambda c, dropout: 4 * c + (1 if dropout else 0),
    ),
}
