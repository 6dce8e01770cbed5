"""ALiBi (arXiv 2108.12409): a bias of attention scores that is proportional to the distance, with a slope per head."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import head_dim
from mtjax.sharding.axes import spec


@dataclass(frozen=True)
class Alibi:
    """The slopes of a model's heads."""

    slopes: tuple[float, ...]
    scale: float | None = None
    """When given, the bias is computed in bfloat16 and multiplied by this: it is added before scores are scaled."""

    @classmethod
    def of(cls, model: Model) -> "Alibi | None":
        """Returns the slopes; None unless position is alibi."""
        if model.position != "alibi":
            return None
        scale = head_dim(model) ** -0.5 if model.attention_scale is None else model.attention_scale
        return cls(slopes(model.num_heads), scale if model.alibi_scaled else None)

    def by_head(self) -> Float[Array, " heads"]:
        """Returns the slopes as an array; each rank has those of its heads."""
        return reshard(jnp.asarray(self.slopes, jnp.float32), spec("heads"))

    def at(self, positions: Int[Array, "..."], slopes: Float[Array, "..."]) -> Float[Array, "..."]:
        """Computes the bias of keys at these positions, up to a number that is the same for all keys of a query:
        softmax does not depend on that. The bias of a key for a query is the difference of both positions' biases."""
        if self.scale is None:
            return slopes * positions.astype(jnp.float32)
        # Falcon-RW computes biases in bfloat16, whose rounding at long distances is part of what it was trained with.
        rounded = slopes.astype(jnp.bfloat16) * positions.astype(jnp.bfloat16)
        return rounded.astype(jnp.float32) * self.scale

    def of_distances(
        self, queries: Int[Array, "#batch seq"], keys: Int[Array, "*batch key_seq"]
    ) -> Float[Array, "#batch heads seq key_seq"]:
        """Computes the biases of queries and keys at these positions, float32."""
        slopes = self.by_head()[:, None]
        of_keys = self.at(keys[..., None, :], slopes)[..., None, :]
        return of_keys - self.at(queries[:, None], slopes)[..., None]


def slopes(heads: int) -> tuple[float, ...]:
    """Returns the slopes of any number of heads: 2^(-8i / p) for the first p of them, the largest power of 2 that there
    are, and for the others every second one of those for 2p heads."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    # For numbers that are not powers of 2, the others are those of the paper's code.
    return (*first, *(2 ** (-4 * i / power) for i in range(1, 2 * (heads - power), 2)))
