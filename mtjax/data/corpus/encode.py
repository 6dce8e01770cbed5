"""Documents to token ids: what a preprocessing worker does with one chunk."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from mtjax.data.corpus.documents import DocumentChunk, Fault, parsed, text_of
from mtjax.data.corpus.indexed import token_dtype
from mtjax.data.corpus.sentences import sentence_splitter
from mtjax.data.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodeOptions:
    """What, besides the tokenizer, decides the ids.

    Attributes:
      keys: JSON keys whose text is taken, each into a separate dataset.
      append_eod: put the end-of-document id after the last sentence of a document.
      split_sentences: one sequence per sentence, not per document.
      language: whose rules split sentences.
      parse_special: names of special tokens in the text become these tokens; otherwise they are plain text.
    """

    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    split_sentences: bool = False
    language: str = "en"
    parse_special: bool = False


@dataclass(frozen=True)
class EncodedChunk:
    """A chunk as ids.

    Attributes:
      arrays: per key the tokens, int32[sequences] lengths and int32[documents] sequences per document.
      documents: how many there are.
      text_bytes: bytes of raw text that went in.
      errors: (line, what is wrong) of each document that can't be used.
    """

    arrays: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    documents: int
    text_bytes: int
    errors: list[tuple[int, str]] = field(default_factory=list)


class ChunkEncoder:
    """Turns chunks into ids; can be sent to another process."""

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions) -> None:
        self._tokenizer, self._options = tokenizer, options
        self._split = sentence_splitter(options.language) if options.split_sentences else None

    def __call__(self, chunk: DocumentChunk) -> EncodedChunk:
        """Encodes a chunk's documents, in order."""
        rows, errors = _texts(chunk, self._options.keys)
        arrays = {}
        for key in self._options.keys:
            parts = [self._sequences(row[key]) for row in rows]
            documents = _encode(parts, self._tokenizer, self._options)
            # In the worker, so that a pipe carries 2 bytes a token and not a list of Python integers.
            arrays[key] = _join(documents, token_dtype(self._tokenizer.vocab_size))
        return EncodedChunk(arrays, len(rows), chunk.end - chunk.start, errors)

    def _sequences(self, pieces: list[str]) -> list[str]:
        """Returns the texts of a document that become a sequence each: its pieces, or the sentences of each."""
        return pieces if self._split is None else [sentence for piece in pieces for sentence in self._split(piece)]


def _texts(chunk: DocumentChunk, keys: Sequence[str]) -> tuple[list[dict[str, list[str]]], list[tuple[int, str]]]:
    rows, errors = [], []
    for line, row in parsed(chunk, lambda document: text_of(document, chunk.is_json, keys)):
        if isinstance(row, Fault):
            errors.append((line, row.message))
        else:
            rows.append(row)
    return rows, errors


def _encode(documents: list[list[str]], tokenizer: Tokenizer, options: EncodeOptions) -> list[list[list[int]]]:
    """Returns the ids of each sentence of each document; empty sentences are dropped, as Megatron does."""
    encode = tokenizer.encode_batch_marked if options.parse_special else tokenizer.encode_batch
    # All sentences of a chunk in one call, over which the library's threads work.
    flat = iter(encode([sentence for document in documents for sentence in document]))
    encoded = [[ids for ids in (next(flat) for _ in document) if ids] for document in documents]
    if options.append_eod:
        for document in encoded:
            # As in Megatron: a document without text has no end either.
            if document:
                # Within the last sentence, as Megatron writes it: `lengths` counts it.
                document[-1].append(tokenizer.eod)
    return encoded


def _join(documents: list[list[list[int]]], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sequences = [ids for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    tokens = np.fromiter(chain.from_iterable(sequences), dtype, int(lengths.sum(dtype=np.int64)))
    return tokens, lengths, np.array([len(document) for document in documents], np.int32)
