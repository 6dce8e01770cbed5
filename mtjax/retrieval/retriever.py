"""Finds neighbours of chunks of any text in a database that `mtjax data embed` made: for a Retro that writes."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Model
from mtjax.data.cache import digest
from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.neighbours.header import Header, header_path, read_header
from mtjax.data.tokens.identity import content_digest
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError, listed, shortened
from mtjax.retrieval.database import Database, open_database
from mtjax.retrieval.embedder import Embedder
from mtjax.retrieval.embeddings import Embeddings, check_together, default_path, record_of, text_of_chunk
from mtjax.retrieval.kind import IndexKind
from mtjax.retrieval.search import find


@dataclass(frozen=True)
class NeighbourSource:
    """A neighbour, by its position in the database.

    Attributes:
      corpus: its prefix.
      document: number of the document in the corpus, from 0.
      token: number of the neighbour's first token in the document, from 0.
      distance: squared, between its embedding and that of the chunk that asked.
      text: what is read of it.
    """

    corpus: str
    document: int
    token: int
    distance: float
    text: str

    def __str__(self) -> str:
        return f"{self.corpus}:{self.document} from token {self.token} (distance {self.distance:.4g})"


@dataclass(frozen=True)
class _Opened:
    """A database before its index is built."""

    found: list[Embeddings]
    corpora: list[IndexedDataset]
    bounds: list[tuple[int, int]]
    described: list[dict[str, Any]]
    kind: IndexKind
    nearest: int


class Retriever:
    """A database, the embedder that made it, and what a model reads of it.

    Args:
      prefixes: that of neighbours of a run, whose database and index are taken, or those of corpora, which are searched
        exactly.
      model: reads the neighbours.
      tokenizer: of the model.
      embedder: where the embedder is now; where it was when the database was made if None.
      devices: that embed and search.
      rows: chunks that are embedded at a time, on all devices together.

    Raises:
      UserError: files are missing, damaged or not made for each other, or were made with another tokenizer, chunk or
        embedder.
    """

    def __init__(
        self,
        prefixes: Sequence[str],
        model: Model,
        tokenizer: Tokenizer,
        *,
        embedder: str | None = None,
        devices: int = 1,
        rows: int = 1,
    ) -> None:
        # Everything that can be refused without a device comes first: the embedder's weights and the index take long.
        opened = _open(prefixes)
        check_together(opened.found)
        self._tokenizer = tokenizer
        self._count, self._retrieved = model.retro_num_neighbours, model.retro_retrieved_chunks
        self._nearest, self._kind = max(opened.nearest, self._count), opened.kind
        _check_made_for(opened.found, model, tokenizer)
        self._embedder = _embedder_of(opened.found[0], embedder, devices, rows)
        self.database: Database = open_database(
            opened.kind, devices, opened.found, opened.corpora, opened.bounds, opened.described
        )

    @cached_property
    def identity(self) -> str:
        """A digest of all that the neighbours of a chunk depend on, beside the model's own settings."""
        # Not the names: a corpus may have been moved.
        texts = [{name: each[name] for name in ("content", "first", "documents")} for each in self.database.described]
        return digest({"in": texts, "by": self._embedder.fingerprint, "index": self._kind.text(), "of": self._nearest})

    def described(self) -> str:
        """Describes the database in one line."""
        names = listed([str(corpus.prefix) for corpus in self.database.chunks.corpora])
        return f"{len(self.database.vectors):,} chunks of {names}, {self._kind.text()}, {self._embedder.name}"

    def document(self, name: str) -> int:
        """Returns the number, through all corpora, of the document that CORPUS:NUMBER or NUMBER names.

        Raises:
          UserError: there is no such document, or several corpora and none is named.
        """
        corpora, (prefix, number) = self.database.chunks.corpora, _split(name)
        names = [str(corpus.prefix) for corpus in corpora]
        if prefix is None and len(names) > 1:
            raise UserError(
                f"document {number} may be of {listed(names)}: name its corpus, for example {names[0]}:{number}"
            )
        matching = [
            corpus_number for corpus_number, each in enumerate(names) if prefix in (None, each, Path(each).name)
        ]
        if len(matching) != 1:
            has = "no corpus" if not matching else "several corpora"
            raise UserError(
                f"the database has {has} {prefix}, of which document {number} would be: name {listed(names)}"
            )
        [corpus_number] = matching
        if number >= (documents := len(corpora[corpus_number])):
            raise UserError(
                f"{names[corpus_number]} has {documents:,} documents, from 0 to {documents - 1:,}, and no document "
                f"{number}: correct its number"
            )
        return int(self.database.chunks.first_documents[corpus_number]) + number

    def find(self, chunks: Sequence[np.ndarray], without: Sequence[Collection[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Finds the neighbours of chunks, the nearest first.

        Args:
          chunks: token ids of each; those beyond the tokenizer's vocabulary have no text.
          without: for each the documents that are not its neighbours'.

        Returns:
          Numbers of chunks of the database, int64[chunks, neighbours], and squared distances, float32; -1 and infinity
          where there are no more.
        """
        texts = [
            # A model's vocabulary is padded, and an untrained model may write such a token.
            text_of_chunk(ids[ids < self._tokenizer.vocab_size], self._tokenizer, Path("the prompt"))
            for ids in chunks
        ]
        database, dropped = self.database, [np.array(sorted(each), np.int64) for each in without]

        def keeps(query: int, candidates: np.ndarray) -> np.ndarray:
            return ~np.isin(database.chunks.documents(candidates), dropped[query])

        # As many as the run's search found: with some indices, what is found depends on how many are wanted.
        found, distances = find(database.index, database.vectors, self._embedder.embed(texts), self._nearest, keeps)
        return found[:, : self._count], distances[:, : self._count]

    def tokens(self, numbers: np.ndarray) -> np.ndarray:
        """Returns what a model reads of neighbours, int32[..., tokens]: as in training, filled up with ends of
        documents."""
        return self.database.chunks.padded(numbers, self._retrieved, self._tokenizer.eod, self._tokenizer.vocab_size)

    def sources(self, numbers: np.ndarray, distances: np.ndarray) -> list[NeighbourSource]:
        """Returns the positions of a chunk's neighbours, without those that are missing."""
        return [
            self._source(number, distance)
            for number, distance in zip(numbers.tolist(), distances.tolist(), strict=True)
            if number >= 0
        ]

    def _source(self, number: int, distance: float) -> NeighbourSource:
        chunks = self.database.chunks
        document = int(chunks.documents(np.array(number)))
        corpus_number = int(np.searchsorted(chunks.first_documents, document, side="right")) - 1
        token = (number - chunks.chunks_of(document, document)[0]) * chunks.chunk
        corpus = chunks.corpora[corpus_number].prefix
        text = text_of_chunk(chunks.tokens(number, self._retrieved), self._tokenizer, corpus)
        return NeighbourSource(
            str(corpus), document - int(chunks.first_documents[corpus_number]), token, distance, text
        )


def _split(name: str) -> tuple[str | None, int]:
    """Splits CORPUS:NUMBER or NUMBER.

    Raises:
      UserError: it is neither.
    """
    found = re.fullmatch(r"(?:(.+):)?(\d{1,18})", name)
    if found is None:
        raise UserError(f"{shortened(name)} names no document: give its number, or CORPUS:NUMBER, such as books:12")
    return found[1], int(found[2])


def _open(prefixes: Sequence[str]) -> _Opened:
    """Opens the database that prefixes name.

    Raises:
      UserError: files are missing, damaged or of another text than they were made of.
    """
    records = {prefix: _header_of(prefix) for prefix in prefixes}
    # A run's neighbours name their database: the same chunks as in training, and no validation text.
    if len(prefixes) == 1 and (made := records[prefixes[0]]) is not None:
        return _of_run(*made)
    if neighbours := next((prefix for prefix, made in records.items() if made is not None), None):
        raise UserError(
            f"--retrieve {neighbours} has neighbours of a run, and stands for their whole database: give it alone, or "
            "prefixes of corpora only"
        )
    for prefix in prefixes:
        if not record_of(default_path(prefix)).is_file():
            raise UserError(
                f"--retrieve {prefix} is the prefix of neighbours or of a corpus, and neither "
                f"{header_path(prefix, 'train')} nor {record_of(default_path(prefix))} exists: make one with mtjax "
                "data neighbours or mtjax data embed"
            )
    found = [Embeddings.open(default_path(prefix)) for prefix in prefixes]
    corpora = [each.corpus(prefix) for each, prefix in zip(found, prefixes, strict=True)]
    contents = [corpus.content() for corpus in corpora]
    if twice := next((index for index, each in enumerate(contents) if each in contents[:index]), None):
        first = prefixes[contents.index(contents[twice])]
        raise UserError(f"--retrieve {first} and {prefixes[twice]} are the same text: remove one")
    described = [
        {"name": str(corpus.prefix), "content": content, "first": 0, "documents": len(corpus)}
        for corpus, content in zip(corpora, contents, strict=True)
    ]
    return _Opened(found, corpora, [(0, len(corpus)) for corpus in corpora], described, IndexKind(), 0)


def _header_of(prefix: str) -> tuple[Path, Header] | None:
    """Returns the record of a run's neighbours, if there are any under this prefix."""
    # Both splits are searched in the same database.
    paths = (header_path(prefix, split) for split in ("train", "valid"))
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else (path, read_header(path))


def _of_run(path: Path, header: Header) -> _Opened:
    """Opens the database in which the neighbours of a run were searched: its training documents."""
    try:
        corpora = [IndexedDataset(each["name"]) for each in header.database]
    except UserError as e:
        raise UserError(
            f"{e}; {path} names the corpora as they were typed: run the command where mtjax data neighbours was run, "
            "or name the corpora with --retrieve"
        ) from e
    for corpus, each in zip(corpora, header.database, strict=True):
        if corpus.content() != each["content"]:
            raise UserError(
                f"{path} was searched in {corpus.prefix} when it was another text: make the neighbours anew with mtjax "
                "data neighbours"
            )
    # Records of before the files were recorded have those beside the corpora.
    files = header.embedder.get("embeddings") or [str(default_path(corpus.prefix)) for corpus in corpora]
    found = [Embeddings.open(Path(file)) for file in files]
    # The files may have been made anew since: with another embedder the distances mean nothing.
    for each, corpus in zip(found, corpora, strict=True):
        each.corpus(corpus.prefix)
        if each.header.fingerprint != header.embedder["fingerprint"]:
            raise UserError(
                f"{each.path} was made by another embedder than the neighbours of {path}: make these anew with mtjax "
                "data neighbours"
            )
    bounds = [(each["first"], each["first"] + each["documents"]) for each in header.database]
    kind = IndexKind.of(header.search["index"])
    return _Opened(found, corpora, bounds, header.database, kind, header.neighbours)


def _check_made_for(found: Sequence[Embeddings], model: Model, tokenizer: Tokenizer) -> None:
    """Checks that a model can read what is found.

    Raises:
      UserError: chunks have another size, or the corpora were made with another tokenizer.
    """
    first = found[0]
    if first.header.chunk != model.retro_chunk:
        raise UserError(
            f"{first.path} was made with --chunk {first.header.chunk}, and the model's retro_chunk is "
            f"{model.retro_chunk}: embed the corpus with --chunk {model.retro_chunk}"
        )
    for each in found:
        if each.header.tokenizer != content_digest(tokenizer):
            raise UserError(
                f"{each.header.corpus} was made with another tokenizer than the model's, which can't read its tokens: "
                "preprocess it with the model's tokenizer, and embed it"
            )


def _embedder_of(made: Embeddings, name: str | None, devices: int, rows: int) -> Embedder:
    """Opens the embedder that made a database.

    Raises:
      UserError: it is missing, or is another one.
    """
    settings = {"max_tokens": made.header.embedder_tokens, "dtype": made.header.embedder_dtype}
    settings = {key: value for key, value in settings.items() if value is not None}
    mesh = f"{devices}x1"
    embedder = Embedder(name or made.header.embedder, mesh=mesh, rows=-(-rows // devices), **settings)
    # Vectors of another encoder lie elsewhere: distances to them would order chunks by nothing.
    if embedder.fingerprint != made.header.fingerprint:
        remedy = "name the one that made it with --embedder"
        if not settings:
            remedy += (
                ", or make it anew with mtjax data embed: it does not record --embedder-tokens and --embedder-dtype"
            )
        raise UserError(
            f"{made.path} was made by {made.header.embedder} with other weights or another tokenizer than "
            f"{embedder.name} has: {remedy}"
        )
    return embedder
