"""Weights in 8-bit floats with a scale for each block of 128 x 128, in which DeepSeek-V3 and others are published
(arXiv 2412.19437, section 3.3.2)."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

SCALE = "_scale_inv"
"""Suffix of the scales of a tensor."""
BLOCK = 128
"""Rows and columns that share a scale."""
CODE = "F8_E4M3"
"""The type of the values in a safetensors file."""


def packed_names(shapes: Mapping[str, tuple[int, ...]], codes: Mapping[str, str]) -> set[str]:
    """Returns the names of the packed tensors among tensors of these shapes and types.

    Args:
      shapes: by name; `NAME` [rows, columns] and `NAME_scale_inv`, its scales [rows / 128, columns / 128], rounded up.
      codes: types in the files, by name.
    """
    return {
        name
        for name, shape in shapes.items()
        if codes[name] == CODE and len(shape) == 2 and shapes.get(name + SCALE) == tuple(-(-n // BLOCK) for n in shape)
    }


def unpacked(values: np.ndarray, scales: np.ndarray, dtype: np.typing.DTypeLike = ml_dtypes.bfloat16) -> np.ndarray:
    """Returns the values multiplied by the scales of their blocks, in float32, rounded once to `dtype`.

    Args:
      values: float8_e4m3fn [rows, columns].
      scales: [rows / 128, columns / 128], rounded up.
      dtype: of the result.
    """
    out = np.empty(values.shape, dtype)
    # A row of blocks at a time, so that only that is in memory in float32.
    for start, of_row in zip(range(0, len(values), BLOCK), scales.astype(np.float32), strict=True):
        wide = np.repeat(of_row, BLOCK)[: values.shape[1]]
        out[start : start + BLOCK] = values[start : start + BLOCK].astype(np.float32) * wide
    return out
