"""Rotary position embeddings (RoPE, arXiv 2104.09864), and their scalings for longer contexts than those of
training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import rotated_dim


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which queries and keys are rotated."""

    cos: Float[Array, "#batch seq half_head"]
    sin: Float[Array, "#batch seq half_head"]


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding."""

    model: Model

    def __call__(self, position_ids: Int[Array, "#batch seq"]) -> Rotation:
        """Computes the rotation of each position, in float32."""
        angles = position_ids[..., None].astype(jnp.float32) * jnp.asarray(frequencies(self.model))
        cos, sin, factor = jnp.cos(angles), jnp.sin(angles), attention_factor(self.model)
        return Rotation(cos, sin) if factor == 1 else Rotation(cos * factor, sin * factor)


@dataclass(frozen=True)
class QueryScale:
    """A model's factors of queries by position (Ministral 3)."""

    model: Model

    def __call__(self, position_ids: Int[Array, "#batch seq"]) -> Float[Array, "#batch seq"]:
        """Computes `1 + attention_scale_beta ln(1 + floor(position / rope_original_length))`, in float32."""
        lengths = (position_ids // self.model.rope_original_length).astype(jnp.float32)
        return 1 + self.model.attention_scale_beta * jnp.log1p(lengths)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], by: Rotation | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair (i, i + head_dim/2) of a head in float32; returns the type of x, or x itself without a
    rotation.

    The pairing is that of GPT-NeoX and transformers; Meta's checkpoints pair neighbors, with permuted weights.
    """
    if by is None:
        return x
    # One rotation for all heads: [batch, seq, 1, head_dim / 2].
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def frequencies(model: Model) -> np.ndarray:
    """Computes the radians per position of each pair, float32 [rotated_dim / 2], with the model's scaling."""
    # theta^(-2i / rotated_dim) of pair i.
    exponent = np.arange(0, rotated_dim(model), 2) / rotated_dim(model)
    return SCALINGS[model.rope_scaling](model, model.rope_theta**-exponent).astype(np.float32)


def _unscaled(model: Model, frequency: np.ndarray) -> np.ndarray:
    del model
    return frequency


def _linear(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Interpolates positions (arXiv 2306.15595): divides all frequencies."""
    return frequency / model.rope_factor


def _llama3(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Divides low frequencies, keeps high ones, and interpolates between both (Llama 3.1's release)."""
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    # Rotations of a pair within the original length: above `high` the frequency is kept, below `low` it is divided.
    rotations = model.rope_original_length * frequency / (2 * math.pi)
    unscaled = np.clip((rotations - low) / (high - low), 0, 1)
    return unscaled * frequency + (1 - unscaled) * frequency / model.rope_factor


def _yarn(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Divides low frequencies, keeps high ones, and interpolates by the index of the pair (YaRN, arXiv 2309.00071,
    3.2).

    The bounds are integers, as in YaRN's code and in transformers.
    """
    width = rotated_dim(model)

    def pair(rotations: float) -> float:
        """Returns the index of the pair that makes so many rotations within the original length."""
        return (
            width * math.log(model.rope_original_length / (rotations * 2 * math.pi)) / (2 * math.log(model.rope_theta))
        )

    first = max(math.floor(pair(model.rope_beta_fast)), 0)
    last = min(math.ceil(pair(model.rope_beta_slow)), width - 1)
    scaled = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return scaled * frequency / model.rope_factor + (1 - scaled) * frequency


def attention_factor(model: Model) -> float:
    """Returns the factor by which YaRN multiplies queries and keys (its section 3.3); 1 for other scalings."""
    if model.rope_scaling != "yarn":
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    return 0.1 * math.log(model.rope_factor) + 1 if model.rope_factor > 1 else 1.0


SCALINGS: Mapping[str, Callable[[Model, np.ndarray], np.ndarray]] = {
    "none": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
