"""The interface of a matrix that inference stores in another form than an array, such as 8 bits."""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int


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
