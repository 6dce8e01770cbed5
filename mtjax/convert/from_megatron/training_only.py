"""Translates arguments of the network with which runs can be trained, but checkpoints can't be converted."""

from collections.abc import Callable
from typing import Any

from mtjax.convert.from_megatron.given import as_list
from mtjax.convert.from_megatron.translated import Translation


def translate_training_only(to: Translation) -> dict[str, Any]:
    """Returns the settings of these arguments; drops the values that mtjax does not support."""
    settings: dict[str, Any] = {}
    for dest, of in _TRANSLATIONS.items():
        if to.has(dest):
            found = of(to.get(dest))
            if found is None:
                to.drop(dest)
            else:
                settings |= found
    # mtjax refuses a pattern without a window.
    if "window_layers" in settings and "attention_window" not in settings:
        settings.pop("window_layers")
        to.unneeded["window_attn_skip_freq"] = "without --window-size, Megatron ignores it"
    if "S" not in settings.get("window_layers", "S"):  # every layer is skipped
        settings = {name: value for name, value in settings.items() if not name.endswith(("_window", "window_layers"))}
        to.unneeded["window_size"] = "--window-attn-skip-freq leaves no layer with it"
    if settings.get("attention_sinks"):
        to.differences.append("--attention-sinks: they start at 0, and in Megatron normally distributed")
    return settings


def _window(value: Any) -> dict[str, Any] | None:
    """Returns the window of `128,0`: a token attends to itself and the 128 before it. None for one with two sides."""
    sizes = as_list(value)
    is_causal = len(sizes) == 2 and all(type(size) is int for size in sizes) and sizes[0] >= 0 and sizes[1] in (0, -1)
    # mtjax's window counts the token itself, as transformers' does.
    return {"attention_window": sizes[0] + 1} if is_causal else None


def _pattern(setting: str, usual: str, last: str) -> Callable[[Any], dict[str, Any] | None]:
    """Returns a function that translates a frequency N (the last of every N layers differs) or a list of 0 and 1."""

    def of(value: Any) -> dict[str, Any] | None:
        if type(value) is int and value > 0:
            return {setting: usual * (value - 1) + last}
        # Megatron's lists mean opposite things: 1 in no_rope_freq is a layer without RoPE, 1 in window_attn_skip_freq
        # one with the window.
        letters = {0: usual, 1: last} if setting == "rope_layers" else {0: last, 1: usual}
        found = [letters.get(item) for item in as_list(value)]
        return {setting: "".join(map(str, found))} if found and None not in found else None

    return of


_TRANSLATIONS: dict[str, Callable[[Any], dict[str, Any] | None]] = {
    "apply_layernorm_1p": lambda value: {"norm_weight": "offset"},
    "softmax_type": lambda value: {"learnable": {"attention_sinks": True}, "vanilla": {}}.get(value),
    "no_rope_freq": _pattern("rope_layers", "R", "N"),
    "window_size": _window,
    "window_attn_skip_freq": _pattern("window_layers", "S", "F"),
}
OF_TRAINING = frozenset({*_TRANSLATIONS, "moe_expert_capacity_factor", "mtp_num_layers"})
"""Arguments with which checkpoints are not converted, but training is translated."""
