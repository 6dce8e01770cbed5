"""A `.npy` file that is written row by row over interruptions, and is under its name only when it is complete."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.cache import digest
from mtjax.data.neighbours.stored import array_header
from mtjax.errors import UserError


class RowsFile:
    """Rows of known number and shape, appended in blocks.

    The partial file is beside the final one, with a record of how many rows are on disk and what they were made from:
    only the same job continues it.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: str, identity: Mapping[str, Any]) -> None:
        """Describes the file; opens nothing.

        Args:
          path: ends in .npy.
          shape: [rows, ...].
          dtype: numpy's name of it.
          identity: all that the rows depend on, as JSON values.
        """
        self.path, self.shape, self.dtype = path, shape, np.dtype(dtype)
        self._identity = digest({"identity": identity, "shape": shape, "dtype": self.dtype.str})
        self._partial = path.with_name(f".{path.name}.partial")
        self._record = path.with_name(f".{path.name}.progress.json")
        self._header = array_header(shape, dtype)
        self.done = 0

    @contextmanager
    def opened(self) -> Iterator["RowsFile"]:
        """Opens the partial file to write after the rows that an earlier run of the same job left, which `done` counts.

        Raises:
          UserError: another run writes it, or it can't be written.
        """
        with _writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not "w": a run that does not get the lock must not empty the file of the one that has it.
            file = self._partial.open("a+b")
        with file:
            with _writing(self.path):
                self._lock(file)
                self.done = self._saved()
                if not self.done:  # before the truncation: another job's record would vouch for these rows
                    self._record.unlink(missing_ok=True)
                file.truncate(len(self._header) + self.done * self._row_bytes if self.done else 0)
                file.seek(0, os.SEEK_END)
                if not self.done:
                    file.write(self._header)
                    file.flush()
            self._file = file
            yield self

    def rewind(self, rows: int) -> None:
        """Forgets all but the first rows: of files that are written together, one may be ahead."""
        self.done = min(rows, self.done)
        with _writing(self.path):
            self._file.truncate(len(self._header) + self.done * self._row_bytes)

    def append(self, rows: np.ndarray) -> None:
        """Writes the next rows, and records that they are there."""
        assert rows.shape[1:] == self.shape[1:] and self.done + len(rows) <= self.shape[0]
        with _writing(self.path):
            self._file.write(np.ascontiguousarray(rows, self.dtype).tobytes())
            self._file.flush()
            # Rows before the record that counts them: after a power cut there may be more rows than it says, never
            # fewer.
            os.fsync(self._file.fileno())
            self.done += len(rows)
            temporary = self._record.with_name(self._record.name + ".tmp")
            temporary.write_text(json.dumps({"identity": self._identity, "rows": self.done}))
            temporary.replace(self._record)

    def publish(self) -> None:
        """Gives the complete file its name."""
        assert self.done == self.shape[0]
        with _writing(self.path):
            self._partial.replace(self.path)
            self._record.unlink(missing_ok=True)

    @property
    def _row_bytes(self) -> int:
        return int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize

    def _lock(self, file: Any) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another run is writing {self.path} at this moment") from None
        except OSError:  # a file system without locks
            return

    def _saved(self) -> int:
        """Returns the rows of the same job that are on disk."""
        try:
            saved = json.loads(self._record.read_text())
            rows = int(saved["rows"]) if saved["identity"] == self._identity else 0
            size = self._partial.stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return rows if 0 <= rows <= self.shape[0] and size >= len(self._header) + rows * self._row_bytes else 0


def write_with_header(array: RowsFile, header: Path, text: str) -> None:
    """Publishes an array and its record: the record of an earlier array goes first, and the new one comes last."""
    with _writing(header):
        header.unlink(missing_ok=True)
        array.publish()
        temporary = header.with_name(f".{header.name}.new")
        temporary.write_text(text)
        temporary.replace(header)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says in a sentence that a file can't be written: around what writes, and not around what makes the rows."""
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} can't be written: {e.strerror or e}") from e
