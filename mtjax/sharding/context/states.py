"""Layers with a recurrent state over context parallel ranks: what pieces of samples leave travels, and no tokens.

A rank has two pieces of each sample (`mtjax.sharding.context.zigzag`). It gathers what every piece leaves, which is
small and does not grow with the sequence, and takes what comes into its own pieces. A gated delta net leaves a matrix
besides, by which a state that comes in is multiplied; ranks exchange these by heads (`states_before`).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Float, Int, Shaped

from mtjax.layout.rules import Axes
from mtjax.sharding.axes import context_axes, map_ranks, no_hoist


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
        # A rank's first position tells its index; `lax.axis_index` would be hoisted out of the scan over layers.
        return cls(axes, positions[0] // (len(positions) // 2), math.prod(lax.axis_size(axis) for axis in axes))

    def split(self, x: Array) -> Array:
        """Splits samples into pieces: [b, s, ...] -> [2 b, s / 2, ...]."""
        return _reshaped(x, 2 * x.shape[0], x.shape[1] // 2, *x.shape[2:])

    def join(self, x: Array) -> Array:
        """Joins pieces: [2 b, s / 2, ...] -> [b, s, ...]."""
        return _reshaped(x, x.shape[0] // 2, 2 * x.shape[1], *x.shape[2:])

    def in_order(self, local: Shaped[Array, "2b ..."]) -> Shaped[Array, "pieces b ..."]:
        """Gathers an array of the pieces of all ranks, in the order of the sample."""
        sharding = PartitionSpec(None, *jax.typeof(local).sharding.spec)
        pairs = local.reshape(-1, 2, *local.shape[1:], out_sharding=sharding)
        # Documents' numbers are integers, and have no gradient.
        every: Any = (_gathered if jnp.issubdtype(local.dtype, jnp.floating) else _all)(self.axes, pairs)
        # Early pieces of ranks 0, 1, ..., then late pieces of ranks ..., 1, 0 (zig-zag).
        return jnp.concatenate([every[:, :, 0], jnp.flip(every[:, :, 1], 0)])

    def own_of(self, ordered: Shaped[Array, "pieces b ..."]) -> Shaped[Array, "2b ..."]:
        """Selects this rank's two pieces."""
        pieces_of_rank = jnp.stack([self.rank, 2 * self.degree - 1 - self.rank])
        # A product, as an index that differs between ranks would not lower here.
        is_own = (pieces_of_rank[:, None] == jnp.arange(2 * self.degree)).astype(ordered.dtype)
        both = jnp.einsum("wp,pb...->bw...", is_own, ordered, precision=lax.Precision.HIGHEST)
        sharding = PartitionSpec(*jax.typeof(ordered).sharding.spec[1:])
        return both.reshape(-1, *ordered.shape[2:], out_sharding=sharding)

    def before(self, ends: Shaped[Array, "2b ..."]) -> Shaped[Array, "2b ..."]:
        """Returns, for each of this rank's pieces, what the piece before it ends with; zeros for the first."""
        return self.own_of(one_later(self.in_order(ends)))


def one_later(ordered: Shaped[Array, "pieces ..."]) -> Shaped[Array, "pieces ..."]:
    """Returns what the piece before each piece has; zeros for the first."""
    return jnp.concatenate([jnp.zeros_like(ordered[:1]), ordered[:-1]])


def _reshaped(x: Array, *shape: int) -> Array:
    """Reshapes the first two dimensions, neither of which is sharded here."""
    return x.reshape(shape, out_sharding=PartitionSpec(*jax.typeof(x).sharding.spec))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered(axes: Axes, x: Array) -> Array:
    """All-gathers [...] to [ranks, ...]; backward, reduce-scatters."""
    return _all(axes, x)


def _all(axes: Axes, x: Array) -> Array:
    partition = jax.typeof(x).sharding.spec
    mapped = map_ranks(lambda local: lax.all_gather(local, axes), (partition,), PartitionSpec(None, *partition))
    return no_hoist(mapped, x)


def _gathered_forward(axes: Axes, x: Array) -> tuple[Array, None]:
    return _all(axes, x), None


def _gathered_backward(axes: Axes, _: None, gradient: Array) -> tuple[Array]:
    """Reduce-scatters the gradient of every rank's copies, [ranks, ...], to that of this rank's array, [...]."""
    partition = jax.typeof(gradient).sharding.spec

    def scatter(every: Array) -> Array:
        return lax.psum_scatter(every, axes, scatter_dimension=0)

    return (map_ranks(scatter, (partition,), PartitionSpec(*partition[1:]))(gradient),)


_gathered.defvjp(_gathered_forward, _gathered_backward)


def states_before(
    pieces: Pieces, leaves: Float[Array, "2b u h n p+n"], dtype: jax.typing.DTypeLike
) -> Float[Array, "2b u h n p"]:
    """Computes the states that come into this rank's pieces: zeros into the first of a sample.

    An all-to-all gives each rank what all pieces leave in its part of the heads; it passes their states from piece to
    piece, and a second one brings each state to the rank of its piece. An all-gather would send more, in proportion
    to the ranks (docs/hybrid.md), and have every rank pass the states of all heads.

    Args:
      pieces: of the rank.
      leaves: [B T] of each piece and head, which leaves B + T S where S comes in; float32.
      dtype: of the result, which is sent in it.
    """
    return _passed(pieces.axes, dtype, leaves)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _passed(axes: Axes, dtype: jax.typing.DTypeLike, leaves: Array) -> Array:
    return _passed_forward(axes, dtype, leaves)[0]


def _passed_forward(axes: Axes, dtype: jax.typing.DTypeLike, leaves: Array) -> tuple[Array, Array]:
    """Computes the states that come into this rank's pieces, [2b u h n p]; saves the maps of its heads."""
    partition = jax.typeof(leaves).sharding.spec

    def passed(local: Array) -> tuple[Array, Array]:
        # float32, as a map is a product over all tokens of a piece; what ranks read is sent back in the compute type.
        maps = _by_heads(axes, local)
        return _by_pieces(axes, _pass_on(maps).astype(dtype), local), maps

    return no_hoist(map_ranks(passed, (partition,), (partition, _of_heads(partition))), leaves)


def _passed_backward(axes: Axes, _: jax.typing.DTypeLike, maps: Array, gradient: Array) -> tuple[Array]:
    """Computes the gradient of `leaves`, [2b u h n p+n], from that of the states, [2b u h n p]."""
    partition = jax.typeof(gradient).sharding.spec

    def passed(maps: Array, local: Array) -> Array:
        # Passes the states on once more: only the maps were saved, not the states between pieces.
        _, back = jax.vjp(_pass_on, maps)
        (of_maps,) = back(_by_heads(axes, local).astype(maps.dtype))
        return _by_pieces(axes, of_maps, local)

    return (no_hoist(map_ranks(passed, (_of_heads(partition), partition), partition), maps, gradient),)


_passed.defvjp(_passed_forward, _passed_backward)


def _of_heads(partition: PartitionSpec) -> PartitionSpec:
    """Returns the sharding of `_by_heads`' result."""
    return PartitionSpec(None, partition[1], None, None)


def _pass_on(maps: Float[Array, "pieces k n p+n"]) -> Float[Array, "pieces k n p"]:
    """Passes states from piece to piece, and returns those that come in."""
    width = maps.shape[-1] - maps.shape[-2]

    def through(state: Array, one: Array) -> tuple[Array, Array]:
        # HIGHEST: TF32 would round the state again at each piece.
        kept = jnp.einsum("knm,kmp->knp", one[..., width:], state, precision=lax.Precision.HIGHEST)
        state = one[..., :width] + kept
        return state, state

    first = maps[0, ..., :width]
    # What the last piece leaves goes nowhere; the first piece receives zeros.
    _, others = lax.scan(through, first, maps[1:-1])
    return jnp.concatenate([jnp.zeros_like(first)[None], first[None], others])


def _by_heads(axes: Axes, local: Float[Array, "2b u h n m"]) -> Float[Array, "pieces k n m"]:
    """Exchanges arrays of this rank's two pieces for those of all pieces, in order, of its k of the b u h heads."""
    ranks, (n, m) = lax.axis_size(axes), local.shape[-2:]
    heads = jnp.moveaxis(local.reshape(-1, 2, *local.shape[1:]), 1, 0).reshape(2, -1, n, m)
    # Heads of zeros fill up a number that the ranks do not divide.
    heads = jnp.pad(heads, [(0, 0), (0, -heads.shape[1] % ranks), (0, 0), (0, 0)])
    sent = jnp.moveaxis(heads.reshape(2, ranks, -1, n, m), 1, 0)
    every = lax.all_to_all(sent, axes, 0, 0)
    return jnp.concatenate([every[:, 0], jnp.flip(every[:, 1], 0)])


def _by_pieces(
    axes: Axes, ordered: Float[Array, "pieces k n m"], like: Float[Array, "2b u h ..."]
) -> Float[Array, "2b u h n m"]:
    """Exchanges arrays back: the reverse of `_by_heads`, for heads like those of an array."""
    ranks, (n, m), (both, groups, heads) = lax.axis_size(axes), ordered.shape[-2:], like.shape[:3]
    sent = jnp.stack([ordered[:ranks], jnp.flip(ordered[ranks:], 0)], 1)
    local = jnp.moveaxis(lax.all_to_all(sent, axes, 0, 0), 1, 0).reshape(2, -1, n, m)[:, : both // 2 * groups * heads]
    return jnp.moveaxis(local.reshape(2, both // 2, groups, heads, n, m), 0, 1).reshape(both, groups, heads, n, m)
