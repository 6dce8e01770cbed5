"""The format of matrices for generation: in the compute dtype or quantized, transposed or not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import Array

from mtjax.config.adapters import PARTS
from mtjax.config.storage import Storage
from mtjax.generate.byte_matrix import to_bytes
from mtjax.generate.int4 import to_int4
from mtjax.generate.transposed_weight import TransposedWeight
from mtjax.layout.layouts import gathers_in_compute_dtype

Names = tuple[str | None, ...]
"""Logical axis names of a parameter's dimensions."""


@dataclass(frozen=True)
class WeightFormat:
    """The format of the matrices of layers."""

    dtype: Any
    """Dtype of matrices that are not quantized."""
    storage: Storage
    """How matrices are quantized."""
    transposed: bool
    """Whether matrices are stored transposed, where a product reads all of them."""

    def __call__(self, matrix: Array, names: Names, *grid: Array) -> Any:
        """Converts a layer's matrix; `grid`: scales, and perhaps zero points, with which it was quantized."""
        # A matrix reads the residual stream (its first dimension is "embed", the only input) or writes to it (its last
        # dimension is "embed", the only output); all other dimensions are on the other side.
        inputs = len(names) - 1 if names[-1] == "embed" else 1
        storage = self.storage
        if storage.weights_dtype in ("int8", "fp8"):
            return to_bytes(matrix, range(inputs), storage.weights_dtype, grid[0] if grid else None)
        if storage.weights_dtype == "int4":
            zero_point = storage.weights_zero_point
            known = (grid[0], grid[1] if zero_point else None) if grid else None
            return to_int4(matrix, inputs, storage.weights_group, self.dtype, zero_point=zero_point, known=known)
        matrix = matrix.astype(self.dtype)
        # Of experts, and of the components of a fused product's adapter, one is indexed at a time.
        indexed = "expert" in names or names[0] in PARTS
        return TransposedWeight.of(matrix, inputs) if self.transposed and not indexed else matrix


def with_matrices(module: Any, convert: Callable[..., Any], *more: Any) -> Any:
    """Applies `convert` to the matrices of a module, with their names, and with the arrays of modules like it."""

    def cast(variable: Any, *others: Any) -> Any:
        names, value = variable.get_metadata()["axes"], variable[...]
        if not gathers_in_compute_dtype(names):
            return variable
        return variable.replace(convert(value, names, *(other[...] for other in others)))

    return jax.tree.map(cast, module, *more, is_leaf=lambda v: isinstance(v, nnx.Variable))
