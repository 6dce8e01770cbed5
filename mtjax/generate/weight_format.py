"""How matrices are kept for generating: in the compute type or in 8 bits, as they are or turned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax import Array

from mtjax.models.transposed_weight import TransposedWeight
from mtjax.sharding.int8 import to_int8
from mtjax.theory.layout import gathers_in_compute_dtype

Names = tuple[str | None, ...]
"""Of a parameter's dimensions."""


@dataclass(frozen=True)
class WeightFormat:
    """How the matrices of layers are kept."""

    dtype: Any
    """Of those that are not in 8 bits."""
    int8: bool
    transposed: bool

    def __call__(self, matrix: Array, names: Names) -> Any:
        """A layer's matrix; the residual stream is all of its inputs or all of its outputs, or it is the experts'."""
        inputs = len(names) - 1 if names[-1] == "embed" else 1
        if self.int8:
            return to_int8(matrix, range(inputs))
        matrix = matrix.astype(self.dtype)
        return TransposedWeight.of(matrix, inputs) if self.transposed and "expert" not in names else matrix


def with_matrices(module: Any, convert: Callable[[Array, Names], Any]) -> Any:
    """A module with its matrices as they are kept."""

    def cast(variable: Any) -> Any:
        names, value = variable.get_metadata()["axes"], variable[...]
        return variable.replace(convert(value, names)) if gathers_in_compute_dtype(names) else variable

    return jax.tree.map(cast, module, is_leaf=lambda v: isinstance(v, nnx.Variable))
