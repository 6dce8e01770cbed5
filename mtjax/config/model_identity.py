"""The settings that define the model's architecture: two runs that agree in them can exchange their weights."""

import dataclasses
from typing import Any

from mtjax.config import sizes
from mtjax.config.families import family_of, settings_of_others
from mtjax.config.field_metadata import setting_of
from mtjax.config.model import Model
from mtjax.config.ssm import letters_of, ssm_groups, ssm_heads, without_effect


def effective_settings(model: Model) -> dict[str, Any]:
    """Returns the settings that define what a model computes, with default sizes filled in.

    Settings of training and speed are omitted, and settings that are turned off by others (`rope_theta` without RoPE)
    or belong to other families.
    """
    values = vars(model) | {
        "family": family_of(model.family).network or model.family,
        "mlp_size": sizes.mlp_size(model),
        "expert_size": sizes.expert_size(model),
        "embedding_size": sizes.embedding_width(model),
        "head_dim": sizes.head_dim(model),
        # Filled in, so that a config that spells a default out describes the same model as one that does not.
        "num_kv_heads": sizes.num_kv_heads(model),
        "attention_bias": sizes.attention_bias(model),
        "mlp_bias": sizes.mlp_bias(model),
        "num_decoder_layers": sizes.decoder_layers(model),
        "decoder_sequence_length": sizes.decoder_length(model),
        "layer_pattern": letters_of(model),
        "ssm_heads": ssm_heads(model),
        "ssm_groups": ssm_groups(model),
    }
    others = settings_of_others(model.family) | without_effect(model)
    return {
        field.name: values[field.name]
        for field in dataclasses.fields(Model)
        if field.name not in others and _shapes(field, model)
    }


def _shapes(field: dataclasses.Field[Any], model: Model) -> bool:
    condition = setting_of(field).shapes
    # None is checked first: Python looks for it in a range number by number, of which some have millions.
    values = [(getattr(model, name), allowed) for name, allowed in condition or ()]
    return condition is not None and all(value is not None and value in allowed for value, allowed in values)


def differences(theirs: Model, ours: Model) -> list[str]:
    """Lists each setting in which two models differ, with both values: "num_layers is 3 there and 2 here".

    Settings that have an effect in only one of the two are not listed: the setting that turns them on is.
    """
    there, here = effective_settings(theirs), effective_settings(ours)
    return [
        f"{name} is {there[name]} there and {here[name]} here"
        for name in there
        if name in here and there[name] != here[name]
    ]
