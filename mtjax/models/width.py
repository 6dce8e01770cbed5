"""Hidden states whose width is sharded (2D tensor parallelism): vectors that are added to them, and LayerNorm, which
all-reduces two numbers per token."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard

from mtjax.models.saved_names import SAVED
from mtjax.sharding.axes import REPLICATED, dimension_axes, map_ranks, no_hoist, spec, varying_like


def layer_norm(epsilon: float, x: Array, factor: Array, bias: nnx.Param | None) -> Array:
    """Applies LayerNorm: float32 in the shape and sharding of x, [batch, act_seq, act_embed].

    Args:
      epsilon: added to the variance.
      x: hidden states.
      factor: of the normalized values, [embed].
      bias: [embed], if any.
    """
    normalized: Array = _layer_norm(epsilon, x, own_width(varying_like(factor, x)))
    return normalized if bias is None else normalized + own_width(varying_like(bias[...], x))


@jax.custom_vjp
def own_width(vector: Array) -> Array:
    """Returns a rank's part of a replicated vector [embed], float32: sharded like the width of hidden states."""
    # XLA: of a `reshard` the partitioner would shard the vector in the carry of loops too, and gather it for others.
    sharding = spec("act_embed")
    axes = dimension_axes(sharding, 0)

    def local(vector: Array) -> Array:
        size = vector.shape[0] // lax.axis_size(axes)
        return lax.dynamic_slice_in_dim(vector, lax.axis_index(axes) * size, size)

    return no_hoist(map_ranks(local, REPLICATED, sharding), vector)


def _own_width_forward(vector: Array) -> tuple[Array, None]:
    return own_width(vector), None


def _own_width_backward(_: None, gradient: Array) -> tuple[Array]:
    """All-gathers the gradient, of which each rank has its part."""
    return (reshard(gradient, REPLICATED),)


own_width.defvjp(_own_width_forward, _own_width_backward)


def _mean(x: Array) -> Array:
    """Returns the mean over the width, [..., 1]."""
    return x.mean(-1, keepdims=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layer_norm(epsilon: float, x: Array, scale: Array) -> Array:
    return _layer_norm_forward(epsilon, x, scale)[0]


def _layer_norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, ...]]:
    """Saves mean and rate, two numbers per token, so that only full recompute all-reduces them again."""
    wide = x.astype(jnp.float32)
    # The mean first: of a sum of squares the variance would lose digits.
    mean = checkpoint_name(_mean(wide), SAVED)
    rate = checkpoint_name(jax.lax.rsqrt(_mean(jnp.square(wide - mean)) + epsilon), SAVED)
    return (wide - mean) * rate * scale, (x, scale, mean, rate)


def _layer_norm_backward(epsilon: float, saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients: with n the normalized x, r the rate and g = gradient * scale,
    `dx = r (g - n mean(g n) - mean(g))`, and `d scale = sum over tokens of gradient * n`."""
    x, scale, mean, rate = saved
    normal, d_x = (x.astype(jnp.float32) - mean) * rate, gradient * scale
    # One all-reduce for both means.
    along, level = _mean(jnp.stack([d_x * normal, d_x]))
    return ((d_x - normal * along - level) * rate).astype(x.dtype), (gradient * normal).sum(range(x.ndim - 1))


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
