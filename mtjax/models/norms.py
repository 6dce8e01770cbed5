"""Norms over the width of the residual stream."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.linear import constant
from mtjax.sharding.axes import varying_like


class LayerNorm(nnx.Module):
    """Normalises over `embed` in float32; gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.bias = constant(0.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        return (_normal(x, self.scale[...], self.epsilon, is_centred=True) + self.bias[...]).astype(self.dtype)


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over `embed`, in float32 (arXiv 1910.07467); gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        return _normal(x, self.scale[...], self.epsilon).astype(self.dtype)


class HeadNorm(nnx.Module):
    """RMS norm of each head, with one scale for all heads; gives the type of what it reads."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.scale = constant(1.0, {"head_dim": width})
        self.epsilon = epsilon

    def __call__(self, heads: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Applies to the last dimension."""
        return _normal(heads, self.scale[...], self.epsilon).astype(heads.dtype)


def _normal(x: Array, scale: Array, epsilon: float, *, is_centred: bool = False) -> Array:
    """x over the root of its mean square, or of its variance, times `scale`; in float32."""
    return _scaled(epsilon, is_centred, x, varying_like(scale, x))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scaled(epsilon: float, is_centred: bool, x: Array, scale: Array) -> Array:
    normal, _ = _with_statistics(x, *_statistics(epsilon, is_centred, x))
    return normal * scale


def _scaled_forward(epsilon: float, is_centred: bool, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return _scaled(epsilon, is_centred, x, scale), (x, scale)


def _scaled_backward(
    epsilon: float, is_centred: bool, saved: tuple[Array, Array], gradient: Array
) -> tuple[Array, Array]:
    """Autodiff's, but that XLA sums the scale's gradient while it reads x and the gradient.

    Left to itself it computes the statistics within the kernel of that sum's terms, and writes these in float32.
    """
    x, scale = saved
    normal, rate = _with_statistics(x, *jax.lax.optimization_barrier(_statistics(epsilon, is_centred, x)))
    own = gradient * scale
    own = own - normal * (own * normal).mean(-1, keepdims=True)
    if is_centred:
        own = own - own.mean(-1, keepdims=True)
    return (own * rate).astype(x.dtype), (gradient * normal).sum(range(x.ndim - 1))


_scaled.defvjp(_scaled_forward, _scaled_backward)


def _statistics(epsilon: float, is_centred: bool, x: Array) -> tuple[Array | None, Array]:
    """Of each token its mean, where it is taken away, and its variance, or its mean square, with epsilon."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True) if is_centred else None
    centred = x if mean is None else x - mean
    return mean, jnp.square(centred).mean(-1, keepdims=True) + epsilon


def _with_statistics(x: Array, mean: Array | None, variance: Array) -> tuple[Array, Array]:
    """x normalised, and what it was multiplied with."""
    x, rate = x.astype(jnp.float32), jax.lax.rsqrt(variance)
    return (x if mean is None else x - mean) * rate, rate


Norm = LayerNorm | RMSNorm

NORMS: Mapping[str, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """The norm that a model's settings name."""
    return NORMS[model.norm](model.hidden_size, model.norm_epsilon, dtype)
