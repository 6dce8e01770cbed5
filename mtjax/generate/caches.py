"""What a model keeps of each sequence in generation: KV caches of attention, recurrent states."""

from functools import partial
from typing import Any, Literal

import jax

from mtjax.config import Model
from mtjax.config.sizes import attention_windows, decoder_layers, longest_text
from mtjax.config.ssm import ATTENTION, DELTA, RECURRENT, letters_of
from mtjax.models.kv_cache import empty_caches

Cache = list[dict[str, Any]]
"""For each layer, the caches of its mixers by name."""


def empty_cache(
    model: Model,
    sequences: int,
    length: int,
    dtype: jax.typing.DTypeLike,
    *,
    reads_encoder: bool = False,
    stored: Literal["int8", "fp8"] | None = None,
) -> Cache:
    """Builds the caches of all layers, for `length` tokens of each sequence; cross-attention's with `reads_encoder`,
    and keys and values in the 8 bits of `stored`, if given."""
    attention = partial(empty_caches, model, sequences, length, dtype, reads_encoder=reads_encoder, stored=stored)
    windows = attention_windows(model) or (longest_text(model),) * decoder_layers(model)
    # A window that no sequence exceeds is none.
    shorter = [window if window < longest_text(model) else None for window in windows[: decoder_layers(model)]]
    letters = letters_of(model)
    if not letters:
        return [attention(window=window) for window in shorter]
    from mtjax.models.recurrent_state import RecurrentState

    def of_layer(letter: str, window: int | None) -> dict[str, Any]:
        state = RecurrentState.empty(model, sequences, length, dtype) if letter in RECURRENT else None
        return {
            **({} if state is None else {"delta" if letter in DELTA else "mamba": state}),
            **(attention(window=window) if letter in ATTENTION else {}),
        }

    return [of_layer(letter, window) for letter, window in zip(letters, shorter, strict=True)]


def cache_length(cache: Cache) -> int:
    """Returns the number of tokens for which the cache has space in each sequence."""
    # All layers have the same capacity, those with a window too, although they keep fewer tokens.
    return next((state.length for layer in cache for state in layer.values()), NO_LIMIT)


NO_LIMIT = 2**30
"""Tokens of a sequence of which no layer keeps anything."""


def keeps_prefix(cache: Cache, written: int, shared: int) -> bool:
    """Returns whether a sequence can be continued from its first `shared` tokens in all layers, after `written` tokens
    were written to it."""
    states = (state for layer in cache for state in layer.values())
    # Only windows overwrite tokens. Recurrent states keep no prefix either, but `PrefixCache` restores them from
    # snapshots.
    return all(state.keeps_prefix(written, shared) for state in states if hasattr(state, "keeps_prefix"))
