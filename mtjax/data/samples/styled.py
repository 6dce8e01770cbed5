"""Samples as coloured text: what the families' renderings share."""

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from mtjax.data.tokens.tokenizer import Tokenizer

SPECIAL, MASKED, NO_LOSS, PLAIN, SECOND = "bold magenta", "bold yellow", "dim", "default", "green"


def styled(tokens: np.ndarray, styles: np.ndarray, tokenizer: Tokenizer) -> Text:
    """Decodes tokens; a stretch of one style is decoded together, so that characters of several tokens stay intact."""
    text, at = Text(), 0
    for end in [*(np.flatnonzero(styles[1:] != styles[:-1]) + 1).tolist(), len(tokens)]:
        stretch = [int(t) for t in tokens[at:end]]
        part = decode(stretch, tokenizer)
        is_special = part.startswith(("[", "<"))  # special tokens decode without the spaces around them
        text.append(f" {part} " if is_special else part, str(styles[at]) if len(styles) else PLAIN)
        at = end
    return text


def decode(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    """Decodes `tokens`; ids beyond the vocabulary are T5's sentinels."""
    size = tokenizer.vocab_size
    if all(token < size for token in tokens):
        return tokenizer.decode(tokens)
    return " ".join(f"<sentinel {t - size}>" if t >= size else tokenizer.decode([t]) for t in tokens)
