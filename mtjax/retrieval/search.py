"""Searches neighbours, and writes those of a run's samples, or of a corpus, into files."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.neighbours.chunks import ChunkDatabase
from mtjax.data.neighbours.header import Header, SampleSettings, header_path, rows_path, sums_path
from mtjax.data.neighbours.overlap import shares_run
from mtjax.data.neighbours.reader import checksum
from mtjax.data.neighbours.samples import documents_of
from mtjax.data.progress import BytesProgress
from mtjax.data.samples.sample import Dataset
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.retrieval.database import Database
from mtjax.retrieval.embedder import Embedder
from mtjax.retrieval.embeddings import Embeddings, text_of_chunk
from mtjax.retrieval.rows_file import RowsFile, write_with_header
from mtjax.retrieval.vectors import Index, Vectors

BLOCK = 1 << 13
"""Chunks that are embedded and searched between two records of the progress."""
MORE = 4
"""Times as many are searched for those of which too many were dropped."""

Keeps = Callable[[int, np.ndarray], np.ndarray]
"""(number of a query, its candidates, the nearest first) -> which of them may be its neighbours."""


@dataclass(frozen=True)
class NeighbourRules:
    """Which neighbours there are.

    Attributes:
      neighbours: of each chunk.
      without_overlap: drop those with this many tokens in a row of the next chunk; 0 drops none.
      retrieved_chunks: chunks of a neighbour that are compared for that: itself and those after it.
    """

    neighbours: int = 20
    without_overlap: int = 0
    retrieved_chunks: int = 2

    def described(self, index: str) -> dict[str, Any]:
        """Returns the record of the search."""
        return {"index": index, **asdict(self)}


def find(
    index: Index, vectors: Vectors, queries: np.ndarray, count: int, keeps: Keeps
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the nearest chunks that may be neighbours, and searches for more of them where too many were dropped.

    Args:
      index: of the vectors.
      vectors: what was indexed.
      queries: float16[queries, width]; one of zeros, of a chunk without text, has no neighbours.
      count: neighbours of each.
      keeps: which candidates may be neighbours.

    Returns:
      Chunks int64[queries, count], and squared distances float32; -1 and infinity where there are no more.
    """
    found = np.full((len(queries), count), -1, np.int64)
    distances = np.full((len(queries), count), np.inf, np.float32)
    # Twice as many at first: neighbours of the own document are usually among the nearest, and are dropped.
    open_queries, wanted = np.flatnonzero(queries.any(axis=1)), min(2 * count, len(index))
    while len(open_queries):
        row_numbers, near = index.search(queries[open_queries], wanted)
        chunks, short = vectors.chunks(row_numbers), []
        for query, candidates, of_each in zip(open_queries.tolist(), chunks, near, strict=True):
            real = candidates >= 0
            kept = np.flatnonzero(real)[keeps(query, candidates[real])][:count]
            found[query, : len(kept)], distances[query, : len(kept)] = candidates[kept], of_each[kept]
            # With a candidate that is not real, the index has no more to give.
            if len(kept) < count and real.all() and wanted < len(index):
                short.append(query)
        open_queries, wanted = np.array(short, np.int64), min(MORE * wanted, len(index))
    return found, distances


@dataclass(frozen=True)
class QuerySamples:
    """The samples of a split, whose chunks have neighbours.

    Attributes:
      dataset: in their order.
      count: how many have neighbours.
      split: its name.
      settings: what shapes them.
      tokenizer: of the run.
      embedder: embeds their chunks; the same that embedded the database.
    """

    dataset: Dataset
    count: int
    split: str
    settings: SampleSettings
    tokenizer: Tokenizer
    embedder: Embedder

    @property
    def chunks(self) -> int:
        """Chunks of a sample."""
        return self.settings.sequence_length // self.settings.retro_chunk

    def queries(self, tokens: np.ndarray) -> np.ndarray:
        """Embeds the chunks of samples: float16[samples x chunks, width]."""
        pieces = tokens.reshape(-1, self.settings.retro_chunk)
        source = Path(self.settings.texts[0]["name"])
        return self.embedder.embed([text_of_chunk(each, self.tokenizer, source) for each in pieces])


def of_samples(
    asking: QuerySamples, database: Database, rules: NeighbourRules, prefix: Path, kind: str, block: int = BLOCK
) -> tuple[Header, np.ndarray]:
    """Writes the neighbours of all chunks of a run's samples; the same call continues after an interruption.

    Args:
      asking: the samples.
      database: what is searched.
      rules: which neighbours there are.
      prefix: of the files.
      kind: of the index and all that its answers depend on, for the header: a search goes on only with the same.
      block: chunks that are searched together.

    Returns:
      What was written, and how many chunks have each number of neighbours, int64[neighbours + 1].
    """
    split, chunks = asking.split, asking.chunks
    described = {"name": asking.embedder.name, "fingerprint": asking.embedder.fingerprint}
    described |= {"embeddings": list(map(str, database.embeddings))}
    header = Header(
        *(asking.settings, asking.count, database.described, len(database.chunks), rules.neighbours),
        *(described, rules.described(kind)),
    )
    # Half of the file for all but the largest databases.
    dtype = "<i4" if len(database.chunks) < 2**31 else "<i8"
    rows = RowsFile(rows_path(prefix, split), (header.rows, rules.neighbours), dtype, asdict(header))
    sums = RowsFile(sums_path(prefix, split), (asking.count, 2), "<u4", asdict(header))
    with rows.opened(), sums.opened(), BytesProgress(f"neighbours of {split} samples", asking.count) as progress:
        # Two files are appended one after the other: an interruption may leave the first ahead.
        done = min(rows.done // chunks, sums.done)
        rows.rewind(done * chunks)
        sums.rewind(done)
        while sums.done < asking.count:
            numbers = range(sums.done, min(sums.done + max(block // chunks, 1), asking.count))
            tokens = np.stack([asking.dataset[number]["tokens"] for number in numbers])
            keeps = _keeps(asking.dataset, numbers, tokens, database.chunks, rules)
            found, _ = find(database.index, database.vectors, asking.queries(tokens), rules.neighbours, keeps)
            rows.append(found)
            by_sample = zip(tokens, found.reshape(len(tokens), -1), strict=True)
            sums.append(np.array([[checksum(text), checksum(near)] for text, near in by_sample], "<u4"))
            progress.update(sums.done)
        # The old record first: it must not stand beside new arrays.
        header_path(prefix, split).unlink(missing_ok=True)
        sums.publish()
        write_with_header(rows, header_path(prefix, split), header.text())
    return header, _counts(rows.path, rules.neighbours, block)


def _counts(path: Path, neighbours: int, block: int) -> np.ndarray:
    written = np.load(path, mmap_mode="r")
    counts = np.zeros(neighbours + 1, np.int64)
    for at in range(0, len(written), block):
        counts += np.bincount((written[at : at + block] >= 0).sum(axis=1), minlength=neighbours + 1)
    return counts


def _keeps(
    dataset: Dataset,
    numbers: range,
    tokens: np.ndarray,
    database: ChunkDatabase,
    rules: NeighbourRules,
) -> Keeps:
    """Drops chunks of a sample's own documents, and as the rules say those that overlap with the next chunk."""
    chunks_of_sample = [database.numbers(*documents_of(dataset, number)) for number in numbers]
    chunk = database.chunk
    per_sample = tokens.shape[1] // chunk

    def keeps(query: int, candidates: np.ndarray) -> np.ndarray:
        sample, chunk_in_sample = divmod(query, per_sample)
        kept = ~np.isin(database.documents(candidates), chunks_of_sample[sample])
        # The next chunk is what the model predicts with these neighbours: one that has its text would give it away.
        following = tokens[sample, (chunk_in_sample + 1) * chunk : (chunk_in_sample + 2) * chunk]
        if rules.without_overlap and len(following):
            left = rules.neighbours
            for number in np.flatnonzero(kept):
                text = database.tokens(int(candidates[number]), rules.retrieved_chunks)
                # Comparisons end with the neighbours that are needed.
                kept[number] = left > 0 and not shares_run(following, text, rules.without_overlap)
                left -= int(kept[number])
        return kept

    return keeps


def of_corpus(
    corpus: IndexedDataset,
    embeddings: Embeddings,
    database: Database,
    rules: NeighbourRules,
    path: Path,
    kind: str,
    block: int = BLOCK,
) -> None:
    """Writes the neighbours of all chunks of a corpus, int64 [chunks, neighbours], and their squared distances.

    Chunks of the same document are dropped where the corpus is in the database. The same call continues after an
    interruption.

    Args:
      corpus: whose chunks.
      embeddings: theirs.
      database: what is searched.
      rules: how many neighbours.
      path: a .npy file; the distances, float32, are in that name with .distances.npy.
      kind: of the index and all that its answers depend on: a search goes on only with the same.
      block: chunks that are searched together.
    """
    database_of_queries = ChunkDatabase([corpus], embeddings.header.chunk)
    identity = {"of": asdict(embeddings.header), "in": database.described, "rules": rules.described(kind)}
    shape = (len(database_of_queries), rules.neighbours)
    rows = RowsFile(path, shape, "<i8", identity)
    distances = RowsFile(path.with_suffix(".distances.npy"), shape, "<f4", identity)
    with rows.opened(), distances.opened(), BytesProgress("searching neighbours", len(database_of_queries)) as progress:
        done = min(rows.done, distances.done)
        rows.rewind(done)
        distances.rewind(done)
        while rows.done < len(database_of_queries):
            begin, end = rows.done, min(rows.done + block, len(database_of_queries))
            documents = database_of_queries.documents(np.arange(begin, end))

            def keeps(query: int, candidates: np.ndarray, documents: np.ndarray = documents) -> np.ndarray:
                mine = database.chunks.numbers(corpus, documents[query : query + 1])
                return ~np.isin(database.chunks.documents(candidates), mine)

            queries = np.asarray(embeddings.rows[begin:end])
            found, near = find(database.index, database.vectors, queries, rules.neighbours, keeps)
            rows.append(found)
            distances.append(near)
            progress.update(end)
        distances.publish()
        rows.publish()
