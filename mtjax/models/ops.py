"""Linear layers, norms, activations and dropout; `mtjax.models.project` has the product of a linear layer.

Parameters are drawn in float32 and carry the names of their dimensions (`nnx.Param(value, axes=names)`); operations
return the type of their input, and dropout masks depend on the sample alone, so that they are the same on every mesh.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int, Key

from mtjax.config import Model
from mtjax.config.sizes import norm_vectors
from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.project import ProductRule, project
from mtjax.models.saved_names import DROPOUT_MASK
from mtjax.sharding.axes import no_hoist, spec, varying_like, where, width_is_sharded

if TYPE_CHECKING:
    from mtjax.models.rms_norm import RMSNorm


def scaled(x: Array, factor: float | np.ndarray) -> Array:
    """Multiplies by a factor, or by factors that are broadcast to x, in float32: the factor is not rounded."""
    if isinstance(factor, float) and factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def draw_normal(key: Array, sizes: Mapping[str, int], std: float) -> nnx.Param:
    """Draws a parameter from N(0, std), created as shards, with the same values on every mesh."""
    # `out_sharding` makes each device draw its shard. The values depend on the key and the index alone
    # (jax_threefry_partitionable), not on the mesh.
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(std * jax.random.normal(key, shape, out_sharding=spec(*names)), axes=names)


def constant(value: float, sizes: Mapping[str, int]) -> nnx.Param:
    """Builds a parameter filled with `value`."""
    # Sharded from the beginning, like drawn ones: a device never holds all of a large parameter.
    names, shape = tuple(sizes), tuple(sizes.values())
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec(*names)), axes=names)


class Linear(nnx.Module):
    """`x W + b`, or `x W`, over named dimensions.

    Column-parallel where an output dimension is sharded, row-parallel where an input dimension is: then the partial
    products are all-reduced, or with sequence parallelism reduce-scattered.
    """

    rule: ProductRule | None = None
    """Of its product; see `project`."""
    adds_bias: bool = True
    """False where a layer adds the bias itself, to a sum of several products."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        std: float,
        bias: bool = True,
        sequence: str = "seq",
        key: Array,
    ) -> None:
        """Draws the parameters: weight [*inputs, *outputs] from N(0, std), bias 0."""
        self.num_inputs = len(inputs)
        self.sequence = sequence
        self.weight = draw_normal(key, {**inputs, **outputs}, std)
        self.bias = constant(0.0, outputs) if bias else None

    def __call__(self, x: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
        """Applies to [batch, seq, *inputs]; returns [batch, seq, *outputs] in the type of x."""
        # The names are the parameter's own, so that a product is sharded as its weight is.
        outputs = self.weight.get_metadata()["axes"][self.num_inputs :]
        bias = None if self.bias is None or not self.adds_bias else self.bias[...]
        return project(x, self.weight[...], bias, outputs, self.sequence, rule=self.rule)


def norm_scale(weight_kind: str, sizes: Mapping[str, int]) -> nnx.Param | None:
    """Builds the weight of a norm, for a value of the setting norm_weight, so that the norm multiplies by 1 at first;
    None for none."""
    return None if weight_kind == "none" else constant(0.0 if weight_kind == "offset" else 1.0, sizes)


def norm_factor(weight_kind: str, scale: nnx.Param | None) -> Array | float:
    """Returns the factor of the normalized values, float32: the weight of `norm_scale`, 1 + weight, or 1."""
    if scale is None:
        return 1.0
    return 1 + scale[...] if weight_kind == "offset" else scale[...]


class LayerNorm(nnx.Module):
    """LayerNorm over `embed`, computed in float32; the result has type `dtype`."""

    def __init__(
        self, size: int, epsilon: float, dtype: jax.typing.DTypeLike, *, weight: str = "scale", bias: bool = True
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
            # The 2D layout: mean and variance are sums over ranks.
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
    normalized, _ = _normalize(x, *_statistics(epsilon, x))
    return normalized * scale


def _layer_norm_forward(epsilon: float, x: Array, scale: Array) -> tuple[Array, tuple[Array, Array]]:
    return _layer_norm(epsilon, x, scale), (x, scale)


def _layer_norm_backward(epsilon: float, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    """Computes gradients of x [..., embed] and scale [embed], as autodiff does, from the float32 gradient.

    With n the normalized x, r = 1 / sqrt(variance + epsilon) and g = gradient * scale:
    `dx = r (h - mean(h))` where `h = g - n mean(g n)`, and `d scale = sum over tokens of gradient * n`.
    """
    x, scale = saved
    # XLA: without the barrier, the statistics are fused into the kernel of the terms of the scale's gradient, which are
    # then written out in float32. With it, that sum is computed while x and the gradient are read.
    normalized, rate = _normalize(x, *jax.lax.optimization_barrier(_statistics(epsilon, x)))
    d_x = gradient * scale
    d_x = d_x - normalized * (d_x * normalized).mean(-1, keepdims=True)
    d_x = d_x - d_x.mean(-1, keepdims=True)
    return (d_x * rate).astype(x.dtype), (gradient * normalized).sum(range(x.ndim - 1))


_layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


def _statistics(epsilon: float, x: Array) -> tuple[Array, Array]:
    """Computes the mean of each token, and its variance plus epsilon: [..., 1] each."""
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    # The mean of squared differences: the mean of squares minus the square of the mean cancels where the mean is large.
    return mean, jnp.square(x - mean).mean(-1, keepdims=True) + epsilon


def _normalize(x: Array, mean: Array, variance_plus_epsilon: Array) -> tuple[Array, Array]:
    """Normalizes x; returns it with the reciprocal standard deviation by which it was multiplied."""
    rate = jax.lax.rsqrt(variance_plus_epsilon)
    return (x.astype(jnp.float32) - mean) * rate, rate


Norm: TypeAlias = "LayerNorm | RMSNorm"


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """Builds the norm of a model's settings."""
    size, epsilon, weight = model.hidden_size, model.norm_epsilon, model.norm_weight
    if model.norm != "rmsnorm":
        return LayerNorm(size, epsilon, dtype, weight=weight, bias="bias" in norm_vectors(model))
    from mtjax.models.rms_norm import RMSNorm

    return RMSNorm(size, epsilon, dtype, weight=weight)


_GELU_SCALE, _GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Array) -> Array:
    """Computes the tanh approximation of GELU (arXiv 1606.08415)."""
    return 0.5 * x * (1 + jnp.tanh(_GELU_SCALE * (x + _GELU_CUBIC * x**3)))


def _gelu_slope(x: Array) -> Array:
    """Computes the derivative of `_gelu`, by `(1 + tanh(u)) / 2 = sigmoid(2 u)`."""
    sigmoid = jax.nn.sigmoid(2 * _GELU_SCALE * (x + _GELU_CUBIC * x**3))
    return sigmoid * (1 + 2 * _GELU_SCALE * x * (1 - sigmoid) * (1 + 3 * _GELU_CUBIC * x**2))


def with_slope(value: Callable[[Array], Array], slope: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Builds an activation from its value and its derivative, computed in float32; the result has the type of x."""

    # XLA: let the derivative use another function than the value, such as sigmoid instead of tanh. Of the same function
    # in both, which the backward pass recomputes, XLA for GPUs would write the result to memory in a separate kernel,
    # as it estimates that to be cheaper than computing it twice.

    @jax.custom_vjp
    def activation(x: Array) -> Array:
        return value(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x: Array) -> tuple[Array, Array]:
        return activation(x), x

    def backward(x: Array, gradient: Array) -> tuple[Array]:
        # XLA: a product in float32 would be written out for the bias' gradient, so the slope is cast first.
        return (gradient * slope(x.astype(jnp.float32)).astype(x.dtype),)

    activation.defvjp(forward, backward)
    return activation


gelu = with_slope(_gelu, _gelu_slope)


def activation_of(name: str) -> Callable[[Array], Array]:
    """Returns the function of the setting `activation`, gated or not."""
    if name == "gelu":
        return gelu
    from mtjax.models.activations import other_activation

    return other_activation(name)


def dropout(
    x: Array,
    rate: float,
    keys: Key[Array, " batch"] | None,
    site: int,
    names: tuple[str, ...],
    saved_as: str = DROPOUT_MASK,
    positions: Int[Array, " seq"] | None = None,
) -> Array:
    """Zeroes a fraction `rate` of `x` [batch, ...] and divides the others by the probability of keeping them, which is
    1 - `rate`, rounded to a multiple of 2^-16. Returns `x` when `keys` is None or `rate` 0.

    Args:
      keys: one per sample, so that what is dropped depends on neither mesh, microbatch size nor processes.
      site: distinguishes the dropouts that share `keys`.
      names: logical names of x's dimensions.
      saved_as: name of the mask in the policies of `mtjax.models.layer_loop`.
      positions: of x's second dimension in the entire sample, of which a rank may have some; 0, 1, ... when None.
    """
    if keys is None or rate == 0:
        return x
    drawn = _draw_16_bits(x, keys, site, names, positions)
    keep = checkpoint_name(drawn >= jnp.uint32(keep_threshold(rate)), saved_as)
    return where(keep, x / keep_share(rate), 0.0).astype(x.dtype)


def _draw_16_bits(x: Array, keys: Array, site: int, names: tuple[str, ...], positions: Array | None) -> Array:
    """Draws a random number of 16 bits for each element of x, uint32 in its shape."""
    from mtjax.models.threefry import random_halves

    def draw(keys: Array, positions: Array | None) -> Array:
        of_site = jax.vmap(lambda key: jax.random.fold_in(key, site))(keys)
        # XLA: reads the site again (`mtjax.models.threefry`); the keys alone make the bits differ.
        return random_halves(of_site, x.shape, spec(*names), positions, site)

    # As one primitive: jax would hoist the elements' indices, which are constants, out of the scan over layers, and
    # every layer would read them from memory.
    return no_hoist(draw, keys, positions)
