"""Activations and norms, some with gradients written by hand, beside numpy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import Model
from mtjax.layout.layouts import TENSOR
from mtjax.models.head_norm import HeadNorm
from mtjax.models.ops import LayerNorm, activation_of
from mtjax.models.rms_norm import RMSNorm
from mtjax.sharding.axes import use_rules
from tests.tiny import mesh_of

KNOWN = {
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * np.array([math.erfc(-one / math.sqrt(2)) for one in x]),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
    "geglu_exact": lambda gate, up: KNOWN["gelu_exact"](gate) * up,
    "swiglu_clamped": lambda gate, up: (
        (np.clip(up, -7, 7) + 1) * np.minimum(gate, 7) / (1 + np.exp(-1.702 * np.minimum(gate, 7)))
    ),
}
STEP = 1e-5
"""Of the differences that stand for derivatives."""


def close(found: jax.Array, known: np.ndarray) -> None:
    """To one rounding of the largest number; float32 is given some more."""
    error = 3e-7 * 8 if found.dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), known, rtol=error, atol=error * np.abs(known).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gelu", "gelu_exact", "relu2"])
def test_activations_and_their_slopes(name, dtype):
    known = KNOWN[name]
    x = jnp.linspace(-8, 8, 4001).astype(dtype)
    value, pull = jax.vjp(activation_of(name), x)
    (slope,) = pull(jnp.ones_like(x))
    exact = np.asarray(x, np.float64)
    close(value, known(exact))
    close(slope, (known(exact + STEP) - known(exact - STEP)) / (2 * STEP))
    assert value.dtype == slope.dtype == x.dtype


@pytest.mark.parametrize("name", ["geglu_exact", "swiglu_clamped"])
def test_gated_activations(name):
    """Numbers beyond what gpt-oss clamps."""
    gate, up = np.random.default_rng(0).normal(0, 6, (2, 500))
    given = jnp.asarray(np.stack([gate, up])[None, None], jnp.float32)
    close(activation_of(name)(given)[0, 0], KNOWN[name](gate, up))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "weight", "has_bias"),
    [
        ("LayerNorm", "scale", True),
        ("LayerNorm", "offset", False),
        ("LayerNorm", "none", False),
        ("RMSNorm", "scale", False),
        ("RMSNorm", "offset", False),
        ("HeadNorm", "scale", False),
    ],
)
def test_norms_and_their_gradients(kind, weight, has_bias, dtype):
    random, size = np.random.default_rng(0), 24
    x, weights = random.normal(1, 3, (4, 5, size)), random.normal(size=(4, 5, size))
    scale, bias = random.normal(size=size), random.normal(size=size)
    is_centred = kind == "LayerNorm"

    def exact(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True) if is_centred else x
        normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        normal = normal * {"scale": scale, "offset": 1 + scale, "none": 1.0}[weight]
        return normal + bias if has_bias else normal

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
        if kind == "HeadNorm":
            norm = HeadNorm(Model(), {"scale": {"head_dim": size}})
        elif kind == "RMSNorm":
            norm = RMSNorm(size, 1e-5, dtype, weight=weight)
        else:
            norm = LayerNorm(size, 1e-5, dtype, weight=weight, bias=has_bias)
            assert (norm.bias is not None) == has_bias
        if norm.scale is None:
            return norm(x) + 0 * scale.sum().astype(dtype)
        assert (norm.scale[...] == (weight == "scale")).all()
        norm.scale.set_value(scale)
        if has_bias:
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
