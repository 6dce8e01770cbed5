"""The files of a tokenizer in a folder of weights: which they are, and how `--tokenizer` names it."""

from collections.abc import Collection
from pathlib import Path

from mtjax.data.tokens.pretrained_settings import is_pretrained

DESCRIPTIONS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files that say how a vocabulary is used: which tokens are special, how conversations are written out."""
GENERATION_CONFIG = "generation_config.json"
"""How a model writes text, such as which tokens end it: it belongs to weights, not to a vocabulary alone."""
TOKENIZER_FILES = (
    "tokenizer.json",
    *DESCRIPTIONS,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "vocab.bpe",
    "encoder.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    GENERATION_CONFIG,
)
"""Files that travel with the weights, as they are."""


def tokenizer_of(names: Collection[str], folder: Path) -> str | None:
    """How `--tokenizer` names the tokenizer among these files of a folder."""
    if "tokenizer.json" in names:
        return str(folder / "tokenizer.json")
    if {"encoder.json", "vocab.bpe"} <= set(names):
        return f"gpt2:{folder}"
    model = next((name for name in names if name.endswith(".model")), None)
    has_gpt2s = {"vocab.json", "merges.txt"} <= set(names)
    if is_pretrained(folder) and (has_gpt2s or "vocab.txt" in names or model):
        return f"hf:{folder}"
    if has_gpt2s:
        return f"gpt2:{folder}"
    if "vocab.txt" in names:
        return f"bert:{folder / 'vocab.txt'}"
    return f"sentencepiece:{folder / model}" if model else None
