"""Checks of the settings of positions and of sliding windows."""

from mtjax.config.model import Model
from mtjax.config.sizes import head_dim, rotated_dim, windowed_layers
from mtjax.errors import UserError


def check_positions(model: Model) -> None:
    """Checks that the settings of windows, rotary positions and relative positions are consistent.

    Raises:
      UserError: they are inconsistent.
    """
    _check_windows(model)
    # Half of the buckets are exact distances, and the others divide the rest logarithmically: there has to be a rest.
    if model.relative_max_distance <= model.relative_buckets:
        distance, buckets = model.relative_max_distance, model.relative_buckets
        raise UserError(f"relative_max_distance {distance} must be above relative_buckets {buckets}")
    if model.position == "rope":
        _check_rotation(model)
        _check_scaling(model)


def _check_windows(model: Model) -> None:
    """Checks that window_layers has a window, and that its pattern fits the layers."""
    if model.attention_window is None:
        if model.window_layers != "S":
            raise UserError(
                f"window_layers is {model.window_layers}, and there is no window: set attention_window, or remove "
                "window_layers"
            )
        return
    _check_pattern(model, "window_layers", model.window_layers)
    if not any(windowed_layers(model)):
        raise UserError(
            f"attention_window is {model.attention_window}, and window_layers {model.window_layers} gives no layer a "
            "window: use S for layers that have it, or remove attention_window"
        )


def _check_pattern(model: Model, name: str, pattern: str) -> None:
    # The rest of a longer pattern would be ignored, which a typing error looks like.
    if len(pattern) > model.num_layers:
        raise UserError(
            f"{name} {pattern} is for {len(pattern)} layers, and num_layers is {model.num_layers}: use a pattern of "
            "as many letters at most"
        )


def _check_rotation(model: Model) -> None:
    """Checks which dimensions and layers are rotated."""
    if head_dim(model) % 2 and not model.kv_lora_rank:
        raise UserError(
            f"position rope rotates pairs of dimensions, and head_dim is {head_dim(model)}: use an even head_dim"
        )
    if rotated_dim(model) % 2 or not rotated_dim(model):
        raise UserError(
            f"rope_fraction {model.rope_fraction:g} rotates {rotated_dim(model)} of the {head_dim(model)} dimensions "
            f"of a head, and must rotate pairs: use a multiple of {2 / head_dim(model):g}"
        )
    _check_pattern(model, "rope_layers", model.rope_layers)
    if "R" not in model.rope_layers:
        raise UserError(f"rope_layers {model.rope_layers} rotates in no layer: use position none")
    if model.rope_local_theta is not None and not any(windowed_layers(model)):
        raise UserError(
            f"rope_local_theta {model.rope_local_theta:g} is for layers with a window, and there are none: set "
            "attention_window, or remove rope_local_theta"
        )


def _check_scaling(model: Model) -> None:
    """Checks the settings of RoPE's scaling."""
    kind, pairs = model.rope_scaling, rotated_dim(model) // 2
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if kind == "llama3" and low >= high:
        raise UserError(f"rope_low_frequency_factor {low} must be below rope_high_frequency_factor {high}")
    slow, fast = model.rope_beta_slow, model.rope_beta_fast
    if kind == "yarn" and slow >= fast:
        raise UserError(f"rope_beta_slow {slow} must be below rope_beta_fast {fast}")
    # The base is scaled by a power of d / (d - 2) for d rotated dimensions, which two do not have.
    if kind == "dynamic" and (pairs < 2 or model.rope_factor < 1):
        raise UserError(
            f"rope_scaling dynamic needs a rope_factor of at least 1 and 4 rotated dimensions, and there are "
            f"rope_factor {model.rope_factor:g} and {2 * pairs}"
        )
    for name in ("rope_short_factors", "rope_long_factors"):
        factors = getattr(model, name)
        if kind == "longrope" and factors is None:
            raise UserError(f"rope_scaling longrope needs {name}, {pairs} numbers: one for each rotated pair")
        if kind == "longrope" and len(factors) != pairs:
            raise UserError(
                f"{name} has {len(factors)} numbers, and rope_scaling longrope needs {pairs}: one for each rotated pair"
            )
    if kind == "longrope" and model.rope_original_length < 2 and model.rope_attention_factor is None:
        raise UserError(f"rope_original_length is {model.rope_original_length}, and longrope needs at least 2")
