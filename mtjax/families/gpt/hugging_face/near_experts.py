"""transformers' further types with experts, whose layers are those of the types in the other files."""

from dataclasses import replace
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import dense_layers, dense_settings, expert_size
from mtjax.convert.model_types.decoder import HEAD_DIM, LIKE_LLAMA, NO_BIASES, ROPE, decoder, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    always,
    biases,
    fields,
    shortest,
    sliding,
    unused,
    windows,
)
from mtjax.convert.model_types.rope import rope, rope_by_layer
from mtjax.convert.model_types.value_kinds import COUNT_OR_LETTERS, COUNT_OR_LIST
from mtjax.errors import UserError, shortened
from mtjax.families.gpt.hugging_face.deepseek import (
    NEIGHBOURS,
    NO_MORE_TOKENS,
    V3_ONLY,
    V3_PARTS,
    V3_SIZES,
    after_last,
    latent_rows,
)
from mtjax.families.gpt.hugging_face.experts import (
    AFTER_FIRST,
    DEEPSEEK,
    NORMALIZED,
    QWEN_EXPERTS,
    QWEN_ROWS,
    SAME_SIZE,
    SIGMOID,
    SIGMOID_KEYS,
    SPARSE,
    TOP_K,
    ExpertNames,
    counted,
    groups,
    shared_experts,
)
from mtjax.families.gpt.hugging_face.llama import read_alpha
from mtjax.families.gpt.hugging_face.neox import rotated_share
from mtjax.families.gpt.hugging_face.olmo import ON_OUTPUTS, ROTATED, WIDTH_NORM, WINDOW_PART

FRACTION = "partial_rotary_factor"
PARTIAL = rope(fraction=FRACTION)
GLM_SIZES = (
    sizes(4096, 10_944, 46, 96, 8, 151_552, 131_072)
    | {"rms_norm_eps": 1e-5, FRACTION: 0.5, "use_qk_norm": False, "first_k_dense_replace": 1, "norm_topk_prob": True}
    | {"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.0}
)
GLM_PARTS = (
    *(*LIKE_LLAMA, HEAD_DIM, PARTIAL, biases("attention_bias", with_attention="qkv")),
    fields(qk_norm="use_qk_norm"),
    counted("n_routed_experts", "num_local_experts", default=128),
    *(shared_experts("n_shared_experts"), groups(), SIGMOID, AFTER_FIRST, NORMALIZED, NO_MORE_TOKENS),
)
GLM4_MOE = decoder(
    "glm4_moe",
    "Glm4Moe",
    GLM_SIZES,
    *GLM_PARTS,
    rows=DEEPSEEK.rows,
    # Published files have the layer of multi-token prediction, which transformers does not read.
    ignored=after_last,
    only=SIGMOID_KEYS,
    classifies=False,
)
SOLAR_OPEN = decoder(
    "solar_open",
    "SolarOpen",
    GLM_SIZES
    | sizes(4096, None, 48, 64, 8, 196_608, 131_072)
    | {"rms_norm_eps": 1e-5, FRACTION: 1.0, "first_k_dense_replace": 0, "head_dim": 128, "rope_theta": 1e6}
    | {"moe_intermediate_size": 1280},
    *GLM_PARTS,
    rows=DEEPSEEK.rows,
    only={**SIGMOID_KEYS, "use_qk_norm": (False,), "first_k_dense_replace": (0,), FRACTION: (1.0,)},
    classifies=False,
)
SARVAM_MOE = decoder(
    "sarvam_moe",
    "Glm4Moe",
    GLM_SIZES
    | sizes(4096, 8192, 19, 64, 4, 262_144, 131_072)
    | {FRACTION: 1.0, "use_qk_norm": True, "head_dim": 64, "rope_theta": 8e6, "initializer_range": 0.006}
    | {"moe_intermediate_size": 1024, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5},
    *GLM_PARTS,
    names=ModuleNames(
        embedding="word_embeddings",
        attention="attention",
        qkv="query_key_value",
        attention_output="dense",
        query_norm="query_layernorm",
        key_norm="key_layernorm",
    ),
    rows=ExpertNames(selection_bias="gate.expert_bias").rows,
    only=SIGMOID_KEYS,
    aliases={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    classifies=False,
)


def _read_rotary_dim(values: Json) -> Settings:
    share = rotated_share(values.get("rotary_dim"), values["head_dim"])
    # rotary_dim is the older key: a partial_rotary_factor wins.
    return PARTIAL.read({FRACTION: share, **values})


MINIMAX_M2 = decoder(
    "minimax_m2",
    "MiniMaxM2",
    sizes(3072, 1536, 62, 48, 8, 200_064, 196_608)
    | {"rope_theta": 5e6, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8},
    *(*LIKE_LLAMA, HEAD_DIM, NO_BIASES, TOP_K, SAME_SIZE, SIGMOID),
    ConfigKeys((*PARTIAL.keys, "rotary_dim"), _read_rotary_dim, PARTIAL.write, PARTIAL.named),
    # Fixed in transformers' code of MiniMax-M2.
    always(qk_norm=True, qk_norm_scope="width", router_normalize=True),
    rows=ExpertNames(SPARSE, gate="w1", up="w3", down="w2", selection_bias="e_score_correction_bias").rows,
    only={"scoring_func": ("sigmoid",), "use_routing_bias": (True,), "use_qk_norm": (True,)}
    | {"qk_norm_type": ("per_layer",), "shared_intermediate_size": (0,)},
    classifies=False,
    aliases={"num_experts": "num_local_experts"},
)


def _read_kinds(values: Json) -> Settings:
    """Reads which layers have experts from a list, or the number of dense ones before them."""
    layers = values["num_hidden_layers"]
    first = values.get("first_k_dense_replace", 0)
    kinds = values.get("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(layers)]
    settings = dense_settings([i for i, kind in enumerate(kinds) if kind == "dense"], layers)
    if len(kinds) != layers or "sparse" not in kinds or settings is None or "moe_every" in settings:
        raise UserError(
            f"mlp_layer_types is {kinds}, but must be {layers} kinds (num_hidden_layers): dense ones, then sparse ones"
        )
    return settings


def _write_kinds(model: Model) -> Json:
    dense = len(dense_layers(model))
    return {
        "first_k_dense_replace": dense,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(model.num_layers)],
    }


MLP_KINDS = ConfigKeys(("mlp_layer_types", "first_k_dense_replace"), _read_kinds, _write_kinds)

GLM4_MOE_LITE = decoder(
    "glm4_moe_lite",
    "Glm4MoeLite",
    V3_SIZES
    | sizes(2048, 10_240, 47, 20, 20, 154_880, 202_752)
    | {"rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "first_k_dense_replace": 1}
    | {"n_routed_experts": 64, "moe_intermediate_size": 1536, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    | {"routed_scaling_factor": 1.8},
    *(*V3_PARTS, MLP_KINDS),
    names=NEIGHBOURS,
    rows=latent_rows,
    ignored=after_last,
    only={key: values for key, values in V3_ONLY.items() if key != "mlp_only_layers"},
    classifies=False,
    aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
)
EXAONE_MOE = decoder(
    "exaone_moe",
    "ExaoneMoe",
    sizes(4096, 16_384, 32, 32, 32, 102_400, 2048)
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1}
    | {"moe_intermediate_size": 1024, "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True}
    | {"routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
    # EXAONE 4's windows, with DeepSeek-V3's experts.
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, NO_BIASES, always(qk_norm=True), WINDOW_PART),
    ROTATED,
    counted("num_experts", default=64),
    *(shared_experts("num_shared_experts"), groups(), SIGMOID, AFTER_FIRST, NORMALIZED, MLP_KINDS),
    rows=ExpertNames(selection_bias="e_score_correction_bias").rows,
    ignored=lambda model: (r"mtp\..*",),
    only=SIGMOID_KEYS,
    classifies=False,
    kinds={"sliding_window_pattern": COUNT_OR_LETTERS},
)
HY_V3 = decoder(
    "hy_v3",
    "HYV3",
    sizes(4096, 13_312, 80, 64, 8, 120_832, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 11_158_840.0, "head_dim": 128, "initializer_range": 0.006}
    | {"moe_intermediate_size": 1536, "num_experts_per_tok": 8, "num_shared_experts": 1, "first_k_dense_replace": 1}
    | {"router_scaling_factor": 2.826},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, biases("attention_bias"), always(qk_norm=True, router_normalize=True), SIGMOID),
    counted("num_experts", "num_local_experts", default=192),
    shared_experts("num_shared_experts"),
    fields(experts_top_k="num_experts_per_tok", router_scale="router_scaling_factor"),
    fields(expert_size="moe_intermediate_size"),
    *(MLP_KINDS, unused("enable_moe_fp32_combine")),
    rows=ExpertNames(router="router.gate", shared="shared_mlp", selection_bias="expert_bias").rows,
    ignored=after_last,
    only={"mlp_bias": (False,)},
    classifies=False,
)
ROPE_OF_MELLUM = rope_by_layer(local_theta=10_000.0)
MELLUM_THETA = 5e5


def _read_mellum_rope(values: Json) -> Settings:
    """Reads RoPE; transformers ignores rope_theta outside of rope_parameters."""
    if values["rope_theta"] != MELLUM_THETA and not values.get("rope_parameters"):
        raise UserError(f"rope_theta is {values['rope_theta']}, but must be in rope_parameters, by kind of layers")
    return ROPE_OF_MELLUM.read(values)


MELLUM = decoder(
    "mellum",
    "Mellum",
    sizes(2304, 7168, 28, 32, 4, 98_304, 131_072)
    | {"rope_theta": MELLUM_THETA, "head_dim": 128, "sliding_window": 1024, "moe_intermediate_size": 896}
    | {"num_experts_per_tok": 8, "norm_topk_prob": True},
    *(*LIKE_LLAMA, HEAD_DIM, biases("attention_bias"), always(qk_norm=True)),
    # In transformers 5 alone, which drops its RoPE where the keys of 4 are null.
    ConfigKeys(
        ROPE_OF_MELLUM.keys,
        _read_mellum_rope,
        lambda model: {"rope_parameters": ROPE_OF_MELLUM.write(model)["rope_parameters"]},
        ROPE_OF_MELLUM.named,
    ),
    # Without layer_types no layer has a window.
    windows(lambda values, layer: False),
    counted("num_local_experts", "num_experts", default=64),
    fields(experts_top_k="num_experts_per_tok", expert_size="moe_intermediate_size", router_normalize="norm_topk_prob"),
    *(MLP_KINDS, NO_MORE_TOKENS, unused("mtp_layer_types", "mtp_mlp_layer_types")),
    rows=QWEN_ROWS,
    ignored=lambda model: (r"mtp\..*",),
    classifies=False,
)


def _is_local(values: Json, layer: int) -> bool:
    # transformers' default of Flint's layer_types.
    return not (layer < 2 or layer % 4 == 1 or layer == values["num_hidden_layers"] - 1)


def _read_local_rope(values: Json) -> Settings:
    """Reads which layers have RoPE: those with a window."""
    return {"rope_layers": shortest(sliding(values, _is_local).translate(str.maketrans("SF", "RN")))}


FLINT = decoder(
    "flint",
    "Flint",
    sizes(2048, 6144, 49, 32, 4, 150_144, 262_144)
    | {"head_dim": 128, "sliding_window": 513, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024}
    | {"num_experts_per_tok": 6, "num_experts": 256, "norm_topk_prob": True}
    | {"decoder_sparse_step": 1, "mlp_only_layers": [0, 1]},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, biases("attention_bias"), *QWEN_EXPERTS),
    always(qk_norm=True, attention_sinks=True, router_score="sigmoid"),
    fields(num_experts="num_experts", shared_expert_size="shared_expert_intermediate_size"),
    windows(_is_local),
    ConfigKeys((), _read_local_rope, lambda model: {}, {"rope_layers": ("sliding_window", "layer_types")}),
    names=ModuleNames(sinks="softmax_offset"),
    rows=QWEN_ROWS,
    classifies=False,
)
FLEX_OLMO = decoder(
    "flex_olmo",
    "FlexOlmo",
    sizes(4096, 11_008, 32, 32, None, 100_352, 4096)
    | {"rope_theta": 5e5, "num_experts_per_tok": 5, "norm_topk_prob": False},
    *(*LIKE_LLAMA, ROPE, biases("attention_bias"), WIDTH_NORM, SAME_SIZE),
    counted("num_experts", "num_local_experts", default=7),
    fields(experts_top_k="num_experts_per_tok", router_normalize="norm_topk_prob"),
    # OLMo 2's attention, with experts.
    names=ON_OUTPUTS,
    rows=QWEN_ROWS,
    classifies=False,
)


def _one_of(values: Json, key: str) -> Any:
    """Returns a value that may be a list of equal ones, one for each layer."""
    found = values[key]
    if isinstance(found, list) and len(set(found)) == 1:
        return found[0]
    if isinstance(found, list):
        raise UserError(f"{key} differs between layers ({shortened(found)}), but must be the same in all")
    return found


def _read_hunyuan(values: Json) -> Settings:
    chosen = {"num_experts": _one_of(values, "num_experts"), "experts_top_k": _one_of(values, "moe_topk")}
    # Hunyuan has one shared expert, as wide as the others.
    return {**chosen, "expert_size": values["intermediate_size"], "shared_expert_size": values["intermediate_size"]}


HUNYUAN_V1_MOE = decoder(
    "hunyuan_v1_moe",
    "HunYuanMoEV1",
    sizes(4096, 11_008, 32, 32, None, 290_943, 2048) | {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    *(*LIKE_LLAMA, HEAD_DIM, biases("attention_bias"), always(qk_norm=True, qk_norm_after_rope=True)),
    ConfigKeys(ROPE.keys, read_alpha, ROPE.write, ROPE.named),
    ConfigKeys(
        ("num_experts", "moe_topk"),
        _read_hunyuan,
        lambda model: {
            "num_experts": model.num_experts,
            "moe_topk": model.experts_top_k,
            "intermediate_size": expert_size(model),
        },
        {
            "experts_top_k": "moe_topk",
            **dict.fromkeys(("expert_size", "shared_expert_size"), "intermediate_size"),
        },
    ),
    names=ModuleNames(query_norm="query_layernorm", key_norm="key_layernorm"),
    rows=ExpertNames(router="gate.wg", shared="shared_mlp").rows,
    only={"qk_norm": (True,), "use_qk_norm": (True,), "use_cla": (False,)},
    aliases={"num_local_experts": "num_experts", "num_experts_per_tok": "moe_topk"},
    kinds=dict.fromkeys(("num_experts", "moe_topk"), COUNT_OR_LIST),
)


def _read_interval(values: Json) -> Settings:
    """Reads which layers have experts: some, by their numbers and an interval."""
    layers, start, end = (values[key] for key in ("num_hidden_layers", "moe_layer_start_index", "moe_layer_end_index"))
    interval, last = values["moe_layer_interval"], layers - 1 if end == -1 else end
    dense = [i for i in range(layers) if not (start <= i <= last and (i + 1) % interval == 0)]
    settings = dense_settings(dense, layers) if len(dense) < layers else None
    if settings is None:
        raise UserError(
            f"moe_layer_start_index {start}, moe_layer_end_index {end} and moe_layer_interval {interval} put experts "
            f"in {layers - len(dense)} of {layers} layers, a pattern that mtjax does not support; supported: all, "
            "all after the first k, every N-th"
        )
    return {"first_dense_layers": 0, "moe_every": 1} | settings


def _write_interval(model: Model) -> Json:
    return {
        "moe_layer_interval": model.moe_every,
        "moe_layer_start_index": model.first_dense_layers,
        "moe_layer_end_index": model.num_layers - 1,
    }


ERNIE4_5_MOE = decoder(
    "ernie4_5_moe",
    "Ernie4_5_Moe",
    sizes(2560, 12_288, 28, 20, 4, 103_424, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "moe_intermediate_size": 1536}
    | {"moe_k": 6, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
    | {"moe_layer_end_index": -1, "moe_layer_interval": 1},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, NO_BIASES),
    # A softmax with a bias that only selects, unlike DeepSeek-V3's sigmoid.
    always(router_bias=True, router_normalize=True),
    fields(num_experts="moe_num_experts", experts_top_k="moe_k", expert_size="moe_intermediate_size"),
    shared_experts("moe_num_shared_experts", least=0),
    ConfigKeys(("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"), _read_interval, _write_interval),
    names=ModuleNames(interleaved=True),
    # The bias is [1, experts] there.
    rows=replace(DEEPSEEK, selection_bias="moe_statics.e_score_correction_bias", selection_dims=((), ("routes",))).rows,
    ignored=lambda model: (r"(.*\.)?mtp.*",),
    only={"use_bias": (False,), "moe_norm_min": (1e-12,)},
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    classifies=False,
)
