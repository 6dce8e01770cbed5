"""transformers' `cohere` and `cohere2`: Command R and its successors."""

from mtjax.convert.model_types.decoder import ROPE, ROTARY, SIZES, SWIGLU, decoder, layer_norm, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    Settings,
    always,
    biases,
    every,
    fields,
    shortest,
    sliding,
    unused,
    windows,
)

PARTS = (
    SIZES,
    layer_norm(),
    SWIGLU,
    ROTARY,
    ROPE,
    biases("attention_bias"),
    fields(output_scale="logit_scale"),
    always(norm_bias=False, parallel_residual="one_norm"),
)
SIZES_OF_BOTH = sizes(8192, 22_528, 40, 64, None, 256_000, 8192) | {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def _read_norm(values: Json) -> Settings:
    # Each head has its own weights, [heads, head_dim].
    scope = {"qk_norm": True, "qk_norm_scope": "each_head", "qk_norm_kind": "layernorm"}
    return scope if values["use_qk_norm"] else {"qk_norm": False}


COHERE = decoder(
    "cohere",
    "Cohere",
    SIZES_OF_BOTH | {"rope_theta": 500_000.0, "use_qk_norm": False},
    *PARTS,
    ConfigKeys(("use_qk_norm",), _read_norm, lambda model: {"use_qk_norm": model.qk_norm}),
    names=ModuleNames(interleaved=True),
    classifies=False,
)

PATTERN = "sliding_window_pattern"


def _read_rotated(values: Json) -> Settings:
    """Reads which layers have RoPE: those with a window."""
    # transformers rotates queries and keys only in layers with a sliding window; full attention has no positions.
    return {"rope_layers": shortest(sliding(values, every(PATTERN)).translate(str.maketrans("SF", "RN")))}


COHERE2 = decoder(
    "cohere2",
    "Cohere2",
    SIZES_OF_BOTH | {"sliding_window": 4096, PATTERN: 4},
    *PARTS,
    windows(every(PATTERN), PATTERN),
    ConfigKeys((), _read_rotated, lambda model: {}, {"rope_layers": (PATTERN, "sliding_window", "layer_types")}),
    unused("head_dim"),  # always hidden_size / num_attention_heads
    names=ModuleNames(interleaved=True),
    classifies=False,
)
