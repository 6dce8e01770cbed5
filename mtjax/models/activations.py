"""Activation functions by name; gated ones take two projections."""

from collections.abc import Callable, Mapping
from functools import partial

import jax
from jax import Array


def _gated(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """[batch, seq, 2, mlp], the gate first -> [batch, seq, mlp] (arXiv 2002.05202)."""
    return lambda x: activation(x[:, :, 0]) * x[:, :, 1]


_gelu = partial(jax.nn.gelu, approximate=True)

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": _gelu,
    "gelu_exact": partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "swiglu": _gated(jax.nn.silu),
    "geglu": _gated(_gelu),
}
