"""The supported families, by transformers' model_type."""

from collections.abc import Mapping

from mtjax.config import Model
from mtjax.convert.families.bert import BERT, ERNIE, MEGATRON_BERT
from mtjax.convert.families.bloom import BLOOM, FALCON, MPT, OPT
from mtjax.convert.families.cohere import COHERE, COHERE2
from mtjax.convert.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, SARVAM_MLA, YOUTU
from mtjax.convert.families.distilbert import DISTILBERT
from mtjax.convert.families.early_gpt import GPT_NEO, OPENAI_GPT
from mtjax.convert.families.experts import DOTS1, GPT_OSS, GRANITEMOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from mtjax.convert.families.falcon_h1 import FALCON_H1
from mtjax.convert.families.family import Family, Json
from mtjax.convert.families.gemma import GEMMA, GEMMA2, GEMMA3_TEXT, VAULTGEMMA
from mtjax.convert.families.gpt2 import GPT2
from mtjax.convert.families.granite import GRANITE_SWA, GRANITEMOE_SWA, GRANITEMOESHARED
from mtjax.convert.families.hybrid import BAMBA, GRANITEMOEHYBRID, MAMBA2, NEMOTRON_H
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
from mtjax.convert.families.missing import MISSING
from mtjax.convert.families.modernbert import MODERNBERT
from mtjax.convert.families.near_experts import (
    ERNIE4_5_MOE,
    EXAONE_MOE,
    FLEX_OLMO,
    FLINT,
    GLM4_MOE,
    GLM4_MOE_LITE,
    HUNYUAN_V1_MOE,
    HY_V3,
    MELLUM,
    MINIMAX_M2,
    SARVAM_MOE,
    SOLAR_OPEN,
)
from mtjax.convert.families.near_gpt import BIOGPT, CODEGEN, GPT_BIGCODE, PERSIMMON
from mtjax.convert.families.near_llama import (
    ARCEE,
    CWM,
    EXAONE,
    HELIUM,
    HYPERCLOVAX,
    INTERNLM3,
    IQUESTCODER,
    JAIS2,
    SEED_OSS,
)
from mtjax.convert.families.neox import GLM, GLM4, GPT_NEOX, GPTJ, NEMOTRON, STABLELM, STARCODER2
from mtjax.convert.families.olmo import EXAONE4, OLMO, OLMO2, OLMO3
from mtjax.convert.families.phi import PHI, PHI3
from mtjax.convert.families.qwen import QWEN2, QWEN3
from mtjax.convert.families.qwen3_next import QWEN3_NEXT
from mtjax.convert.families.roberta import CAMEMBERT, DATA2VEC_TEXT, ROBERTA, XLM_ROBERTA
from mtjax.convert.families.t5 import MT5, T5, UMT5
from mtjax.convert.families.zamba2 import ZAMBA2
from mtjax.errors import UserError

_ALL = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI, PHI3, OLMO, OLMO2, OLMO3, GRANITE),
    *(STARCODER2, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, MPT, COHERE, COHERE2, STABLELM, SMOLLM3, GLM4, EXAONE4),
    *(ERNIE4_5, HUNYUAN_V1_DENSE, NEMOTRON, MINISTRAL, MINISTRAL3),
    # YOUTU before DEEPSEEK_V2, which experts distinguish.
    *(YOUTU, MINICPM3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITEMOE, DOTS1, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
    *(GLM, ARCEE, JAIS2, HELIUM, SEED_OSS, CWM, HYPERCLOVAX, EXAONE, INTERNLM3, IQUESTCODER, VAULTGEMMA),
    *(PERSIMMON, BIOGPT, GPT_BIGCODE, CODEGEN, GPT_NEO, OPENAI_GPT, SARVAM_MLA),
    *(GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN, SARVAM_MOE, MINIMAX_M2, EXAONE_MOE, MELLUM, FLEX_OLMO, HUNYUAN_V1_MOE),
    *(FLINT, HY_V3, GRANITEMOESHARED, GRANITE_SWA, GRANITEMOE_SWA, ERNIE4_5_MOE),
    *(MAMBA2, NEMOTRON_H, BAMBA, GRANITEMOEHYBRID, FALCON_H1, QWEN3_NEXT, ZAMBA2),
    *(BERT, MEGATRON_BERT, ROBERTA, XLM_ROBERTA, DISTILBERT, MODERNBERT, T5, MT5, UMT5),
    *(ERNIE, CAMEMBERT, DATA2VEC_TEXT),
)
FAMILIES: Mapping[str, Family] = {family.model_type: family for family in _ALL}
"""In the order in which an export prefers types that can represent a model equally well."""


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
        why = MISSING.get(name) or _models_inside(config)
        raise UserError(
            f"{source}: model_type {name!r} is not supported{': ' if why else ''}{why}; supported are "
            f"{', '.join(FAMILIES)} (docs/convert.md)"
        )
    return FAMILIES[name]


def _models_inside(config: Json) -> str:
    """Returns that a type contains other models, such as one of images beside one of text; "" for one that has none."""
    inside = {key: value for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    types = {key: value["model_type"] for key, value in inside.items() if "model_type" in value}
    if not types:
        return ""
    named = " and ".join(f"{key} ({kind})" for key, kind in types.items())
    return f"it is made of other models, {named}, of which mtjax reads those of text alone, from a separate folder"


def family_of_model(model: Model, original: str | None = None) -> Family:
    """Returns the family that can represent an mtjax model.

    Args:
      model: the model.
      original: `model_type` of the weights that it was converted from, which is preferred: a model without a window is
        both a `mistral` and a `llama`.

    Raises:
      UserError: there is none; lists the settings that the closest family can't represent.
    """
    if model.family == "retro":
        raise UserError("transformers has no Retro: write its decoder as a gpt with --without-encoder")
    if original is not None and original in FAMILIES and not FAMILIES[original].misfits(model):
        return FAMILIES[original]
    misfits = {name: family.misfits(model) for name, family in FAMILIES.items()}
    name = min(misfits, key=lambda name: len(misfits[name]))
    if misfits[name]:
        raise UserError(
            f"transformers has no model with this architecture: the closest, {name}, does not support "
            f"{', '.join(misfits[name])}"
        )
    return FAMILIES[name]
