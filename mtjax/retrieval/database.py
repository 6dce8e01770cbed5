"""A database of embedded chunks, with the index in which they are searched."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.neighbours.chunks import ChunkDatabase
from mtjax.errors import UserError
from mtjax.retrieval.embeddings import Embeddings
from mtjax.retrieval.exact import ExactIndex
from mtjax.retrieval.faiss_index import FaissIndex
from mtjax.retrieval.kind import EXACT, IndexKind
from mtjax.retrieval.vectors import Index, VectorRange, Vectors


@dataclass(frozen=True)
class Database:
    """What is searched.

    Attributes:
      chunks: of whole corpora.
      vectors: embeddings of those that may be found.
      index: of the vectors.
      described: the corpora, for the header.
      embeddings: their files.
    """

    chunks: ChunkDatabase
    vectors: Vectors
    index: Index
    described: list[dict[str, Any]]
    embeddings: list[Path]


def vectors_of(database: ChunkDatabase, embeddings: Sequence[Embeddings], bounds: Sequence[tuple[int, int]]) -> Vectors:
    """Returns the embeddings of some documents of each corpus of a database."""
    parts = []
    for number, (each, (begin, end)) in enumerate(zip(embeddings, bounds, strict=True)):
        first_document = int(database.first_documents[number])
        # A file of embeddings counts its chunks from 0, the database through all corpora.
        base, _ = database.chunks_of(first_document, first_document)
        first, last = database.chunks_of(first_document + begin, first_document + end)
        # Whole corpora are embedded once, and each run searches its own training documents of them.
        parts.append(VectorRange(each.rows, first - base, last - base, base))
    return Vectors(parts)


def open_database(
    kind: IndexKind,
    devices: int,
    found: Sequence[Embeddings],
    corpora: Sequence[IndexedDataset],
    bounds: Sequence[tuple[int, int]],
    described: list[dict[str, Any]],
) -> Database:
    """Opens the embeddings of some documents of each corpus, and builds or reads their index.

    Args:
      kind: of the index.
      devices: that search, if it is exact.
      found: embeddings of each corpus.
      corpora: token ids of each.
      bounds: the first of its documents that may be found, and one past the last.
      described: records of the corpora; a stored index of faiss is of the same ones only.

    Raises:
      UserError: there are no chunks, or faiss can't build the index.
    """
    chunks = ChunkDatabase(corpora, found[0].header.chunk)
    vectors = vectors_of(chunks, found, bounds)
    if not len(vectors):
        raise UserError("the training text has no chunks to search")
    if kind.factory == EXACT:
        index: Index = ExactIndex(vectors, devices)
    else:
        index = FaissIndex(
            vectors,
            kind.factory,
            sample=kind.sample,
            nprobe=kind.nprobe,
            # Beside the first corpus' embeddings: an index is of all together.
            saved=found[0].path.with_suffix(""),
            identity=[described, found[0].header.fingerprint, found[0].header.chunk],
        )
    return Database(chunks, vectors, index, described, [each.path for each in found])
