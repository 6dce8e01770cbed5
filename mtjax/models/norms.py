"""Norms over the width of hidden states."""

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import norm_vectors
from mtjax.models.linear import constant
from mtjax.models.recompute import SAVED
from mtjax.sharding.axes import varying_like, width_is_sharded
from mtjax.sharding.unstack import is_unrolled


def norm_scale(weight: str, sizes: Mapping[str, int]) -> nnx.Param | None:
    """Builds the weight of a norm, for a value of the setting norm_weight, so that the norm multiplies by 1 at first;
    None for none."""
    return None if weight == "none" else constant(0.0 if weight == "offset" else 1.0, sizes)


def norm_factor(weight: str, scale: nnx.Param | None) -> Array | float:
    """Returns the factor of the normalized values, float32: the weight of `norm_scale`, 1 + weight, or 1."""
    if scale is None:
        return 1.0
    return 1 + scale[...] if weight == "offset" else scale[...]


class LayerNorm(nnx.Module):
    """LayerNorm over `embed`, computed in float32; the result has type `dtype`."""

    def __init__(
        self,
        size: int,
        epsilon: float,
        dtype: jax.typing.DTypeLike,
        *,
        weight: str = "scale",
        bias: bool = True,
    ) -> None:
        """Builds a factor of 1 and bias 0; `weight` is a value of the setting norm_weight."""
        self.weight_kind = weight
        self.scale = norm_scale(weight, {"embed": size})
        self.bias = constant(0.0, {"embed": size}) if bias else None
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        factor = jnp.broadcast_to(norm_factor(self.weight_kind, self.scale), x.shape[-1:])
        if width_is_sharded():
            from mtjax.models.width import layer_norm

            return layer_norm(self.epsilon, x, factor, self.bias).astype(self.dtype)
        # Parameters are equal on all ranks, x is not: `_layer_norm`'s gradient of the factor varies like x.
        normalized: Array = _layer_norm(self.epsilon, x, varying_like(factor, x))
        if self.bias is not None:
            normalized = normalized + self.bias[...]
        return normalized.astype(self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(epsilon: float, x: Array, scale: Array) -> Array:
    """Normalizes x [..., embed] and multiplies it by scale [embed]: float32."""
    normal, _ = _normal(x, *_statistics(epsilon, x))
    return normal * scale


def _layer_norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return _layer_norm(epsilon, x, scale), (x, scale)


def _layer_norm_backward(epsilon: float, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients as autodiff does.

    With n the normalized x, r = 1 / sqrt(variance + epsilon) and g = gradient * scale:
    `dx = r (h - mean(h))` where `h = g - n mean(g n)`, and `d scale = sum over tokens of gradient * n`.

    Args:
      epsilon: added to the variance.
      saved: x [..., embed] and scale [embed].
      gradient: float32 [..., embed].

    Returns:
      Gradients of x and scale.
    """
    x, scale = saved
    # XLA: without the barrier, the statistics are fused into the kernel of the terms of the scale's gradient, which are
    # then written out in float32. With it, that sum is computed while x and the gradient are read.
    normal, rate = _normal(x, *jax.lax.optimization_barrier(_statistics(epsilon, x)))
    d_x = gradient * scale
    d_x = d_x - normal * (d_x * normal).mean(-1, keepdims=True)
    d_x = d_x - d_x.mean(-1, keepdims=True)
    return (d_x * rate).astype(x.dtype), (gradient * normal).sum(range(x.ndim - 1))


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _statistics(epsilon: float, x: Array) -> tuple[Array, Array]:
    """Computes the mean of each token, and its variance plus epsilon: [..., 1] each."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True) + epsilon


def _normal(x: Array, mean: Array, variance: Array) -> tuple[Array, Array]:
    """Normalizes x; returns it with the reciprocal standard deviation by which it was multiplied."""
    rate = jax.lax.rsqrt(variance)
    return (x.astype(jnp.float32) - mean) * rate, rate


class RMSNorm(nnx.Module):
    """RMSNorm over `embed` (arXiv 1910.07467), computed in float32; the result has type `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike, *, weight: str = "scale") -> None:
        """Builds a factor of 1; `weight` is a value of the setting norm_weight."""
        self.weight_kind = weight
        self.scale = norm_scale(weight, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        if is_unrolled():
            factor = jnp.broadcast_to(norm_factor(self.weight_kind, self.scale), x.shape[-1:])
            normal: Array = _rms_norm(self.epsilon, x, varying_like(factor, x))
            return normal.astype(self.dtype)
        if width_is_sharded():
            from mtjax.models.width import rms_norm

            factor = jnp.broadcast_to(norm_factor(self.weight_kind, self.scale), x.shape[-1:])
            return rms_norm(self.epsilon, x, factor).astype(self.dtype)
        x = x.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (normal * norm_factor(self.weight_kind, self.scale)).astype(self.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(epsilon: float, x: Array, scale: Array) -> Array:
    """Divides x [..., embed] by the root of its mean square, and multiplies it by scale [embed]: float32."""
    return _rms_norm_forward(epsilon, x, scale)[0]


def _rms_norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    # A number per token, saved so that the backward pass reads x once less.
    wide = x.astype(jnp.float32)
    rate = checkpoint_name(jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + epsilon), SAVED)
    return wide * rate * scale, (x, scale, rate)


def _rms_norm_backward(epsilon: float, saved: tuple[Array, Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients as autodiff does: of `n = x r`, with g = gradient * scale, `dx = r (g - n mean(g n))`, and
    `d scale = sum over tokens of gradient * n`."""
    x, scale, rate = saved
    normal, d_x = x.astype(jnp.float32) * rate, gradient * scale
    d_x = (d_x - normal * (d_x * normal).mean(-1, keepdims=True)) * rate
    return d_x.astype(x.dtype), (gradient * normal).sum(range(x.ndim - 1))


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


Norm = LayerNorm | RMSNorm


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """Builds the norm of a model's settings."""
    size, epsilon, weight = model.hidden_size, model.norm_epsilon, model.norm_weight
    if model.norm == "rmsnorm":
        return RMSNorm(size, epsilon, dtype, weight=weight)
    return LayerNorm(size, epsilon, dtype, weight=weight, bias="bias" in norm_vectors(model))
