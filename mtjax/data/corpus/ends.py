"""Whether the documents of a corpus end with a token, which settings such as `--reset-attention-mask` look for."""

import numpy as np

from mtjax.config import Data
from mtjax.config.data import DOCUMENT_SETTINGS
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.tokens.tokenizer import Tokenizer

DOCUMENTS = 1000
PIECES, PIECE = 64, 1 << 14
"""Documents whose last tokens are looked at; pieces of the whole corpus, and tokens in each."""


def settings_of_ends(data: Data) -> list[str]:
    """Returns the options that look for ends of documents, of those that are set."""
    return [f"--{name.replace('_', '-')}" for name in DOCUMENT_SETTINGS if getattr(data, name)]


def note_without_ends(corpus: IndexedDataset, tokenizer: Tokenizer, options: list[str]) -> str | None:
    """Looks for the end-of-document token in a corpus.

    Args:
      corpus: token ids.
      tokenizer: the run's.
      options: that look for this token.

    Returns:
      A note for the user if it is neither at the end of a document nor in pieces from all over the corpus.
    """
    total, eod = corpus.num_tokens, tokenizer.eod
    if not total:  # an error elsewhere
        return None
    # Not all tokens, of which there may be terabytes.
    chosen = np.linspace(0, max(corpus.num_documents - 1, 0), min(DOCUMENTS, corpus.num_documents), dtype=np.int64)
    lasts = corpus.documents[chosen + 1] - 1
    if any(corpus.lengths[last] and corpus.get(int(last))[-1] == eod for last in lasts):
        return None
    # Sequences that another program packed have ends inside.
    for start in np.linspace(0, max(total - PIECE, 0), PIECES, dtype=np.int64).tolist():
        if (corpus.flat(start, min(start + PIECE, total)) == eod).any():
            return None
    verb = "has" if len(options) == 1 else "have"
    return (
        f"{corpus.prefix} has no ends of documents ({tokenizer.token(eod)}, token {eod}) where they were looked for: "
        f"{' and '.join(options)} {verb} no effect on it; preprocess the text again with --append-eod, or name the "
        "token that ends its documents with --eod-token"
    )
