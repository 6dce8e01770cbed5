"""The convolution of layers with a recurrent state, with gradients of our own, against JAX's depthwise convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from mtjax.models.kernels.convolution import causal_convolution

TAPS, GROUPS, CHANNELS = 4, 2, 3


def depthwise(seen: Array, weights: Array, bias: Array) -> Array:
    """SiLU of what each token reads of the taps - 1 tokens before it; `seen` begins with them."""
    flat, width = seen.reshape(*seen.shape[:2], -1), GROUPS * CHANNELS
    kernel, layout = weights.reshape(TAPS, 1, width), ("NWC", "WIO", "NWC")
    out = lax.conv_general_dilated(flat, kernel, (1,), "VALID", dimension_numbers=layout, feature_group_count=width)
    return jax.nn.silu(out.reshape(*out.shape[:2], GROUPS, CHANNELS) + bias)


def documents_alone(mixed: Array, weights: Array, bias: Array, before: Array) -> Array:
    """Of a sample of two documents, the first of which began in the tokens before."""
    nothing = jnp.zeros_like(before)
    first, second = mixed[:, :5], mixed[:, 5:]
    parts = [(before, first), (nothing, second)]
    return jnp.concatenate([depthwise(jnp.concatenate(part, 1), weights, bias) for part in parts], 1)


def one_document(mixed: Array, weights: Array, bias: Array, before: Array) -> Array:
    return depthwise(jnp.concatenate([before, mixed], 1), weights, bias)


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_are_those_of_a_depthwise_convolution(is_packed: bool) -> None:
    random = np.random.default_rng(0)
    tokens, shape = 9, (GROUPS, CHANNELS)
    sizes = ((2, tokens, *shape), (TAPS, *shape), shape, (2, TAPS - 1, *shape))
    inputs = [jnp.asarray(random.normal(size=size), jnp.float32) for size in sizes]
    segments = jnp.asarray([[0] * (TAPS - 1 + 5) + [1] * (tokens - 5)] * 2) if is_packed else None
    upstream = random.normal(size=sizes[0])

    def value(convolution, *inputs: Array) -> Array:
        return (convolution(*inputs) * upstream).sum()

    ours = jax.jit(
        jax.value_and_grad(
            lambda *given: value(lambda m, w, b, s: causal_convolution(m, w, b, s, segments), *given), range(4)
        )
    )
    other = documents_alone if is_packed else one_document
    expected = jax.jit(jax.value_and_grad(lambda *given: value(other, *given), range(4)))
    for got, right in zip(jax.tree.leaves(ours(*inputs)), jax.tree.leaves(expected(*inputs)), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
