"""transformers' further types that are Llama but for the activation, biases, windows or scales."""

from mtjax.config import Model
from mtjax.config.sizes import attention_biases
from mtjax.convert.model_types.decoder import (
    HEAD_DIM,
    LIKE_LLAMA,
    RMS_NORM,
    ROPE,
    ROTARY,
    SIZES,
    decoder,
    layer_norm,
    sizes,
)
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    activation,
    attention_settings,
    biases,
    check_factor,
    fields,
    unused,
    windows,
)
from mtjax.convert.model_types.rope import ORIGINAL
from mtjax.families.gpt.hugging_face.llama import GRANITE_SIZES, MULTIPLIERS

RELU2 = activation(gate=False, usual="relu2")
BIASES = biases("attention_bias", "mlp_bias")

ARCEE = decoder(
    "arcee",
    "Arcee",
    sizes(2560, 18_432, 32, 32, None, 32_000, 4096) | {"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    *(SIZES, RMS_NORM, RELU2, ROTARY, HEAD_DIM, ROPE, BIASES),
)
JAIS2 = decoder(
    "jais2",
    "Jais2",
    sizes(3328, 26_624, 32, 26, None, 150_272, 8192)
    | {"layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    *(SIZES, layer_norm(), RELU2, ROTARY, HEAD_DIM, ROPE, BIASES),
    classifies=False,
)
HELIUM = decoder(
    "helium",
    "Helium",
    sizes(2560, 7040, 24, 20, 20, 48_000, 4096) | {"rms_norm_eps": 1e-8, "rope_theta": 1e5, "head_dim": 128},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE),
    biases("attention_bias", "mlp_bias", with_attention="qkv"),
    names=ModuleNames(interleaved=True),
)


def _read_output_bias(values: Json) -> Settings:
    """Reads the biases of query, key and value, and that of attention's output."""
    inputs, output = bool(values["attention_bias"]), bool(values["attention_out_bias"])
    kinds = {(True, True): "all", (True, False): "qkv", (False, True): "output", (False, False): "none"}
    return attention_settings(kinds[inputs, output], mlp=bool(values["mlp_bias"]))


def _write_output_bias(model: Model) -> Json:
    inputs, output = attention_biases(model)
    return {**BIASES.write(model), "attention_bias": inputs, "attention_out_bias": output}


SEED_OSS = decoder(
    "seed_oss",
    "SeedOss",
    sizes(4096, 27_648, 64, 80, 8, 155_136, 524_288)
    | {"head_dim": 128, "attention_bias": True, "attention_out_bias": False}
    | {"attention_dropout": 0.1, "residual_dropout": 0.1},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE),
    ConfigKeys(("attention_bias", "attention_out_bias", "mlp_bias"), _read_output_bias, _write_output_bias),
    fields(hidden_dropout="residual_dropout"),
)
CWM = decoder(
    "cwm",
    "Cwm",
    sizes(6144, 21_504, 64, 48, 8, 128_256, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "head_dim": 128, "sliding_window": 8192}
    | {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            ORIGINAL: 8192,
        }
    },
    *(*LIKE_LLAMA, HEAD_DIM, ROPE),
    biases("", "mlp_bias"),
    # Without layer_types, every fourth layer is full, from the first on.
    windows(lambda values, layer: layer % 4 != 0),
    classifies=False,
)


def _read_clova(values: Json) -> Settings:
    """Reads where the norms are, and the factor of the scores, by default that of Llama."""
    check_factor(values, "head_dim")
    width = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    return {
        "norm_placement": "sandwich" if values["use_post_norm"] else "pre",
        "attention_scale": values["attention_multiplier"] or width**-0.5,
    }


HYPERCLOVAX = decoder(
    "hyperclovax",
    "HyperCLOVAX",
    GRANITE_SIZES | {"attention_multiplier": None, "use_post_norm": True},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, BIASES, *MULTIPLIERS),
    # Granite divides the logits by this key.
    fields(output_scale="logits_scaling"),
    ConfigKeys(("use_post_norm",), _read_clova, lambda model: {"use_post_norm": model.norm_placement == "sandwich"}),
    names=ModuleNames(attention_output_norm="post_norm1", mlp_output_norm="post_norm2"),
    classifies=False,
)

# transformers runs these by its class of Llama.
EXAONE = decoder(
    "exaone",
    "Llama",
    sizes(4096, 14_336, 32, 32, 8, 102_400, 4096) | {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, BIASES),
    names=ModuleNames(
        prefix="transformer.",
        embedding="wte",
        final_norm="ln_f",
        layer="h.{layer}",
        attention="attn.attention",
        attention_norm="ln_1",
        attention_output="out_proj",
        mlp_norm="ln_2",
        gate="c_fc_0",
        up="c_fc_1",
        down="c_proj",
    ),
    aliases={
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    classifies=False,
)
INTERNLM3 = decoder(
    "internlm3",
    "Llama",
    sizes(4096, 10_240, 48, 32, 2, 128_512, 32_768) | {"rms_norm_eps": 1e-5, "head_dim": 128},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, BIASES),
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    classifies=False,
)
IQUESTCODER = decoder(
    "iquestcoder",
    "Llama",
    sizes(5120, 27_648, 80, 40, 8, 76_800, 131_072) | {"rms_norm_eps": 1e-5, "head_dim": 128},
    *(*LIKE_LLAMA, HEAD_DIM, ROPE, BIASES),
    unused("sliding_window", "max_window_layers"),
    only={"clip_qkv": (None,), "use_sliding_window": (False, None)},
    classifies=False,
)
