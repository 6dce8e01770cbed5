"""Neighbours as a run reads them: checked against its settings, sample by sample."""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.corpus.indexed import IndexedDataset
from mtjax.data.neighbours.chunks import ChunkDatabase
from mtjax.data.neighbours.header import (
    SampleSettings,
    check_settings,
    header_path,
    read_header,
    rows_path,
    sums_path,
)
from mtjax.data.neighbours.stored import open_array
from mtjax.data.samples.sample import Dataset, Sample
from mtjax.errors import UserError


class Neighbours:
    """The neighbours of all chunks of a split's samples.

    Attributes:
      header: how the file was made.
      num_neighbours: k, neighbours that are read of a chunk.
      retrieved_chunks: chunks that are read of a neighbour: itself and those after it.
    """

    def __init__(
        self,
        prefix: str | Path,
        split: str,
        corpora: Sequence[IndexedDataset],
        *,
        eod: int,
        vocab_size: int,
        num_neighbours: int,
        retrieved_chunks: int,
    ) -> None:
        """Opens the neighbours of one split, without a comparison with a run: see `open`.

        Args:
          prefix: of the files; that of a split is PREFIX.SPLIT.npy.
          split: train, valid or test.
          corpora: the database, in the order of the header; each once.
          eod: the id that fills up after the end of a document.
          vocab_size: ids are below this.
          num_neighbours: k, at most those in the file.
          retrieved_chunks: chunks of a neighbour, at least 1.

        Raises:
          UserError: a file is missing, damaged, or too small for these numbers.
        """
        self.prefix, self.split = Path(prefix), split
        self.header = read_header(header_path(prefix, split))
        self.num_neighbours, self.retrieved_chunks = num_neighbours, retrieved_chunks
        self._eod, self._vocab_size = eod, vocab_size
        if num_neighbours > self.header.neighbours:
            raise UserError(
                f"{rows_path(prefix, split)} has {self.header.neighbours} neighbours of each chunk, and "
                f"retro_num_neighbours is {num_neighbours}: take fewer, or make more with mtjax data neighbours"
            )
        compared = self.header.search.get("retrieved_chunks", 0)
        # Chunks that were not compared may have the text that the model is to predict.
        if self.header.search.get("without_overlap") and retrieved_chunks > compared:
            raise UserError(
                f"{header_path(prefix, split)}: --without-overlap was of {compared} chunks of a neighbour, and "
                f"retro_retrieved_chunks is {retrieved_chunks}: make neighbours with this number"
            )
        self._database = ChunkDatabase(corpora, self.header.settings.retro_chunk)
        self._check_database(corpora)
        self._map()

    @classmethod
    def open(
        cls,
        prefix: str | Path,
        split: str,
        settings: SampleSettings,
        corpora: Sequence[IndexedDataset],
        **arguments: Any,
    ) -> "Neighbours":
        """Opens the neighbours of one split of a run.

        Args:
          prefix: see `__init__`.
          split: see `__init__`.
          settings: what shapes the run's samples.
          corpora: see `__init__`.
          arguments: the others of `__init__`.

        Raises:
          UserError: they are of other samples: names the setting that differs, with both values; or as `__init__`.
        """
        path = header_path(prefix, split)
        check_settings(path, read_header(path).settings, settings)
        return cls(prefix, split, corpora, **arguments)

    @property
    def chunks(self) -> int:
        """Chunks in a sample."""
        return self.header.settings.sequence_length // self.header.settings.retro_chunk

    def __len__(self) -> int:
        return self.header.samples

    def numbers(self, index: int) -> np.ndarray:
        """Returns the neighbours of each chunk of a sample, the nearest first: int64[chunks, k], -1 for none.

        Raises:
          UserError: they are not what was written.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        # The checksum is of int64, whichever type the file has.
        rows = self._rows[index * self.chunks : (index + 1) * self.chunks].astype(np.int64)
        # Sample by sample as they are read: a check of all files at the start would read them in full.
        if checksum(rows) != self._sums[index, 1]:
            raise UserError(
                f"{rows_path(self.prefix, self.split)} is corrupted: the neighbours of sample {index} are not those "
                "that were found; make it anew with mtjax data neighbours"
            )
        return rows[:, : self.num_neighbours]

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns the tokens of the neighbours of a sample: int32[chunks, k, r], r = retrieved_chunks x chunk.

        Each is followed by what is after it in its document, then by the end-of-document token.
        """
        return self._database.padded(self.numbers(index), self.retrieved_chunks, self._eod, self._vocab_size)

    def check(self, index: int, tokens: np.ndarray) -> None:
        """Checks that a sample has the tokens whose neighbours were searched.

        Raises:
          UserError: it has others.
        """
        if checksum(tokens) != self._sums[index, 0]:
            raise UserError(
                f"sample {index} is not the one for which {rows_path(self.prefix, self.split)} has neighbours: make "
                "neighbours for this run with mtjax data neighbours"
            )

    def _check_database(self, corpora: Sequence[IndexedDataset]) -> None:
        path, known = header_path(self.prefix, self.split), self.header.database
        if len(known) != len(corpora):
            raise UserError(f"{path} was searched in {len(known)} corpora, and the run's database has {len(corpora)}")
        for entry, corpus in zip(known, corpora, strict=True):
            # Numbers of chunks mean other text in a corpus that has changed.
            if (content := corpus.content()) != entry["content"]:
                raise UserError(
                    f"{path} was searched in {entry['name']} of content {entry['content']}, and {corpus.prefix} has "
                    f"{content}: make the neighbours anew with mtjax data neighbours"
                )
        if self.header.chunks != len(self._database):
            raise UserError(f"{path} knows {self.header.chunks:,} chunks, and its corpora have {len(self._database):,}")

    def _map(self) -> None:
        header = self.header
        rows, sums = rows_path(self.prefix, self.split), sums_path(self.prefix, self.split)
        self._rows = open_array(rows, (header.rows, header.neighbours), ("<i4", "<i8"))
        self._sums = open_array(sums, (header.samples, 2), ("<u4",))

    # Worker processes map the files themselves: a pickled memory map is a copy.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_rows", "_sums")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()


def digest_of_neighbours(prefix: str | Path, split: str, samples: int | None = None) -> tuple[int, str]:
    """Returns how many samples of a split have neighbours, and a digest of the checksums of these and their neighbours.

    Args:
      prefix: of the files.
      split: train or valid.
      samples: read those of the first ones only; of all if there are not as many.

    Raises:
      UserError: a file is missing or damaged.
    """
    header = read_header(header_path(prefix, split))
    # Only the first samples: a run that is continued for longer has neighbours of more, and only those that it has read
    # must be the same.
    sums = open_array(sums_path(prefix, split), (header.samples, 2), ("<u4",))[:samples]
    return len(sums), hashlib.blake2b(np.ascontiguousarray(sums).data, digest_size=16).hexdigest()


def checksum(numbers: np.ndarray) -> int:
    """Returns the CRC-32 of integers as little-endian int64."""
    return zlib.crc32(np.ascontiguousarray(numbers, "<i8").data)


class WithNeighbours:
    """Samples with the array `neighbours`, int32[chunks, k, r]: see `Neighbours.__getitem__`."""

    def __init__(self, dataset: Dataset, neighbours: Neighbours, needed: int) -> None:
        """Joins samples and neighbours of equal numbers.

        Args:
          dataset: samples.
          neighbours: theirs.
          needed: samples that the run needs.

        Raises:
          UserError: there are neighbours for fewer.
        """
        self.dataset, self.neighbours = dataset, neighbours
        if len(neighbours) < needed:
            raise UserError(
                f"{rows_path(neighbours.prefix, neighbours.split)} has neighbours of {len(neighbours):,} samples, and "
                f"the run needs {needed:,}: make neighbours for this run with mtjax data neighbours"
            )

    def __len__(self) -> int:
        return min(len(self.dataset), len(self.neighbours))

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        sample = self.dataset[index]
        self.neighbours.check(index, sample["tokens"])
        return sample | {"neighbours": self.neighbours[index]}
