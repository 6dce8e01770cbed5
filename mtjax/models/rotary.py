"""Rotary position embeddings (RoPE, arXiv 2104.09864), and how to scale them beyond the length of training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import head_dim


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which queries and keys are rotated."""

    cos: Float[Array, "#batch seq half_head"]
    sin: Float[Array, "#batch seq half_head"]


@dataclass(frozen=True)
class Rotary:
    """A model's rotary embedding."""

    model: Model

    def __call__(self, position_ids: Int[Array, "#batch seq"]) -> Rotation:
        """The rotation of each position, in float32."""
        angles = position_ids[..., None].astype(jnp.float32) * jnp.asarray(frequencies(self.model))
        cos, sin, factor = jnp.cos(angles), jnp.sin(angles), attention_factor(self.model)
        return Rotation(cos, sin) if factor == 1 else Rotation(cos * factor, sin * factor)


def rotate(
    x: Float[Array, "batch seq heads head_dim"], by: Rotation | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates each pair (i, i + head_dim/2) of a head in float32; gives the type of x. Without a rotation, x itself.

    The pairing is that of GPT-NeoX and transformers; Meta's own checkpoints pair neighbours, with permuted weights.
    """
    if by is None:
        return x
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def frequencies(model: Model) -> np.ndarray:
    """Radians per position of each pair, float32 [head_dim / 2], scaled as the model says."""
    exponent = np.arange(0, head_dim(model), 2) / head_dim(model)
    return SCALINGS[model.rope_scaling](model, model.rope_theta**-exponent).astype(np.float32)


def _unscaled(model: Model, frequency: np.ndarray) -> np.ndarray:
    del model
    return frequency


def _linear(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Positions interpolated (arXiv 2306.15595)."""
    return frequency / model.rope_factor


def _llama3(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Long wavelengths in full, short ones not at all, those between in proportion (Llama 3.1's release)."""
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    turns = model.rope_original_length * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * frequency + (1 - kept) * frequency / model.rope_factor


def _yarn(model: Model, frequency: np.ndarray) -> np.ndarray:
    """Pairs that turn seldom in full, those that turn often not at all, those between by their number (YaRN,
    arXiv 2309.00071, section 3.2): bounds are whole pairs, as in its code and in transformers."""
    width = head_dim(model)

    def pair(turns: float) -> float:
        return width * math.log(model.rope_original_length / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    first = max(math.floor(pair(model.rope_beta_fast)), 0)
    last = min(math.ceil(pair(model.rope_beta_slow)), width - 1)
    scaled = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return scaled * frequency / model.rope_factor + (1 - scaled) * frequency


def attention_factor(model: Model) -> float:
    """By what YaRN multiplies queries and keys (its section 3.3); 1 without it."""
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
