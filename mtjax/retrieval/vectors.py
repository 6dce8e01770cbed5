"""The embeddings of a database: ranges of files, one after another, and the numbers of their chunks."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class VectorRange(NamedTuple):
    """Rows `begin` to `end` of a file: chunks `first` + `begin` to `first` + `end` of the database."""

    rows: np.ndarray
    begin: int
    end: int
    first: int


class Vectors:
    """The vectors in which neighbours are searched, in rows 0, 1, ...; each row has the number of a chunk.

    Attributes:
      width: of a vector.
    """

    def __init__(self, parts: Sequence[VectorRange]) -> None:
        self.parts, self.width = [part for part in parts if part.end > part.begin], parts[0].rows.shape[1]
        self._ends = np.cumsum([part.end - part.begin for part in self.parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def chunks(self, row_numbers: np.ndarray) -> np.ndarray:
        """Returns the number of each row's chunk, of the same shape; -1 for -1."""
        # clip: rows of -1 and those of empty indices must not be out of range before `where` drops them.
        part = np.searchsorted(self._ends, row_numbers, side="right").clip(0, len(self.parts) - 1)
        # The number of the part's first row, and its chunk.
        begins = np.array([end - (p.end - p.begin) for end, p in zip(self._ends, self.parts, strict=True)], np.int64)
        chunks = np.array([p.first + p.begin for p in self.parts], np.int64)
        return np.where(row_numbers < 0, -1, chunks[part] + row_numbers - begins[part])

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the number of the first row of each block, and its vectors, float16[at most size, width]."""
        first = 0
        for part in self.parts:
            for at in range(part.begin, part.end, size):
                block = np.asarray(part.rows[at : min(at + size, part.end)])
                yield first, block
                first += len(block)

    def take(self, row_numbers: np.ndarray) -> np.ndarray:
        """Returns the vectors of some rows, float16[rows, width]."""
        out = np.empty((len(row_numbers), self.width), np.float16)
        part = np.searchsorted(self._ends, row_numbers, side="right")
        for number, each in enumerate(self.parts):
            mine = part == number
            begin = int(self._ends[number]) - (each.end - each.begin)
            # File by file: fancy indexing of a memory map reads only the rows that are asked for.
            out[mine] = each.rows[each.begin + row_numbers[mine] - begin]
        return out


class Index(Protocol):
    """Finds the vectors that are nearest to others."""

    def __len__(self) -> int:
        """The number of vectors."""
        ...

    def search(self, queries: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Finds the nearest vectors by Euclidean distance, the nearest first; vectors of zeros are never found.

        Args:
          queries: float16[queries, width].
          count: how many to find.

        Returns:
          Places, int64[queries, count], and squared distances, float32; -1 and infinity where there are no more.
        """
        ...
