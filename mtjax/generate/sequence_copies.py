"""Programs that copy a sequence of a cache to another slot, and take and restore its recurrent states."""

from functools import partial

import jax
from jax import Array, lax

from mtjax.generate.caches import Cache
from mtjax.models.recurrent_state import RecurrentState

States = list[tuple[Array, Array]]
"""Inputs of the convolution, and float32 state, of each layer with a recurrent state."""


@partial(jax.jit, donate_argnums=0)
def copied(cache: Cache, source: Array, target: Array) -> Cache:
    """Copies what all layers keep of a sequence to another slot; the cache is donated."""
    return jax.tree.map(lambda rows: rows.at[target].set(rows[source]), cache)


@jax.jit
def taken(states: States, sequence: Array) -> States:
    """Returns copies of a sequence's recurrent states, [1, ...] each."""
    return jax.tree.map(lambda rows: lax.dynamic_index_in_dim(rows, sequence, keepdims=True), states)


@partial(jax.jit, donate_argnums=0)
def restored(states: States, snapshot: States, sequence: Array) -> States:
    """Replaces a sequence's recurrent states by those of `taken`; the former states of all sequences are donated."""
    # The snapshot is not donated: further prompts begin from it.
    return jax.tree.map(lambda rows, row: rows.at[sequence].set(row[0]), states, snapshot)


def recurrent_states(cache: Cache) -> States:
    """Returns the recurrent states of all layers that have one, of all sequences."""
    # Without the static capacity, which `taken` and `restored` would be compiled for.
    return [
        (state.taps, state.state) for layer in cache for state in layer.values() if isinstance(state, RecurrentState)
    ]


def with_recurrent_states(cache: Cache, states: States) -> Cache:
    """Returns a cache with other recurrent states, in the order of `recurrent_states`."""
    rest = iter(states)
    return [
        {name: state.of(*next(rest)) if isinstance(state, RecurrentState) else state for name, state in layer.items()}
        for layer in cache
    ]
