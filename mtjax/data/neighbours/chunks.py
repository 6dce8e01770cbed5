"""The chunks of the documents of corpora: where each begins follows from the lengths of the documents alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtjax.data.corpus.indexed import IndexedDataset, checked_ids
from mtjax.errors import UserError


class ChunkDatabase:
    """Documents in chunks of `chunk` tokens, numbered through all corpora; the last of a document may be shorter.

    Attributes:
      corpora: token ids; a sequence is a document.
      chunk: tokens in a chunk.
      first_documents: int64[corpora + 1], documents of all corpora before each.
    """

    def __init__(self, corpora: Sequence[IndexedDataset], chunk: int) -> None:
        """Counts the chunks.

        Raises:
          UserError: a document of a corpus has several sequences.
        """
        self.corpora, self.chunk = list(corpora), chunk
        self._numbers: dict[Path, int | None] = {}
        for corpus in self.corpora:
            if corpus.num_documents != len(corpus):
                raise UserError(
                    f"{corpus.prefix} has {len(corpus):,} sequences in {corpus.num_documents:,} documents, and chunks "
                    "are cut from whole documents: make it without --split-sentences"
                )
        lengths = [len(corpus) for corpus in self.corpora]
        self.first_documents = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        # A document of no tokens has no chunk.
        counts = [-(-corpus.lengths.astype(np.int64) // chunk) for corpus in self.corpora]
        # One number for each document, from which all others follow: chunks are not stored.
        self._first_chunks = np.concatenate([[0], np.cumsum(np.concatenate([*counts, []]), dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._first_chunks[-1])

    def chunks_of(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the first chunk of the documents `begin` to `end`, and one past the last."""
        return int(self._first_chunks[begin]), int(self._first_chunks[end])

    def numbers(self, corpus: IndexedDataset, sequences: np.ndarray) -> np.ndarray:
        """Returns int64[sequences], the numbers of a corpus' sequences as documents; none if it isn't in here."""
        # By content, not by path: the same corpus may have two paths. Remembered by path, as `content` reads from all
        # over the file.
        if corpus.prefix not in self._numbers:
            contents = [other.content() for other in self.corpora]
            content_of_corpus = corpus.content()
            self._numbers[corpus.prefix] = contents.index(content_of_corpus) if content_of_corpus in contents else None
        corpus_number = self._numbers[corpus.prefix]
        return (
            np.empty(0, np.int64)
            if corpus_number is None
            else sequences.astype(np.int64) + self.first_documents[corpus_number]
        )

    def documents(self, chunks: np.ndarray) -> np.ndarray:
        """Returns the number of the document of each chunk, of the same shape; -1 for -1."""
        found = np.searchsorted(self._first_chunks, chunks, side="right") - 1
        return np.where(chunks < 0, -1, found)

    def tokens(self, chunk: int, count: int = 1) -> np.ndarray:
        """Returns the tokens of a chunk and of the `count` - 1 after it in its document: at most `count` x `chunk`."""
        if not 0 <= chunk < len(self):
            raise IndexError(f"chunk {chunk} of {len(self)}")
        document = int(self.documents(np.array(chunk)))
        offset = (chunk - int(self._first_chunks[document])) * self.chunk
        corpus = int(np.searchsorted(self.first_documents, document, side="right")) - 1
        sequence = document - int(self.first_documents[corpus])
        size = min(count * self.chunk, int(self.corpora[corpus].lengths[sequence]) - offset)
        return self.corpora[corpus].get(sequence, offset, size)

    def padded(self, chunks: np.ndarray, count: int, eod: int, vocab_size: int) -> np.ndarray:
        """Returns int32[..., count x chunk]: tokens of each chunk and of those after it, and `eod` after the document.

        Args:
          chunks: numbers of chunks, of any shape; -1 is filled with `eod`.
          count: chunks to read of each.
          eod: the id that ends a document.
          vocab_size: ids must be below this.

        Raises:
          UserError: a token is not in the vocabulary.
        """
        filled = np.full((chunks.size, count * self.chunk), eod, np.int32)
        for row, chunk in zip(filled, chunks.ravel().tolist(), strict=True):
            if chunk >= 0:
                tokens = self.tokens(chunk, count)
                row[: len(tokens)] = checked_ids([tokens], vocab_size, self.corpora[0].prefix)
        return filled.reshape(*chunks.shape, -1)
