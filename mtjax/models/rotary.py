"""Rotary position embeddings (RoPE, arXiv 2104.09864), and their scalings for longer contexts than those of
training."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import rotated_dim, rotated_layers, windowed_layers
from mtjax.models.of_layer import of_layer


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of dimensions of queries and keys are rotated."""

    cos: Float[Array, "#batch seq pairs"]
    sin: Float[Array, "#batch seq pairs"]


class Rotations(NamedTuple):
    """Rotations of a model whose layers differ."""

    distinct: tuple[Rotation, ...]
    """Those that differ."""
    of_layers: tuple[int, ...]
    """Index of each layer's in `distinct`."""

    def of(self, layer: Int[Array, ""] | int | None) -> Rotation:
        """Selects the rotation of a layer by its number."""
        index = of_layer(self.of_layers, layer)
        if isinstance(index, int):
            return self.distinct[index]
        # Selected from the few that differ, which are computed outside the loop over layers.
        cos, sin = (lax.select_n(index, *each) for each in zip(*self.distinct, strict=True))
        return Rotation(cos, sin)


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding."""

    model: Model

    def __call__(self, position_ids: Int[Array, "#batch seq"], length: int) -> Rotation | Rotations:
        """Computes the rotation of each position in samples of `length` tokens, in float32; one for all layers, or
        those that differ."""
        kinds = rotation_kinds(self.model)
        distinct = tuple(dict.fromkeys(kinds))
        rotations = tuple(self._rotation(kind, position_ids, length) for kind in distinct)
        return rotations[0] if len(distinct) == 1 else Rotations(rotations, tuple(map(distinct.index, kinds)))

    def _rotation(self, kind: str, position_ids: Array, length: int) -> Rotation:
        """Computes the rotation of a kind of layers, [batch or 1, seq, width] of cosines and sines."""
        is_local, factor = kind == "local", 1.0
        if self.model.rope_scaling != "none":
            from mtjax.models.rope_scaling import attention_factor

            factor = attention_factor(self.model)
        # bfloat16 can't tell positions above 256 apart.
        angles = position_ids[..., None].astype(jnp.float32)
        angles = angles * jnp.asarray(frequencies(self.model, length, is_local=is_local))
        # In float32 a factor of 1 and an addition of 0 leave every element of queries and keys as it is.
        if kind == "none":
            return Rotation(jnp.ones_like(angles), jnp.zeros_like(angles))
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return Rotation(cos, sin) if is_local or factor == 1 else Rotation(cos * factor, sin * factor)


def rotation_kinds(model: Model) -> tuple[str, ...]:
    """Returns of each layer which rotation it has: global, local (rope_local_theta) or none."""
    has_local = model.rope_local_theta is not None
    return tuple(
        "none" if not rotated else "local" if has_local and windowed else "global"
        for rotated, windowed in zip(rotated_layers(model), windowed_layers(model), strict=True)
    )


@dataclass(frozen=True)
class QueryScale:
    """A model's factors of queries by position (Ministral 3)."""

    model: Model

    def __call__(self, position_ids: Int[Array, "#batch seq"]) -> Float[Array, "#batch seq"]:
        """Computes `1 + attention_scale_beta ln(1 + floor(position / rope_original_length))`, in float32."""
        lengths = (position_ids // self.model.rope_original_length).astype(jnp.float32)
        return 1 + self.model.attention_scale_beta * jnp.log1p(lengths)


def rotate(
    x: Float[Array, "batch seq heads head_dim"],
    by: Rotation | Rotations | None,
    layer: Int[Array, ""] | int | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair (i, i + n/2) of a head's first n dimensions, of all without rope_fraction, in float32; returns
    the type of x, or x itself without a rotation.

    The pairing is that of GPT-NeoX and transformers; Meta's checkpoints pair neighbors, with permuted weights. `layer`
    is the layer's number, where layers differ.
    """
    if by is None:
        return x
    if isinstance(by, Rotations):
        by = by.of(layer)
    # One rotation for all heads: [batch, seq, 1, pairs].
    cos, sin, width = by.cos[:, :, None], by.sin[:, :, None], 2 * by.cos.shape[-1]
    first, second = jnp.split(x[..., :width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    # With rope_fraction the last dimensions carry no position.
    return rotated if width == x.shape[-1] else jnp.concatenate([rotated, x[..., width:]], axis=-1)


def frequencies(model: Model, length: int = 0, *, is_local: bool = False) -> np.ndarray:
    """Computes the radians per position of each rotated pair, float32 [pairs].

    Args:
      model: with the scaling.
      length: tokens of a sample, by which longrope and dynamic scale.
      is_local: whether for layers with a window, where rope_local_theta is given: these are not scaled.
    """
    # theta^(-2i / width) of pair i.
    exponent = np.arange(0, rotated_dim(model), 2) / rotated_dim(model)
    if is_local and model.rope_local_theta is not None:
        return (model.rope_local_theta**-exponent).astype(np.float32)
    frequency = model.rope_theta**-exponent
    if model.rope_scaling == "none":
        return frequency.astype(np.float32)
    from mtjax.models.rope_scaling import SCALINGS

    return SCALINGS[model.rope_scaling](model, frequency, length).astype(np.float32)
