"""The files of a tokenizer in a folder of weights: which they are, and how `--tokenizer` names it."""

from collections.abc import Collection
from pathlib import Path

from mtjax.data.tokens.end_file import END_FILE, SENTENCEPIECE_FILE, TOKENIZER_JSON
from mtjax.data.tokens.pretrained_settings import ADDED, CONFIG, SPECIAL, is_pretrained
from mtjax.data.tokens.template_files import TEMPLATE_FILE, template_names

DESCRIPTIONS = (CONFIG, SPECIAL, ADDED, TEMPLATE_FILE)
"""Files that say how a vocabulary is used: which tokens are special, how conversations are written out."""
GENERATION_CONFIG = "generation_config.json"
"""How a model writes text, such as which tokens end it: it belongs to weights, not to a vocabulary alone."""
TOKENIZER_FILES = (
    TOKENIZER_JSON,
    *DESCRIPTIONS,
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "vocab.bpe",
    "encoder.json",
    SENTENCEPIECE_FILE,
    "spiece.model",
    "sentencepiece.bpe.model",
    END_FILE,
    GENERATION_CONFIG,
)
"""Files that travel with the weights, as they are."""


def tokenizer_files(folder: Path) -> list[str]:
    """Returns the names of the tokenizer's files in a folder, chat templates included."""
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return list(dict.fromkeys([*names, *template_names(folder)]))


def tokenizer_of(names: Collection[str], folder: Path) -> str | None:
    """Returns how `--tokenizer` names the tokenizer among these files of a folder."""
    if TOKENIZER_JSON in names:
        return str(folder / TOKENIZER_JSON)
    if {"encoder.json", "vocab.bpe"} <= set(names):
        return f"gpt2:{folder}"
    model = next((name for name in names if name.endswith(".model")), None)
    has_gpt2s = {"vocab.json", "merges.txt"} <= set(names)
    # Settings change how a vocabulary is read, so they decide before the bare vocabularies below.
    if is_pretrained(folder) and (has_gpt2s or "vocab.txt" in names or model):
        return f"hf:{folder}"
    if has_gpt2s:
        return f"gpt2:{folder}"
    if "vocab.txt" in names:
        return f"bert:{folder / 'vocab.txt'}"
    return f"sentencepiece:{folder / model}" if model else None


def tokenizer_of_run(names: Collection[str], folder: Path) -> str | None:
    """Returns the same for a run's folder, into which mtjax has saved the tokenizer that was trained with."""
    if TOKENIZER_JSON in names:
        return str(folder / TOKENIZER_JSON)
    # A `tokenizer.model` without a tokenizer.json was read by SentencePiece. Settings beside it came with the file or
    # the weights, for chat templates and exports; `tokenizer_of` would make another tokenizer of the two.
    return f"sentencepiece:{folder / SENTENCEPIECE_FILE}" if SENTENCEPIECE_FILE in names else None
