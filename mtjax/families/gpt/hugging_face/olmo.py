"""transformers' `olmo`, `olmo2`, `olmo3` and `exaone4`, whose norms are without weights or on outputs."""

from mtjax.config import Model
from mtjax.convert.model_types.decoder import LIKE_LLAMA, NO_BIASES, ROPE, ROTARY, SIZES, SWIGLU, decoder, sizes
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
    windows,
)
from mtjax.convert.model_types.rope import rope_by_layer
from mtjax.convert.model_types.value_kinds import COUNT_OR_LETTERS
from mtjax.errors import UserError

OLMO_SIZES = sizes(4096, 11008, 32, 32, None, 50_304, 2048)
OLMO = decoder(
    "olmo",
    "Olmo",
    OLMO_SIZES | {"clip_qkv": None},
    SIZES,
    SWIGLU,
    ROTARY,
    ROPE,
    # Layer norm without weights; the epsilon is a constant in transformers' code.
    always(family="gpt", norm="layernorm", norm_epsilon=1e-5, norm_weight="none", hidden_dropout=0.0),
    biases("attention_bias"),
    fields(qkv_clip="clip_qkv"),
    classifies=False,
)

ON_OUTPUTS = ModuleNames(
    attention_norm="",
    attention_output_norm="post_attention_layernorm",
    mlp_norm="",
    mlp_output_norm="post_feedforward_layernorm",
)
# The norms of queries and keys are over all heads together.
WIDTH_NORM = always(qk_norm=True, qk_norm_scope="width", norm_placement="output")
OLMO2_SIZES = OLMO_SIZES | {"rms_norm_eps": 1e-5}
OLMO2 = decoder(
    "olmo2",
    "Olmo2",
    OLMO2_SIZES,
    *LIKE_LLAMA,
    ROPE,
    biases("attention_bias"),
    WIDTH_NORM,
    names=ON_OUTPUTS,
)
OLMO3 = decoder(
    "olmo3",
    "Olmo3",
    OLMO2_SIZES | {"rope_theta": 500_000.0, "sliding_window": 4096},
    *LIKE_LLAMA,
    rope_by_layer(),
    biases("attention_bias"),
    WIDTH_NORM,
    windows(lambda values, layer: (layer + 1) % 4 != 0),
    names=ON_OUTPUTS,
)

PATTERN = "sliding_window_pattern"


def _has_window(values: Json, layer: int) -> bool:
    """Returns whether a layer has a window, from a period.

    Raises:
      UserError: letters, L and G; transformers, too, reads these layers from layer_types only.
    """
    pattern = values[PATTERN]
    if isinstance(pattern, str):
        raise UserError(f"{PATTERN} is {pattern!r}, which needs layer_types beside it: add these, or use an integer")
    return bool(pattern) and (layer + 1) % pattern != 0


def _read_rotated(values: Json) -> Settings:
    """Reads which layers have RoPE: with a window anywhere, only those with a window."""
    # transformers' EXAONE 4 without windows rotates in all layers.
    if values["sliding_window"] is None:
        return {"rope_layers": "R"}
    return {"rope_layers": shortest(sliding(values, _has_window).translate(str.maketrans("SF", "RN")))}


def _write_pattern(model: Model) -> Json:
    """Writes no period, since layer_types says it all."""
    return {PATTERN: 4}


WINDOW_PART = windows(_has_window, PATTERN, write=_write_pattern)
ROTATED = ConfigKeys((), _read_rotated, lambda model: {}, {"rope_layers": (PATTERN, "sliding_window", "layer_types")})
EXAONE4 = decoder(
    "exaone4",
    "Exaone4",
    sizes(4096, 16_384, 32, 32, 32, 102_400, 2048) | {"rms_norm_eps": 1e-5, "sliding_window": 4096, PATTERN: 4},
    *LIKE_LLAMA,
    ROPE,
    NO_BIASES,
    always(qk_norm=True, norm_placement="output"),
    WINDOW_PART,
    ROTATED,
    names=ON_OUTPUTS,
    kinds={PATTERN: COUNT_OR_LETTERS},
)
