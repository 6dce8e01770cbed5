"""What the operations of a layer know of the loop over layers: names of the arrays that it saves for the backward pass,
and whether there is a loop. `mtjax.models.layer_loop` saves by these names."""

from contextvars import ContextVar
from typing import Literal

SAVED = "saved"
"""What layers save unless recompute is full: products with weights; also what is as cheap to keep, such as
rotated queries and keys, and RMSNorm's factors."""
DROPOUT_MASK = "dropout mask"
"""Whether each element is kept: a byte per element."""
ATTENTION_OUTPUT = "attention output"
"""Attention's output before its projection."""
ATTENTION_CORE = "attention core"
"""Probabilities and their dropout mask: `5 a s^2 b / t` bytes, which selective recompute does not save."""
ATTENTION_STATISTICS = "attention statistics"
"""Log-sum-exp of flash attention's softmax: a float32 per query and head."""

layer_mode: ContextVar[Literal["in a loop", "unrolled", "unrolled, in parts"]] = ContextVar(
    "layer", default="in a loop"
)
"""How the layer that is traced runs; in parts, where the matrices of a fused product are gathered one by one."""


def is_unrolled() -> bool:
    """Returns whether the traced layer is in no loop over layers."""
    # XLA: what a loop's body slices and concatenates is written out at the loop's boundaries; without a loop it is read
    # in place.
    return layer_mode.get() != "in a loop"
