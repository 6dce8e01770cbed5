"""Ring attention: context parallel attention to the keys of all ranks; runs where all mesh axes are manual.

In ring step r, a rank's queries attend to the keys of the rank r positions before it.

Ring (arXiv 2310.01889): collective-permutes send keys and values to the next rank while a step computes; in the
backward pass their gradients are sent along, and reach the keys' rank after the last step. All-gather: each rank
gathers all keys and values at once.

Without a causal mask, each step computes all pairs of chunks. With one, samples are sharded in zig-zag order
(`mtjax.sharding.context.zigzag`): each rank has an early and a late chunk. Of the four pairs of its chunks and another
rank's, two are visible, whatever the ranks: (late, early) always; and (early, early) if the other rank is before it,
else (late, late). So every step is the same two unmasked blocks: no branch, no mask, and equal work for all ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.layout.attention_kernel import HIDDEN_SCORE
from mtjax.sharding.context.block_attention import BlockKernel, DropoutState, KVBlock, QueryBlock
from mtjax.sharding.context.zigzag import rank_positions

Tree = Any
T = TypeVar("T")
Method = Literal["ring", "all-gather"]
RingStep = Callable[[Tree, KVBlock, Array], Tree]
"""(state, another rank's keys, that rank) -> state."""


@dataclass(frozen=True)
class RingAttention:
    """The ring steps of a rank."""

    kernel: BlockKernel
    method: Method
    is_causal: bool
    axis: str
    """The mesh axis of context parallelism."""
    rank: Array
    """This rank's index along it."""
    dropout: DropoutState | None

    @property
    def degree(self) -> int:
        """Context parallel degree."""
        return lax.axis_size(self.axis)

    def forward(self, queries: QueryBlock, keys: KVBlock) -> tuple[Array, Array]:
        """Computes the output [batch, seq, heads, head_dim] and float32 log-sums [batch, seq, heads] of entire rows."""
        # Step 0: this rank's keys. Its chunks are in the order of positions, so the causal mask is the usual one.
        mixed, log_sums = self.kernel.forward(queries, keys, self.dropout, self.is_causal)

        def step(state: Tree, keys: KVBlock, other: Array) -> Tree:
            """Merges the attention to another rank's keys into (output, log-sums)."""
            if not self.is_causal:
                return _merge(state, *self.kernel.forward(queries, keys, self.dropout, False))
            is_before = other < self.rank
            pairs = _query_pairs(is_before, queries), _key_pairs(is_before, keys)
            return _merge_pairs(is_before, state, self.kernel.forward(*pairs, self.dropout, False))

        # Outputs are merged in float32, and cast once.
        state = (mixed.astype(jnp.float32), log_sums)
        mixed, log_sums = self._run_steps(keys, state, step)
        return mixed.astype(queries.query.dtype), log_sums

    def backward(self, queries: QueryBlock, keys: KVBlock) -> tuple[Array, Array, Array]:
        """Computes the gradients of the rank's query, key and value.

        Args:
          queries: this rank's, with `mixed`, `log_sums` and `gradient`.
          keys: this rank's.

        Returns:
          [batch, seq, heads, head_dim], and twice [batch, seq, groups, head_dim].
        """
        # Sums over all ranks' blocks are float32, whatever the type of the kernel's gradients.
        query_grad, *local_grads = _float32(self.kernel.backward(queries, keys, self.dropout, self.is_causal))
        gathers, rank = self.method == "all-gather", self.rank

        def step(state: Tree, keys: KVBlock, other: Array) -> Tree:
            """Adds the contributions of another rank's keys to (query gradient, [key, value gradients])."""
            query_grad, kv_grads = state
            added, *added_kv = self._backward_step(queries, keys, other)
            if gathers:
                kv_grads = [total.at[other].add(a) for total, a in zip(kv_grads, added_kv, strict=True)]
            else:
                kv_grads = [total + a for total, a in zip(kv_grads, added_kv, strict=True)]
            return query_grad + added, kv_grads

        if gathers:
            # Gradients of all ranks' keys, [ranks, ...], reduce-scattered at the end.
            local_grads = [jnp.zeros_like(a, shape=(self.degree, *a.shape)).at[rank].set(a) for a in local_grads]
            query_grad, kv_grads = self._run_steps(keys, (query_grad, local_grads), step)
            kv_grads = [lax.psum_scatter(a, self.axis) for a in kv_grads]
            kv_grads = [a.astype(keys.key.dtype) for a in kv_grads]
        else:
            # Gradients are sent along with their keys; after the last step, once more, to the keys' rank.
            send_grads = lambda state: (state[0], self._send(state[1]))  # noqa: E731
            query_grad, kv_grads = self._run_steps(keys, (query_grad, local_grads), step, send_grads)
            kv_grads = self._send([a.astype(keys.key.dtype) for a in kv_grads])  # half the bytes of float32
        return query_grad.astype(queries.query.dtype), kv_grads[0], kv_grads[1]

    def _backward_step(self, queries: QueryBlock, keys: KVBlock, other: Array) -> list[Array]:
        """Computes the contribution of another rank's keys to the gradients of query, and of these keys and values.

        Args:
          queries: this rank's.
          keys: of rank `other`.
          other: int32 [].

        Returns:
          float32 [batch, seq, heads, head_dim], and twice [batch, seq, groups, head_dim].
        """
        if not self.is_causal:
            return _float32(self.kernel.backward(queries, keys, self.dropout, False))
        is_before = other < self.rank
        pairs = _query_pairs(is_before, queries), _key_pairs(is_before, keys)
        query_grad, *kv_grads = _float32(self.kernel.backward(*pairs, self.dropout, False))
        return [_sum_query_pairs(is_before, query_grad), *(_sum_key_pairs(is_before, a) for a in kv_grads)]

    def _run_steps(
        self, local: KVBlock, state: T, step: RingStep, between: Callable[[T], T] = lambda state: state
    ) -> T:
        """Runs the ring steps with the keys of all other ranks.

        Args:
          local: this rank's keys.
          state: before the first step.
          step: one ring step.
          between: applied to the state before each step of a ring, while the next keys are in flight.

        Returns:
          The state after the last step.
        """
        degree, rank = self.degree, self.rank
        sent = local._replace(positions=None)  # they follow from the rank  # pyright: ignore[reportArgumentType]

        def one(state: T, keys: Tree, other: Array) -> T:
            """Runs a step with the keys of rank `other`, after computing their positions."""
            length = local.positions.shape[1] * degree
            positions = jnp.broadcast_to(rank_positions(other, degree, length), local.positions.shape)
            return step(state, keys._replace(positions=positions), other)

        # XLA: it would move all sends of unrolled steps before their computation, so the steps are a `lax.scan`.
        if self.method == "all-gather":
            gathered = jax.tree.map(lambda a: lax.all_gather(a, self.axis), sent)

            def gather_step(state: T, r: Array) -> tuple[T, None]:
                other = (rank - r) % degree
                return one(
                    state, jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, other, 0, False), gathered), other
                ), None

            return lax.scan(gather_step, state, jnp.arange(1, degree))[0]

        def ring_step(carry: tuple[T, Tree], r: Array) -> tuple[tuple[T, Tree], None]:
            state, keys = carry
            # Does not depend on this step's computation, so both overlap.
            following = self._send(keys)
            return (one(between(state), keys, (rank - r) % degree), following), None

        keys = self._send(sent)
        if degree > 2:
            (state, keys), _ = lax.scan(ring_step, (state, keys), jnp.arange(1, degree - 1))
        # The last step sends no keys: those of the next rank have arrived, after degree - 1 sends.
        return one(between(state), keys, (rank + 1) % degree)

    def _send(self, tree: T) -> T:
        """Sends arrays to the next rank, by a collective-permute each, and returns those of the rank before."""
        ring = [(i, (i + 1) % self.degree) for i in range(self.degree)]
        return jax.tree.map(lambda a: lax.ppermute(a, self.axis, ring), tree)


# --- The two pairs of chunks that a causal mask leaves of a rank's queries and another rank's keys, concatenated along
# the batch: (late, early), and (early, early) if the other rank `is_before` this one, else (late, late). Along the
# sequence, [early, late] are the two halves of a rank's tokens.


def _query_pairs(is_before: Array, queries: QueryBlock) -> QueryBlock:
    """Returns the queries of both pairs: [batch, seq, ...] -> [2 batch, seq / 2, ...]."""
    return jax.tree.map(lambda a: _pair(a, lambda early, late: (late, jnp.where(is_before, early, late))), queries)


def _key_pairs(is_before: Array, keys: KVBlock) -> KVBlock:
    """Returns the keys of both pairs: [batch, seq, ...] -> [2 batch, seq / 2, ...]."""
    return jax.tree.map(lambda a: _pair(a, lambda early, late: (early, jnp.where(is_before, early, late))), keys)


def _pair(a: Array, choose: Callable[[Array, Array], tuple[Array, Array]]) -> Array:
    return jnp.concatenate(choose(*jnp.split(a, 2, axis=1)))


def _sum_query_pairs(is_before: Array, pairs: Array) -> Array:
    """Adds up gradients of `_query_pairs`: [2 batch, seq / 2, ...] -> [batch, seq, ...]."""
    # Where the other rank is after this one, the late queries are in both pairs.
    late, other = jnp.split(pairs, 2)
    return jnp.concatenate([jnp.where(is_before, other, 0), late + jnp.where(is_before, 0, other)], axis=1)


def _sum_key_pairs(is_before: Array, pairs: Array) -> Array:
    """Adds up gradients of `_key_pairs`: [2 batch, seq / 2, ...] -> [batch, seq, ...]."""
    # Where the other rank is before this one, the early keys are in both pairs.
    early, other = jnp.split(pairs, 2)
    return jnp.concatenate([early + jnp.where(is_before, other, 0), jnp.where(is_before, 0, other)], axis=1)


def _merge_pairs(is_before: Array, total: Tree, pairs: tuple[Array, Array]) -> Tree:
    """Merges the output and log-sums of both pairs into those of the rank's queries.

    Args:
      is_before: whether the second pair is (early, early).
      total: output [batch, seq, heads, head_dim] and log-sums [batch, seq, heads] so far.
      pairs: the same of the pairs, [2 batch, seq / 2, ...].
    """
    (late, other), (late_sums, other_sums) = (jnp.split(a, 2) for a in pairs)
    none = jnp.full_like(late_sums, HIDDEN_SCORE)
    # A log-sum of HIDDEN_SCORE makes a half count for nothing. First [second pair if early, first pair], then [-,
    # second pair if late].
    early_sums = jnp.where(is_before, other_sums, HIDDEN_SCORE)
    total = _merge(total, jnp.concatenate([other, late], 1), jnp.concatenate([early_sums, late_sums], 1))
    second_sums = jnp.where(is_before, HIDDEN_SCORE, other_sums)
    return _merge(total, jnp.concatenate([other, other], 1), jnp.concatenate([none, second_sums], 1))


def _merge(total: Tree, mixed: Array, log_sums: Array) -> Tree:
    """Merges the outputs of two blocks of keys: `o = o1 exp(l1 - l) + o2 exp(l2 - l)`, `l = log(exp l1 + exp l2)`."""
    # Both weights are at most 1, as `sums` is at least each log-sum: nothing overflows. Where a block is hidden, its
    # log-sum is about HIDDEN_SCORE, and its weight exactly 0.
    before, sums_before = total
    sums = jnp.logaddexp(sums_before, log_sums)
    weight = lambda of_block: jnp.exp(of_block - sums)[..., None]  # noqa: E731
    return before * weight(sums_before) + mixed * weight(log_sums), sums


def _float32(gradients: tuple[Array, ...]) -> list[Array]:
    return [a.astype(jnp.float32) for a in gradients]
