"""Perplexity and bits per byte of any text: a file, JSON lines, or a tokenized corpus (`.bin` and `.idx`).

Each document is preceded by the tokens with which a text begins (`first_tokens`), so that all of its tokens are scored.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.corpus.indexed import IndexedDataset, checked_ids, is_indexed, prefix_of
from mtjax.data.corpus.made_with import check_ids
from mtjax.data.corpus.meta import Meta, read_meta
from mtjax.data.corpus.reader import is_json
from mtjax.data.json_lines import read_text
from mtjax.errors import UserError
from mtjax.evaluate.rows import RowScores, rows_of_text
from mtjax.evaluate.tasks.task import (
    EvaluationTask,
    NamedTokenizer,
    Results,
    RowSettings,
    TaskKind,
    begins_with,
    perplexity_of,
)
from mtjax.evaluate.tasks.text_file import check_no_table, json_lines

WANTED = (
    "text, JSON lines with 'text', or a corpus: make a corpus of one of its columns with mtjax data preprocess "
    "--text-key COLUMN"
)


def open_text(path: Path, named: NamedTokenizer, settings: RowSettings) -> EvaluationTask:
    """Reads the documents of a file: plain text is one; JSON lines with `text`, and corpora, contain several.

    Raises:
      UserError: it can't be read, contains no text, is a table, or is a corpus that another tokenizer made.
    """
    tokenizer, rows, tokens, size, documents = named.tokenizer, [], 0, 0, 0
    first = list(settings.first_tokens)
    notes = begins_with("each document", tokenizer, first)
    check_no_table(path, WANTED)
    prefix = prefix_of(str(path))
    if is_indexed(prefix):
        meta = read_meta(prefix)
        notes += _check_maker(prefix, meta, named)
        texts = _documents_of(prefix, meta, tokenizer, first)
    else:
        texts = _documents_in(path, tokenizer)
    for ids, length in texts:
        document = np.asarray([*first, *ids], np.int32)
        rows += rows_of_text(document, settings.length, settings.overlap, len(first))
        tokens, size, documents = tokens + len(ids), size + length, documents + 1
    if not tokens:
        raise UserError(f"{path} contains no text")

    def results(scores: RowScores) -> Results:
        loss = -float(scores.log_probability.sum())
        return {
            "perplexity": perplexity_of(loss / tokens),
            "bits_per_byte": loss / math.log(2) / size,
            "loss": loss / tokens,
            "tokens": tokens,
            "bytes": size,
            "documents": documents,
        }

    return EvaluationTask(rows, results, "; ".join(notes))


def _check_maker(prefix: str, meta: Meta | None, named: NamedTokenizer) -> list[str]:
    """Checks that the ids of a corpus mean the same text to the model's tokenizer, which may have as many tokens.

    Returns:
      Notes: what could not be compared, and tokens that were added since.

    Raises:
      UserError: another tokenizer made it.
    """
    remedy = "evaluate on the text itself, or preprocess it again with this one (mtjax data preprocess --tokenizer)"
    note = check_ids(prefix, meta, named.name, named.tokenizer, may_add=True, remedy=remedy)
    if note is None and (meta is None or meta.tokenizer is meta.tokenizer_digest is None):
        note = f"{prefix} does not say which tokenizer made it: {named.name} is taken for the same"
    return [note] if note else []


def _documents_of(
    prefix: str, meta: Meta | None, tokenizer: Tokenizer, first: list[int]
) -> Iterator[tuple[list[int], int]]:
    """Yields the ids of each document of a corpus, without tokens that begin and end documents, and its bytes."""
    dataset = IndexedDataset(prefix)
    # The corpus may have been made with --eod-token, or another version of the tokenizer's settings.
    eod = tokenizer.eod if meta is None or meta.eod is None else meta.eod
    for begin, end in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
        sequences = [dataset[number] for number in range(begin, end)]
        ids = checked_ids(sequences, tokenizer.vocab_size, Path(prefix)).tolist()
        ids = ids[len(first) :] if ids[: len(first)] == first else ids  # the corpus was tokenized with them
        # Ends of documents are not text: counted, their losses would be in `bits_per_byte` without bytes.
        ids = ids[:-1] if ids and ids[-1] == eod else ids
        yield ids, len(tokenizer.decode(ids).encode())


def _documents_in(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[list[int], int]]:
    """Yields the ids of each document of a text file, and its bytes."""
    for text in (text for _, text in json_lines(path, "text")) if is_json(str(path)) else iter([read_text(path)]):
        yield tokenizer.encode(text), len(text.encode())


MEASURES = {"perplexity": False, "bits_per_byte": False, "loss": False}
PERPLEXITY = TaskKind("perplexity", MEASURES, open_text)
