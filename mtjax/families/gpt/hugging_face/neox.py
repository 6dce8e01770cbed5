"""transformers' types with layer norm and partial RoPE: GPT-NeoX, GPT-J, StableLM, StarCoder2, Nemotron and GLM."""

from dataclasses import replace

from mtjax.config.sizes import head_dim
from mtjax.convert.model_types.decoder import (
    HEAD_DIM,
    LIKE_LLAMA,
    ROTARY,
    SIZES,
    SWIGLU,
    decoder,
    layer_norm,
    size_fields,
    sizes,
)
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import GPT2_ALIASES, Json
from mtjax.convert.model_types.parts import ConfigKeys, Settings, activation, always, biases, fields, window
from mtjax.convert.model_types.rope import rope
from mtjax.errors import UserError

FRACTION = "partial_rotary_factor"


def _check_head_dim(values: Json) -> Settings:
    """Refuses heads of another width, which transformers would rotate as if they had it."""
    if values.get("head_dim") is None:
        return {}
    width = values["hidden_size"] // values["num_attention_heads"]
    if values["head_dim"] != width:
        raise UserError(
            f"head_dim is {values['head_dim']!r}, but must be hidden_size / num_attention_heads, {width}, in a gpt_neox"
        )
    return {}


GPT_NEOX = decoder(
    "gpt_neox",
    "GPTNeoX",
    sizes(6144, 24_576, 44, 64, None, 50_432, 2048)
    | {"layer_norm_eps": 1e-5, "rotary_pct": 0.25, "rotary_emb_base": 10_000.0, "hidden_act": "gelu"}
    | {"use_parallel_residual": True, "attention_bias": True, "hidden_dropout": 0.0},
    layer_norm(),
    size_fields(num_kv_heads="", hidden_dropout="hidden_dropout"),
    activation(gate=False),
    ROTARY,
    rope(fraction="rotary_pct", theta="rotary_emb_base"),
    biases("attention_bias", with_mlp=True),
    ConfigKeys(("head_dim",), _check_head_dim, lambda _: {}),
    ConfigKeys(
        ("use_parallel_residual",),
        lambda values: {"parallel_residual": "two_norms" if values["use_parallel_residual"] else "no"},
        lambda model: {"use_parallel_residual": model.parallel_residual != "no"},
    ),
    names=ModuleNames(
        prefix="gpt_neox.",
        embedding="embed_in",
        final_norm="final_layer_norm",
        output="embed_out",
        attention="attention",
        qkv="query_key_value",
        qkv_order="groups",
        attention_output="dense",
        up="dense_h_to_4h",
        down="dense_4h_to_h",
    ),
)


def rotated_share(rotary_dim: int | None, width: int) -> float:
    """Returns which share of a head's width is rotated; None is all of it.

    Raises:
      UserError: no head has so many channels.
    """
    if rotary_dim is not None and not 0 < rotary_dim <= width:
        raise UserError(f"rotary_dim is {rotary_dim!r}, and must be above 0 and at most {width}, the width of a head")
    return 1.0 if rotary_dim is None else rotary_dim / width


def _read_rotary_dim(values: Json) -> Settings:
    share = rotated_share(values["rotary_dim"], values["n_embd"] // values["n_head"])
    return {"rope_theta": 10_000.0, "rope_fraction": share}


GPTJ_SIZES = (
    {"n_embd": 4096, "n_layer": 28, "n_head": 16, "n_inner": None, "n_positions": 2048, "vocab_size": 50_400}
    | {"layer_norm_epsilon": 1e-5, "rotary_dim": 64, "activation_function": "gelu_new", "resid_pdrop": 0.0}
    | {"attn_pdrop": 0.0, "initializer_range": 0.02, "tie_word_embeddings": False}
)
GPT_SIZE_FIELDS = size_fields(
    num_layers="n_layer",
    hidden_size="n_embd",
    num_heads="n_head",
    num_kv_heads="",
    mlp_size="n_inner",
    sequence_length="n_positions",
    hidden_dropout="resid_pdrop",
    attention_dropout="attn_pdrop",
)
GPTJ_PARTS = (
    layer_norm("layer_norm_epsilon"),
    GPT_SIZE_FIELDS,
    activation("activation_function", gate=False, usual="gelu_new"),
    ROTARY,
    ConfigKeys(
        ("rotary_dim",), _read_rotary_dim, lambda model: {"rotary_dim": round(model.rope_fraction * head_dim(model))}
    ),
    # The MLP and the logits have biases, attention has none.
    biases(with_mlp=True),
    # Attention and MLP read the same norm; GPT-NeoX has one for each.
    always(parallel_residual="one_norm", output_bias=True),
)
GPTJ_NAMES = ModuleNames(
    prefix="transformer.",
    embedding="wte",
    final_norm="ln_f",
    layer="h.{layer}",
    attention="attn",
    attention_norm="ln_1",
    attention_output="out_proj",
    up="fc_in",
    down="fc_out",
    interleaved=True,
)
GPTJ = decoder("gptj", "GPTJ", GPTJ_SIZES, *GPTJ_PARTS, names=GPTJ_NAMES, aliases=GPT2_ALIASES)


def _read_stablelm(values: Json) -> Settings:
    scope = {"qk_norm": True, "qk_norm_scope": "each_head", "qk_norm_kind": "layernorm"}
    parallel = "one_norm" if values["use_parallel_residual"] else "no"
    return {"parallel_residual": parallel, **(scope if values["qk_layernorm"] else {"qk_norm": False})}


STABLELM = decoder(
    "stablelm",
    "StableLm",
    sizes(2560, 6912, 32, 32, 32, 50_304, 4096)
    | {"layer_norm_eps": 1e-5, FRACTION: 0.25, "use_qkv_bias": False, "qk_layernorm": False}
    | {"use_parallel_residual": False, "hidden_dropout": 0.0},
    SIZES,
    layer_norm(),
    SWIGLU,
    ROTARY,
    rope(fraction=FRACTION),
    biases("use_qkv_bias", with_attention="qkv"),
    ConfigKeys(
        ("use_parallel_residual", "qk_layernorm"),
        _read_stablelm,
        lambda model: {"use_parallel_residual": model.parallel_residual != "no", "qk_layernorm": model.qk_norm},
    ),
    fields(hidden_dropout="hidden_dropout"),
    # A separate module for each head.
    names=ModuleNames(query_norm="q_layernorm.norms.{head}", key_norm="k_layernorm.norms.{head}"),
)

STARCODER2 = decoder(
    "starcoder2",
    "Starcoder2",
    sizes(3072, 12_288, 30, 24, 2, 49_152, 4096)
    | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None, "hidden_act": "gelu_pytorch_tanh"}
    | {"tie_word_embeddings": True, "residual_dropout": 0.0, "initializer_range": 0.018042},
    SIZES,
    layer_norm("norm_epsilon"),
    activation(gate=False),
    ROTARY,
    rope(),
    biases("use_bias", "use_bias"),
    window(),
    fields(hidden_dropout="residual_dropout"),
    ConfigKeys((), lambda values: {}, lambda model: {"embedding_dropout": model.hidden_dropout}),
    names=ModuleNames(up="c_fc", down="c_proj"),
)

NEMOTRON = decoder(
    "nemotron",
    "Nemotron",
    sizes(6144, 24_576, 32, 48, None, 256_000, 4096)
    | {"norm_eps": 1e-5, "hidden_act": "relu2", FRACTION: 0.5, "initializer_range": 0.0134},
    SIZES,
    HEAD_DIM,
    layer_norm("norm_eps"),
    activation(gate=False),
    ROTARY,
    rope(fraction=FRACTION),
    biases("attention_bias", "mlp_bias"),
    always(norm_weight="offset"),
)

GLM_PARTS = (*LIKE_LLAMA, HEAD_DIM, rope(fraction=FRACTION), biases("attention_bias", with_attention="qkv"))
GLM_SIZES = sizes(4096, 13_696, 40, 32, 2, 151_552, 131_072) | {
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 128,
    FRACTION: 0.5,
    "attention_bias": True,
}
GLM_NAMES = ModuleNames(gate_up="gate_up_proj", interleaved=True)
GLM = decoder("glm", "Glm", GLM_SIZES, *GLM_PARTS, names=GLM_NAMES)
GLM4 = decoder(
    "glm4",
    "Glm4",
    GLM_SIZES,
    *GLM_PARTS,
    # GLM-4 is GLM with norms of the sublayers' outputs.
    always(norm_placement="sandwich"),
    names=replace(GLM_NAMES, attention_output_norm="post_self_attn_layernorm", mlp_output_norm="post_mlp_layernorm"),
)
