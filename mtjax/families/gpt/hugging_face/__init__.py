"""Types of transformers that are a GPT or a Llama: a file for each kind of table."""

from mtjax.families.gpt.hugging_face.bloom import BLOOM, FALCON, MPT, OPT
from mtjax.families.gpt.hugging_face.cohere import COHERE, COHERE2
from mtjax.families.gpt.hugging_face.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, MINICPM3, SARVAM_MLA, YOUTU
from mtjax.families.gpt.hugging_face.early_gpt import GPT_NEO, OPENAI_GPT
from mtjax.families.gpt.hugging_face.experts import DOTS1, GPT_OSS, GRANITEMOE, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from mtjax.families.gpt.hugging_face.gemma import GEMMA, GEMMA2, GEMMA3_TEXT, VAULTGEMMA
from mtjax.families.gpt.hugging_face.gpt2 import GPT2
from mtjax.families.gpt.hugging_face.granite import GRANITE_SWA, GRANITEMOE_SWA, GRANITEMOESHARED
from mtjax.families.gpt.hugging_face.llama import (
    ERNIE4_5,
    GRANITE,
    HUNYUAN_V1_DENSE,
    LLAMA,
    MINISTRAL,
    MINISTRAL3,
    MISTRAL,
    SMOLLM3,
)
from mtjax.families.gpt.hugging_face.near_experts import (
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
from mtjax.families.gpt.hugging_face.near_gpt import BIOGPT, CODEGEN, GPT_BIGCODE, PERSIMMON
from mtjax.families.gpt.hugging_face.near_llama import (
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
from mtjax.families.gpt.hugging_face.neox import GLM, GLM4, GPT_NEOX, GPTJ, NEMOTRON, STABLELM, STARCODER2
from mtjax.families.gpt.hugging_face.olmo import EXAONE4, OLMO, OLMO2, OLMO3
from mtjax.families.gpt.hugging_face.phi import PHI, PHI3
from mtjax.families.gpt.hugging_face.qwen import QWEN2, QWEN3

TYPES = (
    *(GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3_TEXT, PHI, PHI3, OLMO, OLMO2, OLMO3, GRANITE),
    *(STARCODER2, GPT_NEOX, GPTJ, OPT, BLOOM, FALCON, MPT, COHERE, COHERE2, STABLELM, SMOLLM3, GLM4, EXAONE4),
    *(ERNIE4_5, HUNYUAN_V1_DENSE, NEMOTRON, MINISTRAL, MINISTRAL3),
    # YOUTU before DEEPSEEK_V2, which experts distinguish.
    *(YOUTU, MINICPM3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, GRANITEMOE, DOTS1, DEEPSEEK_V2, DEEPSEEK_V3, GPT_OSS),
    *(GLM, ARCEE, JAIS2, HELIUM, SEED_OSS, CWM, HYPERCLOVAX, EXAONE, INTERNLM3, IQUESTCODER, VAULTGEMMA),
    *(PERSIMMON, BIOGPT, GPT_BIGCODE, CODEGEN, GPT_NEO, OPENAI_GPT, SARVAM_MLA),
    *(GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN, SARVAM_MOE, MINIMAX_M2, EXAONE_MOE, MELLUM, FLEX_OLMO, HUNYUAN_V1_MOE),
    *(FLINT, HY_V3, GRANITEMOESHARED, GRANITE_SWA, GRANITEMOE_SWA, ERNIE4_5_MOE),
)
"""In the order in which an export prefers types that can represent a model equally well."""
