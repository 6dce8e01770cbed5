"""GELU and the norms, whose gradients are written by hand, beside numpy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.models.activations import ACTIVATIONS
from mtjax.models.norms import HeadNorm, LayerNorm, RMSNorm
from mtjax.sharding.axes import use_rules
from mtjax.theory.layout import TENSOR
from tests.tiny import mesh_of

STEP = 1e-5
"""Of the differences that stand for derivatives."""


def close(found: jax.Array, known: np.ndarray) -> None:
    """To one rounding of the largest number; float32 is given some more."""
    error = 3e-7 * 8 if found.dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), known, rtol=error, atol=error * np.abs(known).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gelu", "gelu_exact"])
def test_gelu_and_its_slope(name, dtype):
    def known(x: np.ndarray) -> np.ndarray:
        if name == "gelu_exact":
            return 0.5 * x * np.array([math.erfc(-one / math.sqrt(2)) for one in x])
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = jnp.linspace(-8, 8, 4001).astype(dtype)
    value, pull = jax.vjp(ACTIVATIONS[name], x)
    (slope,) = pull(jnp.ones_like(x))
    exact = np.asarray(x, np.float64)
    close(value, known(exact))
    close(slope, (known(exact + STEP) - known(exact - STEP)) / (2 * STEP))
    assert value.dtype == slope.dtype == x.dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm", "HeadNorm"])
def test_norms_and_their_gradients(kind, dtype):
    random, size = np.random.default_rng(0), 24
    x, weights = random.normal(1, 3, (4, 5, size)), random.normal(size=(4, 5, size))
    scale, bias = random.normal(size=size), random.normal(size=size)
    is_centred = kind == "LayerNorm"

    def exact(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True) if is_centred else x
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale
        return normal + bias if is_centred else normal

    def slope(at: np.ndarray, of: str) -> np.ndarray:
        """Of the weighted sum, number by number."""
        found = np.zeros_like(at)
        for place in np.ndindex(at.shape):
            shift = np.zeros_like(at)
            shift[place] = STEP
            up, down = (exact(x + s, scale) if of == "x" else exact(x, scale + s) for s in (shift, -shift))
            found[place] = ((up - down) * weights).sum() / (2 * STEP)
        return found

    def run(x: jax.Array, scale: jax.Array) -> jax.Array:
        made = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
        norm = HeadNorm(size, 1e-5) if kind == "HeadNorm" else made[kind](size, 1e-5, dtype)
        norm.scale.set_value(scale)
        if isinstance(norm, LayerNorm):
            norm.bias.set_value(jnp.asarray(bias, jnp.float32))
        return norm(x)

    rounded = jnp.asarray(x, dtype)
    x, weights = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (x, weights))
    with jax.set_mesh(mesh_of("1x1")), use_rules(TENSOR.rules):
        value, pull = jax.vjp(run, rounded, jnp.asarray(scale, jnp.float32))
        by_x, by_scale = pull(jnp.asarray(weights, dtype))
    close(value, exact(x, scale))
    close(by_x, slope(x, "x"))
    assert by_scale.dtype == jnp.float32
    close(by_scale, slope(scale, "scale"))
