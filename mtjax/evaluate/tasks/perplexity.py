"""Perplexity and bits per byte of any text: a file, JSON lines, or a tokenized corpus (`.bin` and `.idx`).

Each document is preceded by the tokens with which a text begins (`first_tokens`), so that all of its tokens are scored.
"""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.corpus.indexed import IndexedDataset, checked_ids, is_indexed, prefix_of
from mtjax.data.corpus.made_with import check_made_with
from mtjax.data.corpus.meta import read_meta
from mtjax.data.corpus.reader import is_json
from mtjax.data.corpus.tables import DELIMITERS, is_columnar
from mtjax.data.json_lines import read_text
from mtjax.errors import UserError
from mtjax.evaluate.rows import RowScores, rows_of_text
from mtjax.evaluate.tasks.task import EvaluationTask, Results, RowSettings, TaskKind, begins_with, perplexity_of
from mtjax.evaluate.tasks.text_file import json_lines

HEAD = 16
"""Bytes by which a file of columns is recognised."""


def open_text(path: Path, tokenizer: Tokenizer, settings: RowSettings) -> EvaluationTask:
    """Reads the documents of a file: plain text is one; JSON lines with `text`, and corpora, contain several.

    Raises:
      UserError: it can't be read, contains no text, is a table, or is a corpus that another tokenizer made.
    """
    rows, tokens, size, documents = [], 0, 0, 0
    first = list(settings.first_tokens)
    notes = begins_with("each document", tokenizer, first)
    _check_file(path)
    prefix = prefix_of(str(path))
    # Ids mean other text to another tokenizer, which may have as many.
    if is_indexed(prefix) and (note := check_made_with(prefix, read_meta(prefix), "the model's tokenizer", tokenizer)):
        notes.append(note)
    for ids, length in _documents(path, tokenizer, first):
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


def _check_file(path: Path) -> None:
    """Checks that a file is not a table, whose delimiters and other columns would be scored as text.

    Raises:
      UserError: it is one.
    """
    if not path.is_file():  # the prefix of a corpus
        return
    with path.open("rb") as file:
        is_table = is_columnar(file.read(HEAD)) or path.suffix in DELIMITERS
    if is_table:
        raise UserError(
            f"{path} is a table, and must be text, JSON lines with 'text', or a corpus: make a corpus of one of its "
            "columns with mtjax data preprocess --text-key COLUMN"
        )


def _documents(path: Path, tokenizer: Tokenizer, first: list[int]) -> Iterator[tuple[list[int], int]]:
    """Yields the ids of each document, without tokens that begin and end documents, and the bytes of its text."""
    prefix = prefix_of(str(path))
    if is_indexed(prefix):
        dataset = IndexedDataset(prefix)
        for begin, end in zip(dataset.documents[:-1], dataset.documents[1:], strict=True):
            sequences = [dataset[number] for number in range(begin, end)]
            ids = checked_ids(sequences, tokenizer.vocab_size, Path(prefix)).tolist()
            ids = ids[len(first) :] if ids[: len(first)] == first else ids  # the corpus was tokenized with them
            # Ends of documents are not text: counted, their losses would be in `bits_per_byte` without bytes.
            ids = ids[:-1] if ids and ids[-1] == tokenizer.eod else ids
            yield ids, len(tokenizer.decode(ids).encode())
        return
    texts = (text for _, text in json_lines(path, "text")) if is_json(str(path)) else iter([read_text(path)])
    for text in texts:
        yield tokenizer.encode(text), len(text.encode())


MEASURES = {"perplexity": False, "bits_per_byte": False, "loss": False}
PERPLEXITY = TaskKind("perplexity", MEASURES, open_text)
