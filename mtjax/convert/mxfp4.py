"""MXFP4, the 4-bit floats in which gpt-oss's experts are published: 32 values with a common scale (OCP Microscaling
Formats 1.0)."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the two tensors of a packed one."""
ROW = 16
"""Bytes of a block."""
SCALE_BIAS = 127
"""A scale is a power of two with this bias."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
"""By the 4 bits of a value: a sign, two bits of exponent, one of mantissa."""
_PAIRS = _VALUES[np.arange(256)[:, None] >> np.array([0, 4]) & 15]
"""[byte, 2]: its two values; the first is in the low bits."""


def packed_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the packed tensors among tensors of these shapes.

    Args:
      shapes: by name; `NAME_blocks` [experts, out, in / 32, 16] and `NAME_scales` [experts, out, in / 32] are a tensor.

    Returns:
      NAME -> the shape [experts, in, out] of `unpacked`.
    """
    found = {}
    for name, shape in shapes.items():
        if name.endswith(BLOCKS) and len(shape) == 4 and shape[-1] == ROW:
            whole = name.removesuffix(BLOCKS)
            if shapes.get(whole + SCALES) == shape[:-1]:
                found[whole] = (shape[0], shape[2] * ROW * 2, shape[1])
    return found


def unpacked(blocks: np.ndarray, scales: np.ndarray, dtype: np.typing.DTypeLike = ml_dtypes.bfloat16) -> np.ndarray:
    """Returns the values of a packed tensor, transposed as transformers has them; both types hold them exactly.

    Args:
      blocks: uint8 [experts, out, in / 32, 16], two values a byte.
      scales: uint8 [experts, out, in / 32], the exponents of the blocks' scales.
      dtype: bfloat16 or float32.

    Returns:
      [experts, in, out] in `dtype`.
    """
    experts, rows, groups, _ = blocks.shape
    out = np.empty((experts, groups * ROW * 2, rows), dtype)
    # One expert at a time, so that only one is in memory in float32.
    for into, block, scale in zip(out, blocks, scales, strict=True):
        values = np.ldexp(_PAIRS[block], scale.astype(np.int32)[..., None, None] - SCALE_BIAS)
        into[...] = values.reshape(rows, -1).T
    return out
