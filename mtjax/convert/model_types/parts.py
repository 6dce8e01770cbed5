"""Parts of the description of a type: keys of config.json, and the settings that are read from and written to them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import GATED, attention_bias, head_dim, mlp_bias, mlp_size, num_kv_heads
from mtjax.config.ssm import ssm_groups, ssm_heads
from mtjax.convert.model_types.family import ACTIVATIONS as PLAIN_ACTIVATIONS
from mtjax.convert.model_types.family import Json
from mtjax.errors import UserError

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class ConfigKeys:
    """Keys of config.json that belong together."""

    keys: tuple[str, ...]
    """All keys that `read` uses."""
    read: Callable[[Json], Settings]
    """Returns mtjax's settings from the values of all keys, those of missing keys being the type's defaults."""
    write: Callable[[Model], Json]
    """Returns keys of config.json from mtjax's settings."""
    named: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Settings -> the key that each is read from, for messages; or several, of which a config.json has one."""


def all_named(parts: Iterable[ConfigKeys]) -> dict[str, str | tuple[str, ...]]:
    """Returns `ConfigKeys.named` of several parts, the later of which win."""
    return {ours: theirs for part in parts for ours, theirs in part.named.items()}


def check_factor(values: Json, key: str) -> None:
    """Checks a number from which settings are computed, so that the error has the number that was typed.

    Raises:
      UserError: the value of a key is neither null nor a finite number above 0.
    """
    value = values[key]
    if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
        raise UserError(f"{key} is {value!r}, and must be a number above 0")


def always(**settings: Any) -> ConfigKeys:
    """Returns a part without keys: settings that all models of the type have."""
    return ConfigKeys((), lambda values: settings, lambda model: {})


def given(**keys: Any) -> ConfigKeys:
    """Returns a part of keys that have these values in all supported models, for other readers of the config."""
    return ConfigKeys(tuple(keys), lambda values: {}, lambda model: keys)


def unused(*keys: str) -> ConfigKeys:
    """Returns a part of keys that have no effect in supported models, and that an export does not write."""
    return ConfigKeys(keys, lambda values: {}, lambda model: {})


_EFFECTIVE: Mapping[str, Callable[[Model], Any]] = {
    "num_kv_heads": num_kv_heads,
    "head_dim": head_dim,
    "mlp_size": mlp_size,
    "ssm_heads": ssm_heads,
    "ssm_groups": ssm_groups,
}
"""Settings with a default that depends on others -> their values."""


def value_of(model: Model, setting: str) -> Any:
    """Returns the value of a setting, with default sizes filled in."""
    return _EFFECTIVE[setting](model) if setting in _EFFECTIVE else getattr(model, setting)


def fields(**settings: str) -> ConfigKeys:
    """Returns a part of settings that differ from their keys only in the name: `setting="key"`."""
    return ConfigKeys(
        tuple(settings.values()),
        lambda values: {ours: values[theirs] for ours, theirs in settings.items()},
        lambda model: {theirs: value_of(model, ours) for ours, theirs in settings.items()},
        settings,
    )


def scaled(
    setting: str, key: str, read: Callable[[Any], float], write: Callable[[float], float], kind: type = float
) -> ConfigKeys:
    """Returns a part of a setting that is computed from its key; None stays None.

    Args:
      setting: name of the setting.
      key: of config.json.
      read: computes the setting.
      write: computes the key, exactly or up to rounding.
      kind: type of the key's value, int if it is an integer.
    """

    def forward(values: Json) -> Settings:
        check_factor(values, key)
        return {setting: None if values[key] is None else read(values[key])}

    def back(value: float | None) -> float | None:
        found = None if value is None else inverse(read, value, write(value))
        # An integer where transformers has one: JSON's 8.0 is read as a float.
        return kind(found) if found is not None and found == int(found) else found

    return ConfigKeys(
        (key,),
        forward,
        lambda model: {key: back(getattr(model, setting))},
        {setting: key},
    )


def inverse(read: Callable[[float], float], value: float, near: float) -> float:
    """Returns the shortest number at `near` of which `read` gives exactly `value`; `near` if there is none."""
    # 1 / (1 / 0.07) is 0.07000000000000002: a converted config.json should have the number that was published.
    rounded = [round(near, digits) for digits in range(16)]
    return next((number for number in rounded if number and read(number) == value), near)


ACTIVATIONS: Mapping[str, str] = {**PLAIN_ACTIVATIONS, "relu2": "relu2"}
"""transformers' names of activations -> mtjax's, in an MLP without a gate."""
GATES: Mapping[str, str] = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu_exact",
    "gelu_pytorch_tanh": "geglu",
    "gelu_new": "geglu",
    "gelu_fast": "geglu",
}
"""The same in an MLP with a gate."""


def activation(key: str = "hidden_act", *, gate: bool = True, usual: str = "gelu_pytorch_tanh") -> ConfigKeys:
    """Returns the part of the MLP's activation, written by its `usual` name if it has several.

    The part raises a `UserError` when reading an activation that mtjax does not have.
    """
    names = GATES if gate else ACTIVATIONS
    # The usual name comes first: an activation may have several, which differ in rounding.
    ordered = sorted(names, key=lambda name: name != usual)

    def read(values: Json) -> Settings:
        if values[key] not in names:
            raise UserError(f"{key} is {values[key]!r}, but must be {' or '.join(map(repr, names))}")
        return {"activation": names[values[key]]}

    def write(model: Model) -> Json:
        # Any name for an activation that the type lacks: `ModelType.misfits` reads it back and reports the difference.
        return {key: next((name for name in ordered if names[name] == model.activation), ordered[0])}

    return ConfigKeys((key,), read, write)


def attention_settings(attention: str, *, mlp: bool) -> Settings:
    """Returns the settings of biases: attention's are none, qkv, output or all, and the MLP's are those of `bias`."""
    return {"bias": mlp, "attention_bias": "auto" if attention == ("all" if mlp else "none") else attention}


def biases(
    attention: str = "", mlp: str = "", *, with_attention: str = "all", with_mlp: bool = False, always: str = "none"
) -> ConfigKeys:
    """Returns the part of biases.

    Args:
      attention: key that turns on attention's biases; "" for none.
      mlp: key that turns on the MLP's; "" for none.
      with_attention: what `attention` turns on: qkv or all.
      with_mlp: whether the MLP has biases, without `mlp`.
      always: the biases of attention, without `attention`: none, qkv or all.
    """
    keys = tuple(dict.fromkeys(key for key in (attention, mlp) if key))

    def read(values: Json) -> Settings:
        of_attention = always if not attention else with_attention if values[attention] else "none"
        return attention_settings(of_attention, mlp=bool(values[mlp]) if mlp else with_mlp)

    def write(model: Model) -> Json:
        found = {mlp: mlp_bias(model)} if mlp else {}
        return {**found, attention: attention_bias(model) != "none"} if attention else found

    return ConfigKeys(keys, read, write)


FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' kinds of layers."""


def shortest(letters: Sequence[str]) -> str:
    """Returns the shortest pattern that gives these letters when it repeats over the layers."""
    text = "".join(letters)
    sizes = range(1, len(text) + 1)
    return next(text[:size] for size in sizes if (text[:size] * len(text))[: len(text)] == text)


def repeated(pattern: str, count: int) -> str:
    """Returns the letters of `count` layers."""
    return (pattern * count)[:count]


def window() -> ConfigKeys:
    """Returns the part of a window in all layers; null is none."""
    return ConfigKeys(
        ("sliding_window",),
        lambda values: {"attention_window": values["sliding_window"], "window_layers": "S"},
        lambda model: {"sliding_window": model.attention_window},
        {"attention_window": "sliding_window"},
    )


def windows(
    rule: Callable[[Json, int], bool], *keys: str, write: Callable[[Model], Json] = lambda model: {}
) -> ConfigKeys:
    """Returns the part of a window in the layers that `layer_types` names.

    Args:
      rule: returns from the values and a layer's number whether it has the window, where layer_types is not given.
      keys: keys of config.json that the rule reads.
      write: returns these keys.
    """

    def read(values: Json) -> Settings:
        letters = sliding(values, rule)
        # A window that no layer has is dropped, so that models that compute the same compare as equal.
        if "S" not in letters:
            return {"attention_window": None}
        return {"attention_window": values["sliding_window"], "window_layers": shortest(letters)}

    def write_all(model: Model) -> Json:
        kinds = {"S": SLIDING, "F": FULL}
        return {
            "sliding_window": model.attention_window,
            "layer_types": [kinds[letter] for letter in window_letters(model)],
            **write(model),
        }

    named = {"attention_window": "sliding_window", "window_layers": "layer_types"}
    return ConfigKeys(("sliding_window", "layer_types", *keys), read, write_all, named)


def used_windows(
    rule: Callable[[Json, int], bool], *keys: str, write: Callable[[Model], Json] = lambda model: {}
) -> ConfigKeys:
    """Returns the part of a window as `windows` does, which use_sliding_window turns on."""
    part = windows(rule, *keys, write=write)

    def read(values: Json) -> Settings:
        # transformers sets sliding_window to null as well where use_sliding_window is false.
        return part.read(values if values["use_sliding_window"] else {**values, "sliding_window": None})

    def write_all(model: Model) -> Json:
        return {**part.write(model), "use_sliding_window": model.attention_window is not None}

    return ConfigKeys((*part.keys, "use_sliding_window"), read, write_all, part.named)


def sliding(values: Json, rule: Callable[[Json, int], bool]) -> str:
    """Returns a letter for each layer: S if it has the window, F if not.

    Raises:
      UserError: a layer is of another kind.
    """
    layers = values["num_hidden_layers"]
    if values["sliding_window"] is None:
        return "F" * layers
    # Older versions of transformers have only the rule; newer ones write the list, which wins.
    kinds = values.get("layer_types") or [SLIDING if rule(values, i) else FULL for i in range(layers)]
    if other := sorted({str(kind) for kind in kinds} - {FULL, SLIDING}):
        raise UserError(f"layer_types has {', '.join(other)}, but must have {FULL} or {SLIDING}")
    if len(kinds) != layers:
        raise UserError(f"layer_types has {len(kinds)} layers, but num_hidden_layers is {layers}")
    return "".join("S" if kind == SLIDING else "F" for kind in kinds)


def window_letters(model: Model) -> str:
    """Returns a letter for each layer of a model: S if it has a window, F if not."""
    return repeated(model.window_layers if model.attention_window else "F", model.num_layers)


def every(count_key: str) -> Callable[[Json, int], bool]:
    """Returns the rule that every N-th layer has full attention, N being the value of a key."""
    # transformers counts layers from 0, and the last of every N is full.
    return lambda values, layer: (layer + 1) % values[count_key] != 0


def is_gated(model: Model) -> bool:
    """Returns whether the MLP has a gate."""
    return model.activation in GATED
