"""RoPE in config.json: `rope_parameters` of transformers 5, and `rope_theta` and `rope_scaling` of 4."""

import math
from collections.abc import Mapping
from typing import Any

from mtjax.config import Model
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import FULL, SLIDING, ConfigKeys, Settings
from mtjax.errors import UserError

FACTORS = {
    "rope_factor": "factor",
    "rope_low_frequency_factor": "low_freq_factor",
    "rope_high_frequency_factor": "high_freq_factor",
    "rope_original_length": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
    "rope_truncate": "truncate",
    "rope_short_factors": "short_factor",
    "rope_long_factors": "long_factor",
}
"""mtjax's settings of RoPE scaling -> keys of config.json."""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("rope_factor",),
    "dynamic": ("rope_factor",),
    "llama3": ("rope_factor", "rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_length"),
    "yarn": ("rope_factor", "rope_original_length"),
    "longrope": ("rope_factor", "rope_original_length", "rope_short_factors", "rope_long_factors"),
}
"""Kinds of scaling -> the settings that each has."""
OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "yarn": ("rope_beta_fast", "rope_beta_slow", "rope_attention_factor", "rope_truncate"),
    "longrope": ("rope_attention_factor",),
}
"""Kinds of scaling -> settings that config.json may omit; mtjax's defaults are transformers'."""
ORIGINAL = "original_max_position_embeddings"
THETA, FRACTION = "rope_theta", "partial_rotary_factor"
KEYS = ("rope_parameters", "rope_scaling", ORIGINAL, "max_position_embeddings")
KNOWN = {
    *FACTORS.values(),
    *("rope_type", "type", "rope_theta", "partial_rotary_factor"),
    *("mscale", "mscale_all_dim", "alpha", "max_position_embeddings"),
}
"""Keys within an object of RoPE, of any kind; each kind uses its own, and transformers ignores the others."""


def rope(*more: str, fraction: str = "", theta: str = THETA) -> ConfigKeys:
    """Returns the part of RoPE that is the same in all layers.

    Args:
      more: keys within the object of RoPE that the type has in addition, and reads itself.
      fraction: key of the fraction of a head that is rotated, outside that object; "" if the type rotates all of it.
      theta: key of the base, outside that object.
    """

    def read(values: Json) -> Settings:
        rope = rope_object(values)
        # The key inside the object wins, as in transformers 5, which copies the outer one only if it is missing there.
        share = float(rope.get(FRACTION, values.get(fraction or FRACTION, 1.0)))
        # The code of such a type in transformers rotates the whole head, whatever the key says.
        if not fraction and share != 1:
            raise UserError(f"{FRACTION} is {share:g}, but this type rotates all of a head")
        return read_rope(values, rope, values[theta], more) | ({"rope_fraction": share} if fraction else {})

    def write(model: Model) -> Json:
        scaling = scaling_object(model)
        share = {FRACTION: model.rope_fraction} if fraction else {}
        found = {
            theta: model.rope_theta,
            "rope_scaling": None if model.rope_scaling == "none" else scaling | share,
            "rope_parameters": {THETA: model.rope_theta, **scaling, **share},
            **({fraction: model.rope_fraction} if fraction else {}),
        }
        # transformers takes the length before dynamic scaling from here.
        dynamic = {"max_position_embeddings": model.rope_original_length} if model.rope_scaling == "dynamic" else {}
        return found | dynamic

    named = {**FACTORS, "rope_theta": theta, "rope_fraction": fraction or FRACTION, "rope_scaling": "rope_type"}
    return ConfigKeys((*KEYS, theta, fraction or FRACTION), read, write, named)


def rope_key(values: Json) -> str:
    """Returns the key of the object of RoPE: a `rope_scaling` that is not null wins, as in transformers 5."""
    return "rope_scaling" if values.get("rope_scaling") else "rope_parameters"


def rope_object(values: Json) -> dict[str, Any]:
    """Returns the object of RoPE."""
    return dict(values.get(rope_key(values)) or {})


def read_rope(values: Json, rope: Json, theta: float, known: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns mtjax's settings of RoPE, with the scaling.

    Args:
      values: of the config.json.
      rope: the object of RoPE.
      theta: base of the frequencies if `rope` has none.
      known: keys within `rope` that the type reads itself.

    Raises:
      UserError: the kind of scaling is not supported, or a key is unknown.
    """
    # `type` is the spelling before transformers 4.43.
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = "none" if kind == "default" else kind
    if kind not in REQUIRED:
        kinds = ", ".join(name for name in REQUIRED if name != "none")
        raise UserError(f"rope_type is {kind!r}, but must be one of default, {kinds}")
    # A key that is ignored may be one that changes the angles.
    if unknown := [key for key in rope if key not in KNOWN and key not in known and rope[key] is not None]:
        raise UserError(f"{rope_key(values)} has {', '.join(unknown)}, which mtjax does not support")
    found: dict[str, Any] = {"rope_theta": float(rope.get(THETA, theta)), "rope_scaling": kind}
    return found | _read_scaling(values, rope, kind)


def _read_scaling(values: Json, rope: Json, kind: str) -> dict[str, Any]:
    """Returns the settings of a kind of scaling."""
    length = values["max_position_embeddings"]
    if kind == "dynamic":
        return {"rope_factor": rope["factor"], "rope_original_length": length}
    whole = {key: value for key, value in rope.items() if value is not None}
    # Phi-3 has this key beside the object.
    original = values.get(ORIGINAL) or whole.get(ORIGINAL) or length
    whole[ORIGINAL] = original
    if kind in ("yarn", "longrope"):
        # transformers' default for these kinds.
        whole.setdefault("factor", length / original)
    for key in ("short_factor", "long_factor"):
        if key in whole:
            whole[key] = tuple(map(float, whole[key]))
    optional = [name for name in OPTIONAL.get(kind, ()) if FACTORS[name] in whole]
    found = {name: whole[FACTORS[name]] for name in (*REQUIRED[kind], *optional)}
    # DeepSeek's two weights: without the factor, transformers takes the quotient of YaRN's scales with each.
    if kind == "yarn" and "rope_attention_factor" not in found and whole.get("mscale") and whole.get("mscale_all_dim"):
        found["rope_attention_factor"] = yarn_scale(whole["factor"], whole["mscale"]) / yarn_scale(
            whole["factor"], whole["mscale_all_dim"]
        )
    # transformers computes the factor of attention by a logarithm, and takes 1 if the length is not extended.
    if kind == "longrope" and found["rope_factor"] <= 1:
        found.setdefault("rope_attention_factor", 1.0)
    return found


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor of queries and keys, weighted by `mscale`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def scaling_object(model: Model) -> dict[str, Any]:
    """Returns the object of RoPE of a model, without its base."""
    kind = model.rope_scaling
    if kind == "none":
        return {"rope_type": "default"}
    names = (*REQUIRED[kind], *OPTIONAL.get(kind, ()))
    found = {FACTORS[name]: getattr(model, name) for name in names}
    # The default, which most files do not have.
    if found.get("truncate", True):
        found.pop("truncate", None)
    lists = {key: list(value) for key, value in found.items() if isinstance(value, tuple)}
    return {"rope_type": kind} | {key: value for key, value in (found | lists).items() if value is not None}


def rope_by_layer(local_key: str = "", local_theta: float | None = None, *, theta: str = THETA) -> ConfigKeys:
    """Returns the part of RoPE that differs between layers with full attention and with a window.

    Args:
      local_key: key of transformers 4 for the base in layers with a window; "" if that is `rope_theta`, too.
      local_theta: its default; that of `rope_theta` when None.
      theta: key of transformers 4 for the base in layers with full attention.
    """

    def read(values: Json) -> Settings:
        nested = {kind: dict((values.get("rope_parameters") or {}).get(kind) or {}) for kind in (FULL, SLIDING)}
        # transformers 4 scales the layers with full attention alone.
        nested[FULL] |= values.get("rope_scaling") or {}
        default = values[theta] if local_theta is None else local_theta
        full = read_rope(values, nested[FULL], values[theta])
        local = read_rope(values, nested[SLIDING], values.get(local_key, default) if local_key else default)
        if local == full:
            return full
        # In mtjax, layers with a window may have another base, but not another scaling.
        if local["rope_scaling"] != "none":
            raise UserError("layers with a window have another scaling of RoPE than those without")
        return full | {"rope_local_theta": local["rope_theta"]}

    def write(model: Model) -> Json:
        full = {"rope_theta": model.rope_theta, **scaling_object(model)}
        base = model.rope_local_theta
        local = full if base is None else {"rope_theta": base, "rope_type": "default"}
        return {
            theta: model.rope_theta,
            "rope_scaling": None if model.rope_scaling == "none" else scaling_object(model),
            "rope_parameters": {FULL: full, SLIDING: local},
            **({local_key: local["rope_theta"]} if local_key else {}),
        }

    named = {**FACTORS, "rope_theta": theta, "rope_local_theta": local_key or theta, "rope_scaling": "rope_type"}
    return ConfigKeys((*KEYS, theta, *((local_key,) if local_key else ())), read, write, named)
