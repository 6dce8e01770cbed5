"""State-space layers over context parallel ranks: what pieces of samples leave behind travels, and no tokens.

A rank has two pieces of each sample (`mtjax.sharding.context.zigzag`). It gathers what every piece leaves, which is
small and does not grow with the sequence, and takes what comes into its own pieces.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import context_axes, map_ranks
from mtjax.sharding.no_hoist import no_hoist


@dataclass(frozen=True)
class Pieces:
    """A rank's two pieces of each sample."""

    axes: Axes
    """Mesh axes of context parallelism."""
    rank: Int[Array, ""]
    degree: int

    @classmethod
    def of(cls, positions: Int[Array, " seq"] | None) -> "Pieces":
        """Returns the pieces of a rank whose tokens have these positions."""
        assert positions is not None
        axes = context_axes()
        return cls(axes, positions[0] // (len(positions) // 2), math.prod(lax.axis_size(axis) for axis in axes))

    def split(self, x: Array) -> Array:
        """Splits samples into pieces: [b, s, ...] -> [2 b, s / 2, ...]."""
        return _reshaped(x, 2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])

    def join(self, x: Array) -> Array:
        """Joins pieces: [2 b, s / 2, ...] -> [b, s, ...]."""
        return _reshaped(x, x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])

    def in_order(self, own: Float[Array, "2b ..."]) -> Float[Array, "pieces b ..."]:
        """Gathers an array of the pieces of all ranks, in the order of the sample."""
        sharding = PartitionSpec(None, *jax.typeof(own).sharding.spec)
        pairs = own.reshape(-1, 2, *own.shape[1:], out_sharding=sharding)
        every: Any = (_gathered if jnp.issubdtype(own.dtype, jnp.floating) else _all)(self.axes, pairs)
        return jnp.concatenate([every[:, :, 0], jnp.flip(every[:, :, 1], 0)])

    def own_of(self, ordered: Float[Array, "pieces b ..."]) -> Float[Array, "2b ..."]:
        """Selects this rank's two pieces."""
        places = jnp.stack([self.rank, 2 * self.degree - 1 - self.rank])
        # A product, as an index that differs between ranks would not lower here.
        is_own = (places[:, None] == jnp.arange(2 * self.degree)).astype(ordered.dtype)
        both = jnp.einsum("wp,pb...->bw...", is_own, ordered, precision=lax.Precision.HIGHEST)
        sharding = PartitionSpec(*jax.typeof(ordered).sharding.spec[1:])
        return both.reshape(-1, *ordered.shape[2:], out_sharding=sharding)

    def before(self, ends: Float[Array, "2b ..."]) -> Float[Array, "2b ..."]:
        """Returns, for each of this rank's pieces, what the piece before it ends with; zeros for the first."""
        ordered = self.in_order(ends)
        return self.own_of(jnp.concatenate([jnp.zeros_like(ordered[:1]), ordered[:-1]]))


def _reshaped(x: Array, *shape: int) -> Array:
    """Reshapes the first two dimensions, neither of which is sharded here."""
    return x.reshape(shape, out_sharding=PartitionSpec(*jax.typeof(x).sharding.spec))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axes: Axes, x: Array) -> Array:
    """All-gathers [...] to [ranks, ...]; backward, reduce-scatters."""
    return _all(axes, x)


def _all(axes: Axes, x: Array) -> Array:
    partition = jax.typeof(x).sharding.spec
    mapped = map_ranks(lambda own: lax.all_gather(own, axes), (partition,), PartitionSpec(None, *partition))
    return no_hoist(mapped, x)


def _gathered_forward(axes: Axes, x: Array) -> tuple[Array, None]:
    return _all(axes, x), None


def _gathered_backward(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    partition = jax.typeof(gradient).sharding.spec

    def scatter(every: Array) -> Array:
        return lax.psum_scatter(every, axes, scatter_dimension=0)

    return (map_ranks(scatter, (partition,), PartitionSpec(*partition[1:]))(gradient),)


_gathered.defvjp(_gathered_forward, _gathered_backward)
