"""Scales RoPE's frequencies for sequences longer than in pretraining."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from mtjax.config import Model
from mtjax.config.sizes import rotated_dim


def _linear(model: Model, frequency: np.ndarray, length: int) -> np.ndarray:
    """Interpolates positions (arXiv 2306.15595): divides all frequencies."""
    del length
    return frequency / model.rope_factor


def _llama3(model: Model, frequency: np.ndarray, length: int) -> np.ndarray:
    """Divides low frequencies, keeps high ones, and interpolates between both (Llama 3.1's release)."""
    del length
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    # Rotations of a pair within the original length: above `high` the frequency is kept, below `low` it is divided.
    rotations = model.rope_original_length * frequency / (2 * math.pi)
    unscaled = np.clip((rotations - low) / (high - low), 0, 1)
    return unscaled * frequency + (1 - unscaled) * frequency / model.rope_factor


def _yarn(model: Model, frequency: np.ndarray, length: int) -> np.ndarray:
    """Divides low frequencies, keeps high ones, and interpolates by the index of the pair (YaRN, arXiv 2309.00071,
    3.2).

    The bounds are integers, as in YaRN's code and in transformers, unless rope_truncate is false.
    """
    del length
    width = rotated_dim(model)

    def pair(rotations: float) -> float:
        """Returns the index of the pair that makes so many rotations within the original length."""
        return (
            width * math.log(model.rope_original_length / (rotations * 2 * math.pi)) / (2 * math.log(model.rope_theta))
        )

    first, last = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    # Not divided by 0 where both bounds are one pair, as in YaRN's code.
    scaled = np.clip((np.arange(width // 2) - first) / max(last - first, 0.001), 0, 1)
    return scaled * frequency / model.rope_factor + (1 - scaled) * frequency


def _dynamic(model: Model, frequency: np.ndarray, length: int) -> np.ndarray:
    """Raises the base for samples longer than the original length, the more so the longer they are."""
    width, original, factor = rotated_dim(model), model.rope_original_length, model.rope_factor
    longer = max(length, original) / original
    # The base is multiplied by g^(width / (width - 2)), so that the last pair's frequency is divided by g.
    growth = factor * longer - (factor - 1)
    return frequency * growth ** -(np.arange(0, width, 2) / (width - 2))


def _longrope(model: Model, frequency: np.ndarray, length: int) -> np.ndarray:
    """Divides each frequency by its own factor (arXiv 2402.13753); one set for samples up to the original length,
    another for longer ones."""
    is_long = length > model.rope_original_length
    return frequency / np.asarray(model.rope_long_factors if is_long else model.rope_short_factors, np.float64)


def attention_factor(model: Model) -> float:
    """Returns the factor by which queries and keys are multiplied: YaRN's (its section 3.3), longrope's; 1 for other
    scalings."""
    if model.rope_scaling not in ("yarn", "longrope"):
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_factor <= 1:
        return 1.0
    if model.rope_scaling == "yarn":
        return 0.1 * math.log(model.rope_factor) + 1
    return math.sqrt(1 + math.log(model.rope_factor) / math.log(model.rope_original_length))


SCALINGS: Mapping[str, Callable[[Model, np.ndarray, int], np.ndarray]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
