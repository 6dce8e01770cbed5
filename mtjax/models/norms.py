"""Norms over the width of hidden states."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import norm_vectors
from mtjax.models.linear import constant
from mtjax.sharding.axes import varying_like, width_is_sharded

if TYPE_CHECKING:
    from mtjax.models.rms_norm import RMSNorm


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


Norm: TypeAlias = "LayerNorm | RMSNorm"


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """Builds the norm of a model's settings."""
    size, epsilon, weight = model.hidden_size, model.norm_epsilon, model.norm_weight
    if model.norm != "rmsnorm":
        return LayerNorm(size, epsilon, dtype, weight=weight, bias="bias" in norm_vectors(model))
    from mtjax.models.rms_norm import RMSNorm

    return RMSNorm(size, epsilon, dtype, weight=weight)
