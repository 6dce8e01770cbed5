"""The files of a tokenizer in a folder of weights: which they are, and how `--tokenizer` names it."""

from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "vocab.bpe",
    "encoder.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that travel with the weights, as they are."""


def tokenizer_of(names: list[str], folder: Path) -> str | None:
    """How `--tokenizer` names the tokenizer among these files of a folder."""
    if "tokenizer.json" in names:
        return str(folder / "tokenizer.json")
    if {"vocab.json", "merges.txt"} <= set(names) or {"encoder.json", "vocab.bpe"} <= set(names):
        return f"gpt2:{folder}"
    if "vocab.txt" in names:
        return f"bert:{folder / 'vocab.txt'}"
    model = next((name for name in names if name.endswith(".model")), None)
    return f"sentencepiece:{folder / model}" if model else None
