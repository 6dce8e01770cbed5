"""transformers' `qwen2` and `qwen3` (arXiv 2407.10671, 2505.09388)."""

from mtjax.config import Model
from mtjax.convert.model_types.decoder import HEAD_DIM, LIKE_LLAMA, ROPE, decoder, sizes
from mtjax.convert.model_types.family import Json
from mtjax.convert.model_types.parts import always, biases, used_windows, window_letters


def _rule(values: Json, layer: int) -> bool:
    return layer >= values["max_window_layers"]


def _write(model: Model) -> Json:
    letters = window_letters(model)
    # Windows are in the last layers: the first S is where they begin, or the end if there are none.
    return {"max_window_layers": (letters + "S").index("S")}


QWEN_WINDOWS = used_windows(_rule, "max_window_layers", write=_write)
QWEN_SIZES = sizes(4096, 22016, 32, 32, 32, 151_936, 32_768) | {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
# Query, key and value have biases whatever config.json says; the output has none.
QWEN2 = decoder("qwen2", "Qwen2", QWEN_SIZES, *LIKE_LLAMA, ROPE, biases(always="qkv"), QWEN_WINDOWS)
QK_NORM = always(qk_norm=True)
QWEN3 = decoder(
    "qwen3",
    "Qwen3",
    QWEN_SIZES | {"head_dim": 128},
    *LIKE_LLAMA,
    HEAD_DIM,
    ROPE,
    biases("attention_bias"),
    QK_NORM,
    QWEN_WINDOWS,
)
