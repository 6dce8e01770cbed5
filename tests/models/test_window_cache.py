"""The cache of a layer with a window, against numpy's attention to whole texts, in float64 and beyond the window."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import reshard

from mtjax.layout.layouts import TENSOR
from mtjax.models.alibi import Alibi
from mtjax.models.kernels.cached import attend_cached
from mtjax.models.kernels.xla import HEADS as HEADS_OF_TOKENS
from mtjax.models.kernels.xla import AttentionOptions
from mtjax.models.kv_cache import CachePositions, WindowKVCache
from mtjax.sharding.axes import spec, use_rules
from tests.tiny import mesh_of

HEADS, WIDTH, TOKENS, LENGTH = 3, 4, 61, 64


def expected(query: np.ndarray, key: np.ndarray, value: np.ndarray, window: int, slopes: Any) -> np.ndarray:
    """[tokens, heads, width] of one sequence: each token attends to itself and the window - 1 before it."""
    scores = np.einsum("qhd,khd->hqk", query, key) * WIDTH**-0.5
    distance = np.arange(TOKENS)[:, None] - np.arange(TOKENS)
    scores = scores if slopes is None else scores - np.asarray(slopes)[:, None, None] * distance
    scores = np.where((distance >= 0) & (distance < window), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.parametrize(("window", "has_alibi"), [(1, False), (5, True), (23, False)])
def test_chunks_and_single_tokens_attend_as_the_whole_text_does(window: int, has_alibi: bool) -> None:
    """Two sequences of three, chunk by chunk with padding, then token by token; the third is never active."""
    random, chunks = np.random.default_rng(window), (7, 16, 1, 11)
    alibi = Alibi((0.5, 0.25, 0.125)) if has_alibi else None
    options = AttentionOptions(0.0, None, None, alibi=alibi, window=window)
    with jax.enable_x64(True), jax.set_mesh(mesh_of("1x1")), use_rules(TENSOR.rules.with_replicated_activations):
        query, key, value = random.normal(size=(3, 3, TOKENS, HEADS, WIDTH))
        cache = WindowKVCache.empty(3, HEADS, 8, WIDTH, jnp.float64, window).resized(LENGTH)
        assert cache.keys.shape[2] == cache.slots == window
        found = np.zeros((3, TOKENS, HEADS, WIDTH))

        @jax.jit
        def attend(cache: WindowKVCache, new: Any, *places: Any) -> tuple[WindowKVCache, Any]:
            new, positions = [reshard(a, spec(*HEADS_OF_TOKENS)) for a in new], CachePositions(*places)
            cache, keys, values, at = cache.extended(new[1], new[2], positions)
            return cache, attend_cached(new[0], keys, values, at, positions, options)

        starts = [0, 0]
        for number, sequence in ((0, 1), (0, 0), (1, 1), (2, 0), (3, 1), (1, 0)):
            start, count = starts[sequence], chunks[number]
            length = {7: 8, 16: 16, 1: 4, 11: 16}[count]
            new = random.normal(size=(3, 1, length, HEADS, WIDTH))
            for array, whole in zip(new, (query, key, value), strict=True):
                array[0, :count] = whole[sequence, start : start + count]
            places = (start + jnp.arange(length))[None], jnp.int32(sequence), jnp.int32(count)
            cache, mixed = attend(cache, new, *places)
            found[sequence, start : start + count] = mixed[0, :count]
            starts[sequence] += count
        while min(starts) < TOKENS:
            active = np.array([start < TOKENS for start in starts] + [False])
            at = np.minimum([*starts, 0], TOKENS - 1)
            new = np.stack([whole[np.arange(3), at][:, None] for whole in (query, key, value)])
            cache, mixed = attend(cache, new, jnp.where(active, at, LENGTH)[:, None])
            for sequence in np.flatnonzero(active):
                found[sequence, at[sequence]] = mixed[sequence, 0]
                starts[sequence] += 1
    for sequence in range(2):
        ours = expected(query[sequence], key[sequence], value[sequence], window, alibi and alibi.slopes)
        np.testing.assert_allclose(found[sequence], ours, atol=1e-6)  # scores are float32
