"""Embeddings of all chunks of a corpus: a `.npy` file float16 [chunks, width], and a record of what they are of."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mtjax.data.corpus.indexed import IndexedDataset, checked_ids
from mtjax.data.neighbours.chunks import ChunkDatabase
from mtjax.data.neighbours.stored import open_array, sealed, unsealed
from mtjax.data.progress import BytesProgress
from mtjax.data.tokens.identity import content_digest
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.retrieval.embedder import Embedder
from mtjax.retrieval.rows_file import RowsFile, write_with_header

FORMAT = 1
BLOCK = 1 << 14
"""Chunks between two records of the progress."""


@dataclass(frozen=True)
class EmbeddingsHeader:
    """What a file of embeddings holds.

    Attributes:
      corpus: path of the corpus when it was embedded.
      content: digest of the corpus.
      tokenizer: digest of what the corpus' ids were decoded with.
      chunk: tokens in a chunk.
      chunks: in the corpus.
      width: of an embedding.
      embedder: its name.
      fingerprint: digest of the embedder.
      embedder_tokens: tokens that it read of a chunk; None in records of before they were recorded.
      embedder_dtype: in which it computed, likewise.
      format: version.
    """

    corpus: str
    content: str
    tokenizer: str
    chunk: int
    chunks: int
    width: int
    embedder: str
    fingerprint: str
    embedder_tokens: int | None = None
    embedder_dtype: str | None = None
    format: int = FORMAT


def default_path(prefix: str | Path) -> Path:
    """Returns where the embeddings of a corpus are when no other path is given."""
    return Path(f"{prefix}.embeddings.npy")


def record_of(path: Path) -> Path:
    """Returns the path of the record of a file of embeddings."""
    return path.with_suffix(".json")


@dataclass(frozen=True)
class Embeddings:
    """An open file of embeddings.

    Attributes:
      path: of the array.
      header: what it says of itself.
      rows: float16 [chunks, width], memory-mapped.
    """

    path: Path
    header: EmbeddingsHeader
    rows: np.ndarray

    @classmethod
    def open(cls, path: Path) -> "Embeddings":
        """Opens a file of embeddings.

        Raises:
          UserError: it or its record is missing or damaged.
        """
        header = EmbeddingsHeader(**unsealed(record_of(path), FORMAT, "mtjax data embed", EmbeddingsHeader))
        return cls(path, header, open_array(path, (header.chunks, header.width), ("<f2",)))

    def corpus(self, prefix: str | Path | None = None) -> IndexedDataset:
        """Opens the corpus whose chunks these are.

        Args:
          prefix: where it is now; where it was embedded when None.

        Raises:
          UserError: it is missing or damaged, or is another text now.
        """
        corpus = IndexedDataset(prefix or self.header.corpus)
        if corpus.content() != self.header.content:
            raise UserError(
                f"{self.path} was made of {corpus.prefix} when it was another text: make it anew with mtjax data embed"
            )
        return corpus


def text_of_chunk(tokens: np.ndarray, tokenizer: Tokenizer, source: Path) -> str:
    """Returns the text of a chunk without its ends of documents.

    Raises:
      UserError: the vocabulary lacks one of its tokens.
    """
    ids = checked_ids([tokens], tokenizer.vocab_size, source)
    # The end of a document is not text to another vocabulary, which would read the letters of its name.
    return tokenizer.decode(ids[ids != tokenizer.eod].tolist())


def embed_corpus(
    corpus: IndexedDataset,
    tokenizer: Tokenizer,
    embedder: Embedder,
    chunk: int,
    path: Path,
    *,
    block: int = BLOCK,
) -> EmbeddingsHeader:
    """Writes the embeddings of all chunks of a corpus; the same call continues after an interruption.

    Args:
      corpus: what is embedded.
      tokenizer: what made its ids.
      embedder: reads the text of each chunk.
      chunk: tokens in a chunk.
      path: of the array; the record is beside it.
      block: chunks between two records of the progress.

    Raises:
      UserError: a file can't be read or written.
    """
    database = ChunkDatabase([corpus], chunk)
    if not len(database):
        raise UserError(f"{corpus.prefix} has no tokens: there is nothing to embed")
    header = EmbeddingsHeader(
        *(str(corpus.prefix), corpus.content(), content_digest(tokenizer), chunk, len(database)),
        *(embedder.width, embedder.name, embedder.fingerprint, embedder.max_tokens, embedder.dtype),
    )
    # Without names: a run continues after its corpus or embedder was moved. Their digests identify them.
    identity = {**asdict(header), "corpus": "", "embedder": ""}
    # float16 halves the file and the memory of a search. Distances are computed in wider types.
    rows = RowsFile(path, (len(database), embedder.width), "<f2", identity)
    with rows.opened(), BytesProgress(f"embedding {corpus.prefix}", len(database)) as progress:
        while rows.done < len(database):
            numbers = range(rows.done, min(rows.done + block, len(database)))
            texts = [text_of_chunk(database.tokens(number), tokenizer, corpus.prefix) for number in numbers]
            rows.append(embedder.embed(texts))
            progress.update(rows.done)
        write_with_header(rows, record_of(path), sealed(asdict(header)))
    return header


def check_together(found: Sequence[Embeddings]) -> None:
    """Checks that embeddings can be compared with each other.

    Raises:
      UserError: they were made differently; names the first difference.
    """
    first = found[0]
    for other in found[1:]:
        for name in ("fingerprint", "width", "chunk"):
            ours, theirs = getattr(first.header, name), getattr(other.header, name)
            if ours != theirs:
                raise UserError(
                    f"{first.path} was made with {name} {str(ours)[:12]}, and {other.path} with {str(theirs)[:12]}: "
                    "embed them alike with mtjax data embed"
                )
