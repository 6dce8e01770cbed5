"""The supported types of transformers, by `model_type`."""

from collections.abc import Mapping

from mtjax.config import Model
from mtjax.convert.model_types.family import Json, ModelType
from mtjax.convert.model_types.missing import MISSING
from mtjax.errors import UserError
from mtjax.families.registry import FAMILIES, load_part

MODEL_TYPES: Mapping[str, ModelType] = {
    model_type.model_type: model_type
    for parts in FAMILIES.values()
    if parts.hugging_face
    for model_type in load_part(parts.hugging_face)
}
"""In the order in which an export prefers types that can represent a model equally well."""


_INSTEAD = {"retro": "write its decoder as a gpt with --without-encoder"}
"""Family without types of transformers -> what to write instead."""
_OTHERS = "use --to mtjax:DIR"


def family_of_config(config: Json, source: str) -> ModelType:
    """Returns the type that a config.json names.

    Raises:
      UserError: it is missing or not supported.
    """
    if "model_type" not in config:
        raise UserError(f"{source} is missing model_type")
    name = str(config["model_type"])
    if name not in MODEL_TYPES:
        # No suggestion of a similar name: mistral and mixtral are spelled alike, but are different models.
        why = MISSING.get(name) or _models_inside(config)
        raise UserError(
            f"{source}: model_type {name!r} is not supported{': ' if why else ''}{why}; supported are "
            f"{', '.join(MODEL_TYPES)} (docs/convert.md)"
        )
    return MODEL_TYPES[name]


def _models_inside(config: Json) -> str:
    """Returns that a type contains other models, such as one of images beside one of text; "" for one that has none."""
    inside = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    types = {key: value["model_type"] for key, value in inside.items() if "model_type" in value}
    if not types:
        return ""
    named = " and ".join(f"{key} ({kind})" for key, kind in types.items())
    return f"it is made of other models, {named}, of which mtjax reads those of text alone, from a separate folder"


def family_of_model(model: Model, original: str | None = None) -> ModelType:
    """Returns the type that can represent an mtjax model.

    Args:
      model: the model.
      original: `model_type` of the weights that it was converted from, which is preferred: a model without a window is
        both a `mistral` and a `llama`.

    Raises:
      UserError: there is none; lists the settings that the closest type can't represent.
    """
    if not FAMILIES[model.family].hugging_face:
        raise UserError(
            f"transformers has no model of the family {model.family}: {_INSTEAD.get(model.family, _OTHERS)}"
        )
    if original is not None and original in MODEL_TYPES and not MODEL_TYPES[original].misfits(model):
        return MODEL_TYPES[original]
    # After the original type, whose one round trip is faster than those through every type.
    misfits = {name: family.misfits(model) for name, family in MODEL_TYPES.items()}
    # The first of several: see the order of MODEL_TYPES.
    name = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[name]:
        closest = original if original in misfits else name
        raise UserError(
            f"transformers has no model with this architecture: the closest, {closest}, does not support "
            f"{', '.join(misfits[closest])}"
        )
    return MODEL_TYPES[name]
