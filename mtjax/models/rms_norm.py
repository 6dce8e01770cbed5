"""RMSNorm over the width of hidden states."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.models.ops import norm_factor, norm_scale
from mtjax.models.saved_names import SAVED, is_unrolled
from mtjax.sharding.axes import varying_like, width_is_sharded


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
        # In loops over layers a saved rate gains nothing (docs/notes/speed.md), unless it spares an all-reduce.
        if is_unrolled() or width_is_sharded():
            factor = jnp.broadcast_to(norm_factor(self.weight_kind, self.scale), x.shape[-1:])
            factor = varying_like(factor, x)
            if width_is_sharded():
                from mtjax.models.width import own_width

                factor = own_width(factor)
            normal: Array = _rms_norm(self.epsilon, x, factor)
            return normal.astype(self.dtype)
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
