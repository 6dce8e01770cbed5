"""The supported families, by transformers' model_type."""

from collections.abc import Mapping

from mtjax.config import Model
from mtjax.convert.families.bert import BERT, MEGATRON_BERT
from mtjax.convert.families.bloom import BLOOM, FALCON, MPT, OPT
from mtjax.convert.families.cohere import COHERE, COHERE2
from mtjax.convert.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from mtjax.convert.families.distilbert import DISTILBERT
from mtjax.convert.families.experts import DOTS1, GPT_OSS, GRANITEMOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from mtjax.convert.families.family import Family, Json
from mtjax.convert.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT
from mtjax.convert.families.gpt2 import GPT2
from mtjax.convert.families.llama import (
    ERNIE4_5,
    GRANITE,
    HUNYUAN_V1_DENSE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    SMOLLM3,
)
from mtjax.convert.families.neox import GLM4, GPT_NEOX, GPTJ, NEMOTRON, STABLELM, STARCODER2
from mtjax.convert.families.olmo import EXAONE4, OLMO, OLMO2, OLMO3
from mtjax.convert.families.phi import PHI, PHI3
from mtjax.convert.families.qwen import QWEN2, QWEN3
from mtjax.convert.families.roberta import ROBERTA, XLM_ROBERTA
from mtjax.convert.families.t5 import MT5, T5, UMT5
from mtjax.errors import UserError

_ALL = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI, PHI3, OLMO, OLMO2, OLMO3, GRANITE),
    *(STARCODER2, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, MPT, COHERE, COHERE2, STABLELM, SMOLLM3, GLM4, EXAONE4),
    *(ERNIE4_5, HUNYUAN_V1_DENSE, NEMOTRON, MINISTRAL, MINISTRAL3),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITEMOE, DOTS1, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
    *(BERT, MEGATRON_BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, T5, MT5, UMT5),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""In the order in which an export prefers types that can represent a model equally well."""

MISSING = {"modernbert": "its first layer has no norm before attention, unlike the others"}
"""Types that are not supported -> the reason."""


def family_of_config(config: Json, source: str) -> Family:
    """Returns the family that a config.json names.

    Raises:
      UserError: it is missing or not supported.
    """
    if "model_type" not in config:
        raise UserError(f"{source} is missing model_type")
    name = str(config["model_type"])
    if name not in FAMILIES:
        # No suggestion of a similar name: mistral and mixtral are spelled alike, but are different models.
        why = MISSING.get(name, "")
        raise UserError(
            f"{source}: model_type {name!r} is not supported{': ' if why else ''}{why}; supported are "
            f"{', '.join(FAMILIES)} (docs/convert.md)"
        )
    return FAMILIES[name]


def family_of_model(model: Model, original: str | None = None) -> Family:
    """Returns the family that can represent an mtjax model.

    Args:
      model: the model.
      original: `model_type` of the weights that it was converted from, which is preferred: a model without a window is
        both a `mistral` and a `llama`.

    Raises:
      UserError: there is none; lists the settings that the closest family can't represent.
    """
    if original in FAMILIES and not FAMILIES[original].misfits(model):
        return FAMILIES[original]
    misfits = {name: family.misfits(model) for name, family in FAMILIES.items()}
    name = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[name]:
        raise UserError(
            f"transformers has no model with this architecture: the closest, {name}, does not support "
            f"{', '.join(misfits[name])}"
        )
    return FAMILIES[name]
