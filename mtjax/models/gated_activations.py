"""Activations with two projections as input, gate and up (GLU, arXiv 2002.05202)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.models.ops import activation_of
from mtjax.models.saved_names import is_unrolled

# gpt-oss's release; 1.702 makes x sigmoid(1.702 x) approximate GELU.
_LIMIT, _STEEPNESS = 7.0, 1.702

_OF_GATE = {"geglu": "gelu", "geglu_exact": "gelu_exact"}
"""Gated activation -> activation of its gate, which multiplies the up projection; swiglu's is in jax."""


def gated_activation(name: str) -> Callable[[Array], Array]:
    """Returns a gated activation: [batch, seq, 2, mlp], the gate first -> [batch, seq, mlp]."""
    if name == "swiglu_clamped":
        return _swiglu_clamped
    activation = jax.nn.silu if name == "swiglu" else activation_of(_OF_GATE[name])

    def gated(x: Array) -> Array:
        gate, up = _halves(x)
        return activation(gate) * up

    return gated


def _halves(x: Array) -> tuple[Array, Array]:
    """Takes gate and up, [batch, seq, mlp] each, out of [batch, seq, 2, mlp]."""
    if not is_unrolled():
        return x[:, :, 0], x[:, :, 1]
    # XLA: the gradient of a split is a concatenation, of which each product's gradient reads its part.
    gate, up = jnp.split(x, 2, axis=2)
    return gate.squeeze(2), up.squeeze(2)


def _swiglu_clamped(x: Array) -> Array:
    """Computes gpt-oss's gated activation: the gate is clamped above, the other half on both sides, and 1 is added to
    it."""
    wide = x.astype(jnp.float32)
    gate, up = _halves(wide)
    gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(up, -_LIMIT, _LIMIT)
    return ((up + 1) * gate * jax.nn.sigmoid(_STEEPNESS * gate)).astype(x.dtype)
