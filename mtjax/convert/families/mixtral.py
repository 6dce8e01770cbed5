"""transformers' `mixtral`: Llama's attention, and experts instead of the MLP (arXiv 2401.04088)."""

from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import expert_size
from mtjax.convert.families.family import Family, Field, Json
from mtjax.convert.families.llama import ATTENTION, BLOCK, FIELDS, LAYERS, read_decoder, table, write_decoder
from mtjax.convert.families.rows import experts, norm, row

ARCHITECTURE = "MixtralForCausalLM"
MIXTURE = f"{BLOCK}.block_sparse_moe"

EXPERTS = (
    *norm(f"{LAYERS}.experts_norm", f"{BLOCK}.post_attention_layernorm"),
    row(f"{LAYERS}.experts.router.weight", f"{MIXTURE}.gate.weight", "routes embed"),
    *experts(f"{LAYERS}.experts", f"{MIXTURE}.experts.{{expert}}", "w1", "w3", "w2"),
)


def _read(config: Json, names: frozenset[str]) -> dict[str, Any]:
    size = config.get("intermediate_size", 14336)
    return {**read_decoder(config, 1e6), "mlp_size": size, "expert_size": size, "bias": False}


def _write(model: Model) -> dict[str, Any]:
    return {**write_decoder(model), "intermediate_size": expert_size(model), "sliding_window": None}


MIXTRAL = Family(
    model_type="mixtral",
    architecture=ARCHITECTURE,
    table=table("mixtral", *ATTENTION, *EXPERTS),
    fields=(
        *FIELDS,
        Field("num_experts", "num_local_experts", 8),
        Field("experts_top_k", "num_experts_per_tok", 2),
    ),
    read=_read,
    write=_write,
    only={"hidden_act": ("silu", "swish"), "sliding_window": (None,)},
)
