"""transformers' `nemotron_h`: Mamba-2, attention, MLPs and experts, one in each layer."""

from collections.abc import Mapping

from mtjax.config import Model
from mtjax.config.layer_pattern import expanded, shortened_pattern
from mtjax.config.ssm import letters_of
from mtjax.convert.model_types.decoder import HEAD_DIM, decoder, size_fields, sizes
from mtjax.convert.model_types.decoder_rows import LAYERS, ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, all_named, always, biases, fields, unused
from mtjax.convert.model_types.rows import linear
from mtjax.convert.table import Row, Tensor, dims
from mtjax.families.gpt.hugging_face.experts import NORMALIZED, ExpertNames, groups
from mtjax.families.hybrid.hugging_face.hybrid import (
    ATTENTION,
    FLOOR,
    INITIAL,
    KINDS,
    STATE_SPACE,
    read_types,
    rms_norm,
)
from mtjax.families.hybrid.hugging_face.hybrid_rows import hybrid_rows


def _read_pattern(values: Json) -> Settings:
    """Reads Nemotron-H's layers, which versions of transformers write as letters or as a list."""
    kinds, letters = values.get("layers_block_type"), values.get("hybrid_override_pattern")
    if kinds is None and letters is None:
        # transformers' default.
        kinds = [STATE_SPACE, "moe", ATTENTION, "mlp"]
    # The list wins, as in transformers, where the letters are an older key.
    letters = expanded(letters) if kinds is None else read_types(kinds, "layers_block_type")
    counted = {"num_experts": values["n_routed_experts"]} if "E" in letters else {"num_experts": 0}
    return {"layer_pattern": shortened_pattern(letters), **counted}


def _write_pattern(model: Model) -> Json:
    letters = letters_of(model)
    return {
        "layers_block_type": [KINDS[letter] for letter in letters],
        "hybrid_override_pattern": letters,
        "num_hidden_layers": len(letters),
        # Without experts transformers does not read the key, so its default is written.
        "n_routed_experts": model.num_experts or 8,
    }


_PATTERN_NAMES = {"layer_pattern": ("layers_block_type", "hybrid_override_pattern"), "num_experts": "n_routed_experts"}
PATTERN_KEYS = ("layers_block_type", "hybrid_override_pattern", "num_hidden_layers", "n_routed_experts")
EXPERT_FIELDS: Mapping[str, str] = {
    "experts_top_k": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_expert_size": "moe_shared_expert_intermediate_size",
    "router_scale": "routed_scaling_factor",
}
_EXPERTS = (*(groups(), NORMALIZED, fields(**EXPERT_FIELDS)), always(router_score="sigmoid", router_bias=True))
_EXPERT_KEYS = tuple(dict.fromkeys(key for part in _EXPERTS for key in part.keys))


def _read_experts(values: Json) -> Settings:
    """Reads the settings of experts, in a model that has any."""
    if not _read_pattern(values)["num_experts"]:
        return {}
    return {name: value for part in _EXPERTS for name, value in part.read(values).items()}


def _write_experts(model: Model) -> Json:
    return {key: value for part in _EXPERTS for key, value in part.write(model).items()} if model.num_experts else {}


NEMOTRON_MLP = ModuleNames(
    prefix="backbone.",
    embedding="embeddings",
    final_norm="norm_f",
    attention="mixer",
    attention_norm="norm",
    mlp="mixer",
    mlp_norm="norm",
)


def _nemotron_experts(names: ModuleNames) -> tuple[Row, ...]:
    """Returns the rows of experts without a gate."""
    ours, theirs = f"{LAYERS}.experts", f"{names.block}mixer"
    up = Tensor(f"{theirs}.experts.{{expert}}.up_proj.weight", dims("mlp embed"), each=True)
    return (
        *ExpertNames("mixer").mixture_rows(names),  # of these, the rows with a gate fit none of its parameters
        Row(f"{ours}.up.weight", (up,)),
        *linear(f"{ours}.shared.up", f"{theirs}.shared_experts.up_proj", "embed", "mlp"),
    )


NEMOTRON_H = decoder(
    "nemotron_h",
    "NemotronH",
    sizes(4096, 21_504, 1, 32, 8, 131_072, 4096)
    | {"layer_norm_epsilon": 1e-5, "head_dim": 128, "mlp_hidden_act": "relu2", "ssm_state_size": 128}
    | {"mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001}
    | {"n_routed_experts": 8, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
    | {"num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    size_fields(num_layers=""),
    HEAD_DIM,
    rms_norm("layer_norm_epsilon"),
    always(position="none"),
    activation("mlp_hidden_act", gate=False),
    biases("attention_bias", "mlp_bias"),
    ConfigKeys(PATTERN_KEYS, _read_pattern, _write_pattern, _PATTERN_NAMES),
    ConfigKeys(_EXPERT_KEYS, _read_experts, _write_experts, all_named(_EXPERTS)),
    fields(
        ssm_heads="mamba_num_heads",
        ssm_head_dim="mamba_head_dim",
        ssm_state="ssm_state_size",
        ssm_groups="n_groups",
        ssm_conv="conv_kernel",
    ),
    FLOOR,
    INITIAL,
    unused("residual_in_fp32", "expand", "time_step_limit", "num_logits_to_keep", "use_mamba_kernels"),
    unused(
        "mamba_ssm_cache_dtype",
        "n_shared_experts",
        "moe_shared_expert_overlap",
        "mtp_layers_block_type",
        "num_nextn_predict_layers",
    ),
    # Each layer has one mixer, whatever its kind, with one norm: all are called `mixer` and `norm`.
    names=NEMOTRON_MLP,
    rows=hybrid_rows("mixer", _nemotron_experts),
    ignored=lambda model: (r"mtp\..*",),
    only={
        "use_bias": (False,),
        "use_conv_bias": (True,),
        "mamba_proj_bias": (False,),
        "hidden_dropout": (0.0, 0),
        "mamba_hidden_act": ("silu",),
        "sliding_window": (None,),
        "moe_latent_size": (None,),
    },
    classifies=False,
    aliases={"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
)
