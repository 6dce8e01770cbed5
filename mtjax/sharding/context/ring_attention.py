"""Attention to the keys of all ranks that share samples, in turns; where all mesh axes are manual.

In turn r, a rank's queries meet the keys of the rank r places before it.

Ring: keys and values go from rank to rank while a turn computes, and so do their gradients, back to where they belong
in the end (arXiv 2310.01889). Gather: each rank has all keys and values at once.

Where tokens attend to all others, a turn computes all that there is. Because of how samples are cut
(`mtjax.sharding.context.zigzag`), a rank with causal queries and the keys of another has
two of four pairs of chunks to compute, whatever the ranks: its second chunk sees the other's first; and its first chunk
does too where the other rank stands before it, else its second chunk sees the other's second. No branch, no mask, and
all ranks compute as much.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.context.block_attention import NEVER, BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.context.zigzag import rank_positions

Tree = Any
T = TypeVar("T")
Method = Literal["ring", "all-gather"]
Turn = Callable[[Tree, KVBlock, Array], Tree]
"""(state, another rank's keys, its number) -> state."""


@dataclass(frozen=True)
class RingAttention:
    """The turns of a rank."""

    kernel: BlockKernel
    method: Method
    is_causal: bool
    axis: str
    """The mesh axis whose ranks share samples."""
    rank: Array
    """This one's number."""
    drops: DropoutState | None

    @property
    def ways(self) -> int:
        """Ranks that share samples."""
        return lax.axis_size(self.axis)

    def forward(self, queries: QueryBlock, keys: KVBlock) -> tuple[Array, Array]:
        """Output, and float32 log-sums, of entire rows."""
        mixed, log_sums = self.kernel.forward(queries, keys, self.drops, self.is_causal)

        def turn(state: Tree, keys: KVBlock, other: Array) -> Tree:
            if not self.is_causal:
                return _merge(state, *self.kernel.forward(queries, keys, self.drops, False))
            before = other < self.rank
            pairs = _pairs(before, queries), _pairs_of_keys(before, keys)
            return _merge_pairs(before, state, self.kernel.forward(*pairs, self.drops, False))

        state = (mixed.astype(jnp.float32), log_sums)
        mixed, log_sums = self._take(keys, state, turn)
        return mixed.astype(queries.query.dtype), log_sums

    def backward(self, queries: QueryBlock, keys: KVBlock) -> tuple[Array, Array, Array]:
        """Gradients of the rank's queries, keys and values."""
        of_queries, *own = _wide(self.kernel.backward(queries, keys, self.drops, self.is_causal))
        gathers, place = self.method == "all-gather", self.rank

        def turn(state: Tree, keys: KVBlock, other: Array) -> Tree:
            of_queries, of_keys = state
            more, *others = self._backward_of_others(queries, keys, other)
            if gathers:
                of_keys = [total.at[other].add(a) for total, a in zip(of_keys, others, strict=True)]
            else:
                of_keys = [total + a for total, a in zip(of_keys, others, strict=True)]
            return of_queries + more, of_keys

        if gathers:
            own = [jnp.zeros_like(a, shape=(self.ways, *a.shape)).at[place].set(a) for a in own]
            of_queries, of_keys = self._take(keys, (of_queries, own), turn)
            of_keys = [lax.psum_scatter(a, self.axis) for a in of_keys]
            of_keys = [a.astype(keys.key.dtype) for a in of_keys]
        else:
            of_queries, of_keys = self._take(keys, (of_queries, own), turn, lambda s: (s[0], self._send(s[1])))
            of_keys = self._send([a.astype(keys.key.dtype) for a in of_keys])  # home: half the bytes of float32
        return of_queries.astype(queries.query.dtype), of_keys[0], of_keys[1]

    def _backward_of_others(self, queries: QueryBlock, keys: KVBlock, other: Array) -> list[Array]:
        """What the keys of another rank add to the gradients of queries, and of these keys and their values."""
        if not self.is_causal:
            return _wide(self.kernel.backward(queries, keys, self.drops, False))
        before = other < self.rank
        pairs = _pairs(before, queries), _pairs_of_keys(before, keys)
        of_queries, *of_keys = _wide(self.kernel.backward(*pairs, self.drops, False))
        return [_back_to_queries(before, of_queries), *(_back_to_keys(before, a) for a in of_keys)]

    def _take(self, mine: KVBlock, state: T, turn: Turn, between: Callable[[T], T] = lambda state: state) -> T:
        """The turns with the keys of all others; the loop is kept, or XLA would send everything before it computes.

        Args:
          mine: this rank's keys.
          state: of the first turn.
          turn: one of them.
          between: what happens to the state before each turn of a ring, while its keys are on their way.
        """
        ways, rank = self.ways, self.rank
        moving = mine._replace(positions=None)  # which follow from the rank  # pyright: ignore[reportArgumentType]

        def one(state: T, keys: Tree, other: Array) -> T:
            length = mine.positions.shape[1] * ways
            places = jnp.broadcast_to(rank_positions(other, ways, length), mine.positions.shape)
            return turn(state, keys._replace(positions=places), other)

        if self.method == "all-gather":
            every = jax.tree.map(lambda a: lax.all_gather(a, self.axis), moving)

            def read(state: T, r: Array) -> tuple[T, None]:
                other = (rank - r) % ways
                return one(
                    state, jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, other, 0, False), every), other
                ), None

            return lax.scan(read, state, jnp.arange(1, ways))[0]

        def pass_on(carry: tuple[T, Tree], r: Array) -> tuple[tuple[T, Tree], None]:
            state, keys = carry
            following = self._send(keys)
            return (one(between(state), keys, (rank - r) % ways), following), None

        keys = self._send(moving)
        if ways > 2:
            (state, keys), _ = lax.scan(pass_on, (state, keys), jnp.arange(1, ways - 1))
        return one(between(state), keys, (rank + 1) % ways)

    def _send(self, tree: T) -> T:
        """To the next rank."""
        ring = [(i, (i + 1) % self.ways) for i in range(self.ways)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis, ring), tree)


# --- the two pairs of chunks that causality leaves of a rank's queries and another's keys, one behind the other along
# the batch: (second, first), and (first, first) or (second, second)


def _pairs(before: Array, queries: QueryBlock) -> QueryBlock:
    return jax.tree.map(lambda a: _both(a, lambda first, second: (second, jnp.where(before, first, second))), queries)


def _pairs_of_keys(before: Array, keys: KVBlock) -> KVBlock:
    return jax.tree.map(lambda a: _both(a, lambda first, second: (first, jnp.where(before, first, second))), keys)


def _both(a: Array, choose: Callable[[Array, Array], tuple[Array, Array]]) -> Array:
    return jnp.concatenate(choose(*jnp.split(a, 2, axis=1)))


def _back_to_queries(before: Array, pairs: Array) -> Array:
    """What `_pairs` made two of, added up where it came from."""
    always, other = jnp.split(pairs, 2)
    return jnp.concatenate([jnp.where(before, other, 0), always + jnp.where(before, 0, other)], axis=1)


def _back_to_keys(before: Array, pairs: Array) -> Array:
    always, other = jnp.split(pairs, 2)
    return jnp.concatenate([always + jnp.where(before, other, 0), jnp.where(before, 0, other)], axis=1)


def _merge_pairs(before: Array, total: Tree, pairs: tuple[Array, Array]) -> Tree:
    """Output and log-sums with those of the two pairs."""
    (always, other), (always_sums, other_sums) = (jnp.split(a, 2) for a in pairs)
    none = jnp.full_like(always_sums, NEVER)
    first = jnp.where(before, other_sums, NEVER)
    total = _merge(total, jnp.concatenate([other, always], 1), jnp.concatenate([first, always_sums], 1))
    second = jnp.where(before, NEVER, other_sums)
    return _merge(total, jnp.concatenate([other, other], 1), jnp.concatenate([none, second], 1))


def _merge(total: Tree, mixed: Array, log_sums: Array) -> Tree:
    """The softmax over the keys of two blocks, from that over each."""
    before, sums_before = total
    sums = jnp.logaddexp(sums_before, log_sums)
    share = lambda part: jnp.exp(part - sums)[..., None]  # noqa: E731
    return before * share(sums_before) + mixed * share(log_sums), sums


def _wide(gradients: tuple[Array, ...]) -> list[Array]:
    return [a.astype(jnp.float32) for a in gradients]
