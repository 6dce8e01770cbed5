"""transformers' `gemma`, `gemma2`, `gemma3_text` and `vaultgemma` (arXiv 2403.08295, 2408.00118, 2503.19786,
2510.15001)."""

from dataclasses import replace

from mtjax.convert.model_types.decoder import HEAD_DIM, RMS_NORM, ROPE, ROTARY, SIZES, decoder, sizes
from mtjax.convert.model_types.decoder_rows import ModuleNames
from mtjax.convert.model_types.parts import (
    ConfigKeys,
    activation,
    always,
    biases,
    every,
    fields,
    given,
    scaled,
    windows,
)
from mtjax.convert.model_types.rope import rope_by_layer

TANH = "gelu_pytorch_tanh"
TANHS = (TANH, "gelu_new", "gelu_fast")
"""transformers' names of it."""
# Not in config.json: transformers multiplies embeddings by the root of hidden_size. A model with another factor fails
# the round trip in `ModelType.misfits`.
EMBEDDING = ConfigKeys((), lambda values: {"embedding_scale": values["hidden_size"] ** 0.5}, lambda model: {})
# Norms multiply by 1 + weight.
COMMON = (SIZES, RMS_NORM, ROTARY, HEAD_DIM, biases("attention_bias"), always(norm_weight="offset"), EMBEDDING)
HEADS = {"head_dim": 256, "tie_word_embeddings": True}

GEMMA = decoder(
    "gemma",
    "Gemma",
    sizes(3072, 24_576, 28, 16, 16, 256_000, 8192) | HEADS,
    *COMMON,
    ROPE,
    # Published configs say "gelu", by which they mean the tanh approximation.
    always(activation="geglu"),
    given(hidden_act=TANH, hidden_activation=TANH),
    only={"hidden_act": ("gelu", *TANHS), "hidden_activation": (None, "gelu", *TANHS)},
)

SANDWICH = ModuleNames(
    attention_output_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
GEMMA2_DEFAULTS = (
    sizes(2304, 9216, 26, 8, 4, 256_000, 8192)
    | HEADS
    | {"hidden_activation": TANH, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
)
GEMMA2_PARTS = (
    *COMMON,
    activation("hidden_activation"),
    scaled("attention_scale", "query_pre_attn_scalar", lambda x: x**-0.5, lambda scale: scale**-2, int),
    always(norm_placement="sandwich"),
    fields(output_softcap="final_logit_softcapping"),
)
GEMMA2_ATTENTION = (
    ROPE,
    fields(attention_softcap="attn_logit_softcapping"),
    # Without layer_types, every other layer has a window, from the first on.
    windows(lambda values, layer: layer % 2 == 0),
)
GEMMA2 = decoder("gemma2", "Gemma2", GEMMA2_DEFAULTS, *GEMMA2_PARTS, *GEMMA2_ATTENTION, names=SANDWICH)
VAULTGEMMA = decoder(
    "vaultgemma",
    "VaultGemma",
    GEMMA2_DEFAULTS,
    *GEMMA2_PARTS,
    *GEMMA2_ATTENTION,
    # VaultGemma is Gemma 2 without the norms of outputs; later parts win.
    always(norm_placement="pre"),
    names=replace(SANDWICH, attention_output_norm="", mlp_output_norm=""),
    classifies=False,
)
PATTERN = "sliding_window_pattern"
GEMMA3_TEXT = decoder(
    "gemma3_text",
    "Gemma3",
    GEMMA2_DEFAULTS
    | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6, PATTERN: 6}
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    *GEMMA2_PARTS,
    # Layers with a window have a separate RoPE.
    rope_by_layer("rope_local_base_freq", 10_000.0),
    always(qk_norm=True),
    windows(every(PATTERN), PATTERN, f"_{PATTERN}"),
    names=SANDWICH,
    only={"attn_logit_softcapping": (None,)},
    classifies=False,
)
