"""transformers' types that are Llama but for few settings."""

from mtjax.config import Model
from mtjax.config.sizes import rotated_layers
from mtjax.convert.model_types.decoder import HEAD_DIM, LIKE_LLAMA, NO_BIASES, ROPE, decoder, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    always,
    biases,
    fields,
    scaled,
    shortest,
    used_windows,
    window,
    windows,
)
from mtjax.convert.model_types.rope import ORIGINAL, rope, rope_object

LLAMA = decoder(
    "llama",
    "Llama",
    sizes(4096, 11008, 32, 32, None, 32000, 2048),
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    biases("attention_bias", "mlp_bias"),
)

MISTRAL_SIZES = sizes(4096, 14336, 32, 32, 8, 32000, 131_072) | {"sliding_window": 4096}
MISTRAL = decoder("mistral", "Mistral", MISTRAL_SIZES, *LIKE_LLAMA, HEAD_DIM, ROPE, NO_BIASES, window())
MINISTRAL = decoder(
    "ministral",
    "Ministral",
    MISTRAL_SIZES,
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    NO_BIASES,
    # Without layer_types all layers have the window.
    windows(lambda values, layer: True),
)
BETA = "llama_4_scaling_beta"
"""Key within the object of RoPE."""


DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    ORIGINAL: 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    BETA: 0.1,
}
"""RoPE of a `ministral3` without or with null rope_parameters."""


def _write_beta(model: Model) -> Json:
    found = dict(ROPE.write(model))
    # transformers needs the length, whatever the kind of scaling.
    beta = {BETA: model.attention_scale_beta, ORIGINAL: model.rope_original_length}
    return found | {"rope_parameters": found["rope_parameters"] | beta, "rope_scaling": None}


def _read_beta(values: Json) -> Settings:
    given = rope_object(values)
    found = {"rope_original_length": given.get(ORIGINAL, values["max_position_embeddings"])}
    return {**found, **rope(BETA).read(values), "attention_scale_beta": float(given.get(BETA) or 0.0)}


MINISTRAL3 = decoder(
    "ministral3",
    "Ministral3",
    sizes(4096, 14336, 34, 32, 8, 131_072, 262_144)
    | {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"rope_parameters": DEFAULT_ROPE},
    *LIKE_LLAMA,
    HEAD_DIM,
    ConfigKeys(ROPE.keys, _read_beta, _write_beta, {**ROPE.named, "attention_scale_beta": BETA}),
    NO_BIASES,
    window(),
)


MULTIPLIERS = (
    fields(
        embedding_scale="embedding_multiplier",
        residual_scale="residual_multiplier",
        attention_scale="attention_multiplier",
    ),
    # Granite divides its logits.
    scaled("output_scale", "logits_scaling", lambda divisor: 1 / divisor, lambda scale: 1 / scale),
)
GRANITE_SIZES = sizes(4096, 11008, 32, 32, None, 32000, 2048) | dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
GRANITE = decoder(
    "granite",
    "Granite",
    GRANITE_SIZES,
    *LIKE_LLAMA,
    ROPE,
    biases("attention_bias", "mlp_bias"),
    *MULTIPLIERS,
    classifies=False,
)


def _rotates(values: Json) -> list[bool]:
    """Returns of each layer whether it has RoPE."""
    layers, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    given = values.get("no_rope_layers")
    # Despite its name, no_rope_layers has 1 for a layer with RoPE.
    return [bool(one) for one in given] if given else [(i + 1) % interval != 0 for i in range(layers)]


NO_ROPE = ConfigKeys(
    ("no_rope_layers", "no_rope_layer_interval"),
    lambda values: {"rope_layers": shortest(["R" if one else "N" for one in _rotates(values)])},
    lambda model: {"no_rope_layers": [int(one) for one in rotated_layers(model)]},
)
SMOLLM3 = decoder(
    "smollm3",
    "SmolLM3",
    sizes(2048, 11008, 36, 16, 4, 128_256, 32_768)
    | {"rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4}
    | {"use_sliding_window": False, "sliding_window": None},
    *LIKE_LLAMA,
    ROPE,
    biases("attention_bias", "mlp_bias"),
    NO_ROPE,
    used_windows(lambda values, layer: not _rotates(values)[layer]),
)

ERNIE4_5 = decoder(
    "ernie4_5",
    "Ernie4_5",
    sizes(1024, 3072, 18, 16, 2, 103_424, 131_072)
    | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "head_dim": 128, "use_bias": False},
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    biases("use_bias", "use_bias"),
    names=ModuleNames(interleaved=True),
    classifies=False,
)


def read_alpha(values: Json) -> Settings:
    """Reads RoPE with `alpha`, which is the same as another base at every length."""
    given = rope_object(values)
    alpha = given.get("alpha")
    if not alpha or given.get("rope_type", given.get("type")) != "dynamic":
        return ROPE.read(values)
    width = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    # Published files call it "dynamic", but a fixed alpha makes the base independent of the length.
    theta = given.get("rope_theta", values["rope_theta"]) * alpha ** (width / (width - 2))
    return {"rope_theta": float(theta), "rope_scaling": "none"}


HUNYUAN_V1_DENSE = decoder(
    "hunyuan_v1_dense",
    "HunYuanDenseV1",
    sizes(4096, 11008, 32, 32, None, 290_943, 2048) | {"rms_norm_eps": 1e-5},
    *LIKE_LLAMA,
    HEAD_DIM,
    ConfigKeys(ROPE.keys, read_alpha, ROPE.write, ROPE.named),
    biases("attention_bias"),
    # Other types normalize before RoPE; with weights that differ between channels the order matters.
    always(qk_norm=True, qk_norm_after_rope=True),
    names=ModuleNames(query_norm="query_layernorm", key_norm="key_layernorm"),
    # Published files share these with the type that has experts.
    only={"qk_norm": (True,), "use_qk_norm": (True,), "num_experts": (1, None), "use_cla": (False,)},
)
