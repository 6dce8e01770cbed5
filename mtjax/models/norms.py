"""Norms over the width of the residual stream."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.linear import constant


class LayerNorm(nnx.Module):
    """Normalises over `embed` in float32; gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.bias = constant(0.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        x = x.astype(jnp.float32)
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(variance + self.epsilon)
        return (normal * self.scale[...] + self.bias[...]).astype(self.dtype)


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square over `embed`, in float32 (arXiv 1910.07467); gives `dtype`."""

    def __init__(self, size: int, epsilon: float, dtype: jax.typing.DTypeLike) -> None:
        self.scale = constant(1.0, {"embed": size})
        self.epsilon = epsilon
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch act_seq embed"]:
        """Applies to the last dimension."""
        x = x.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...]).astype(self.dtype)


class HeadNorm(nnx.Module):
    """RMS norm of each head, with one scale for all heads; gives the type of what it reads."""

    def __init__(self, width: int, epsilon: float) -> None:
        self.scale = constant(1.0, {"head_dim": width})
        self.epsilon = epsilon

    def __call__(self, heads: Float[Array, "batch seq heads head_dim"]) -> Float[Array, "batch seq heads head_dim"]:
        """Applies to the last dimension."""
        x = heads.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.epsilon)
        return (normal * self.scale[...]).astype(heads.dtype)


Norm = LayerNorm | RMSNorm

NORMS: Mapping[str, type[Norm]] = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def make_norm(model: Model, dtype: jax.typing.DTypeLike) -> Norm:
    """The norm that a model's settings name."""
    return NORMS[model.norm](model.hidden_size, model.norm_epsilon, dtype)
