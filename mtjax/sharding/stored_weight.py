"""Matrices in another form than an array: the interface of those that inference stores, and those in 8 bits that
training quantizes once a step."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.sharding.axes import varying_like


class StoredWeight:
    """A matrix [*inputs, *outputs] for products that are not differentiated (`mtjax.generate.weight_format`)."""

    scales: Any = None
    """When given, float32 factors of the products, in the shape of the output dimensions."""

    def __getitem__(self, key: object) -> "StoredWeight":
        """Returns itself for `[...]`, by which `nnx.Variable` is read."""
        assert key is Ellipsis
        return self

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        raise NotImplementedError

    def product(self, x: Float[Array, "..."], inputs: int, sharding: PartitionSpec) -> Float[Array, "..."]:
        """Computes `x W` over the last `inputs` dimensions of x, in its type, without `scales`."""
        raise NotImplementedError

    def rows(
        self, specs: Any, tokens: Int[Array, "batch seq"], dtype: jnp.dtype
    ) -> Float[Array, "batch act_seq embed"]:
        """Looks up rows of a table [vocab, embed] like `vocab_parallel_embedding`; `specs` are its `VocabSpecs`."""
        raise NotImplementedError


@partial(jax.tree_util.register_dataclass, data_fields=["values", "carrier"], meta_fields=["dtype"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix in 8 bits, quantized once for all products of a step; its gradient has more bits."""

    values: Any
    """[*inputs, *outputs], or stacked, [layers, ...]."""
    dtype: str
    """Type of the matrix without quantization, and so of its gradient."""
    carrier: Any = None
    """Zeros in the shape of the matrix that no product reads: their gradient is the matrix's. None in a stack."""

    def __getitem__(self, key: object) -> "QuantizedWeight":
        """Returns itself for `[...]`, by which `nnx.Variable` is read."""
        assert key is Ellipsis
        return self

    @property
    def ndim(self) -> int:
        """Dimensions of the matrix."""
        return self.values.ndim

    def astype(self, dtype: jax.typing.DTypeLike) -> "QuantizedWeight":
        """Returns the matrix for products with gradients of this type."""
        return replace(self, carrier=self.carrier.astype(dtype))

    def with_carrier(self) -> "QuantizedWeight":
        """Returns the matrix with zeros to differentiate by."""
        values = jax.lax.stop_gradient(self.values)
        zeros = jnp.zeros(values.shape, self.dtype, out_sharding=jax.typeof(values).sharding.spec)
        return replace(self, values=values, carrier=varying_like(zeros, values))
