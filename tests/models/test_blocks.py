"""Blocks of attention where ranks share samples: the kernels alone, against their definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.models.kernels import blocks
from mtjax.models.kernels.blocks import CudnnBlocks, XlaBlocks
from mtjax.sharding.context.block_attention import KVBlock, QueryBlock
from tests.sharding.test_flash import stand_in_for

WIDTH, SCALE = 16, 16**-0.5


def arrays(queries, keys):
    random = np.random.default_rng(0)
    shapes = [(2, queries, 4, WIDTH), (2, keys, 2, WIDTH), (2, keys, 2, WIDTH)]
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def defined(causal, query, key, value):
    """Output and log-sums, by the definition; where causal, keys stand where queries do."""
    key, value = (jnp.repeat(a, 2, axis=2) for a in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * SCALE
    if causal:
        scores = jnp.where(np.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    sums = jax.nn.logsumexp(scores, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - sums[..., None]), value), sums.swapaxes(1, 2)


def places(length):
    return jnp.broadcast_to(jnp.arange(length), (2, length))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kernel", ["xla", "xla, 4 queries at a time", "cudnn"])
def test_a_block_and_what_it_adds_to_gradients_of_entire_rows(kernel, causal, monkeypatch):
    """Keys are in two blocks, of which rows see both: gradients of both together are those of attention to all."""
    if kernel != "xla":
        monkeypatch.setattr(blocks, "QUERIES_AT_A_TIME", 4)
    made = CudnnBlocks(SCALE, stand_in_for) if kernel == "cudnn" else XlaBlocks(SCALE)
    query, key, value = arrays(12, 12 if causal else 20)
    halves = [slice(0, None)] if causal else [slice(0, 8), slice(8, None)]
    gradient = np.random.default_rng(1).normal(size=query.shape).astype(np.float32)

    @jax.jit
    def both(query, key, value, gradient):
        (mixed, log_sums), pull = jax.vjp(partial(defined, causal), query, key, value)
        rows = QueryBlock(query, places(12), mixed=mixed, log_sums=log_sums, gradient=gradient)
        forward, backward = [], []
        for half in halves:
            keys = KVBlock(key[:, half], value[:, half], places(key.shape[1])[:, half])
            own = made.forward(QueryBlock(query, places(12)), keys, None, causal)
            forward.append((own, defined(causal, query, keys.key, keys.value)))
            backward.append(made.backward(rows, keys, None, causal))
        return forward, backward, pull((gradient, jnp.zeros_like(log_sums)))

    forward, backward, known = both(query, key, value, gradient)
    for own, expected in forward:
        for mine, theirs in zip(own, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-6)
    of_queries, of_keys, of_values = zip(*backward, strict=True)
    join = partial(np.concatenate, axis=1)
    for mine, theirs in zip((sum(of_queries), join(of_keys), join(of_values)), known, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
