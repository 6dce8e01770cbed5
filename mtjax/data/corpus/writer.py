"""Writes an indexed dataset in a stream: constant memory, resumable, and complete or not at all under its own name."""

import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from mtjax.data.corpus.indexed import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path
from mtjax.data.corpus.meta import UNKNOWN, Meta, TokenizerRecord, file_crc32, meta_path, write_meta
from mtjax.errors import UserError

CHUNK = 1 << 20
# The index has all lengths before all offsets, so it can be written only at the end: its parts are collected in files.
STREAMED = ("bin", "lengths", "documents", "modes")


class IndexedWriter:
    """Collects sequences in partial files next to `PREFIX`; `seal` makes an index of them, `publish` renames.

    Use as a context manager: leaving it keeps the partial files, which `resume_at` continues.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any], resume_at: Mapping[str, int] | None = None) -> None:
        """Opens the partial files.

        Args:
          prefix: path without `.bin` and `.idx`.
          dtype: type of a token; one of `indexed.DTYPES`.
          resume_at: an earlier `position()`: keeps what was written until then; starts afresh when None.

        Raises:
          UserError: the folder can't be written.
        """
        self.prefix = Path(prefix)
        self.dtype = dtype
        self._crc = resume_at["crc32"] if resume_at else 0
        self.paths = {part: partial_path(prefix, part) for part in STREAMED}
        try:
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._files: dict[str, IO[bytes]] = {}
            for part, path in self.paths.items():
                self._files[part] = _open(path, resume_at[part] if resume_at else None)
        except OSError as e:
            raise UserError(f"{self.prefix} can't be written: {e.strerror}") from e

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self, tokens: np.ndarray, lengths: np.ndarray, sequences: np.ndarray, modes: np.ndarray | None = None
    ) -> None:
        """Appends documents.

        Args:
          tokens: the ids of all of them, one after another.
          lengths: int32[sequences], tokens in each sequence.
          sequences: int32[documents], sequences in each document.
          modes: int8[sequences] of multimodal data: with all sequences or with none.
        """
        data = np.ascontiguousarray(tokens, self.dtype).data
        # Continues over interruptions: `position` saves it.
        self._crc = zlib.crc32(data, self._crc)
        self._files["bin"].write(data)
        self._files["lengths"].write(np.ascontiguousarray(lengths, "<i4").data)
        self._files["documents"].write(np.ascontiguousarray(sequences, "<i4").data)
        if modes is not None:
            self._files["modes"].write(np.ascontiguousarray(modes, "i1").data)

    def position(self) -> dict[str, int]:
        """Flushes the partial files, and returns the bytes of each that are on disk, for `resume_at`."""
        for file in self._files.values():
            file.flush()
            # A record must not promise bytes that a power cut takes.
            os.fsync(file.fileno())
        return {"crc32": self._crc, **{part: file.tell() for part, file in self._files.items()}}

    def seal(self, made_with: TokenizerRecord = UNKNOWN, part: dict[str, Any] | None = None) -> None:
        """Writes the index of everything added, and the facts about it (see `Meta`), still under partial names."""
        self.position()
        self.close()
        index = partial_path(self.prefix, "idx")
        write_index(index, self.dtype, self.paths["lengths"], self.paths["documents"], self.paths["modes"])
        meta = Meta(**vars(made_with), idx_crc32=file_crc32(index), bin_crc32=self._crc, part=part)
        write_meta(partial_path(self.prefix, "meta"), meta)

    def finish(self, made_with: TokenizerRecord = UNKNOWN) -> None:
        """Calls `seal` and `publish`, for datasets that are written in one go."""
        self.seal(made_with)
        publish(self.prefix)

    def close(self) -> None:
        """Closes the partial files, keeping them."""
        for file in self._files.values():
            file.close()


def publish(prefix: Path) -> None:
    """Gives the sealed files of `prefix` their names, the index last; does nothing for those that have them already."""
    index = partial_path(prefix, "idx")
    if index.is_file():  # an old index must never be next to new tokens
        idx_path(prefix).unlink(missing_ok=True)
    # A dataset without an index is none: until the last rename nothing reads a half.
    for part, final in (("bin", bin_path(prefix)), ("meta", meta_path(prefix)), ("idx", idx_path(prefix))):
        if partial_path(prefix, part).is_file():
            partial_path(prefix, part).replace(final)
    discard(prefix)


def discard(prefix: Path) -> None:
    """Deletes the partial files of `prefix`."""
    for part in (*STREAMED, "idx", "meta"):
        partial_path(prefix, part).unlink(missing_ok=True)


def partial_path(prefix: str | Path, part: str) -> Path:
    """Returns the path of one of the files of an unfinished dataset."""
    prefix = Path(prefix)
    return prefix.with_name(f".{prefix.name}.{part}.partial")


def can_resume(prefix: str | Path, position: Mapping[str, int]) -> bool:
    """Returns whether the partial files are at least as long as `position` requires."""
    paths = {part: partial_path(prefix, part) for part in STREAMED}
    return all(path.is_file() and path.stat().st_size >= position.get(part, -1) for part, path in paths.items())


def _open(path: Path, size: int | None) -> IO[bytes]:
    file = path.open("wb" if size is None else "r+b")
    if size is not None:
        # What was written after the record is written again.
        file.truncate(size)
        file.seek(size)
    return file


def write_index(path: Path, dtype: np.dtype[Any], lengths: Path, documents: Path, modes: Path) -> None:
    """Writes an `.idx` in constant memory.

    Args:
      path: the file.
      dtype: type of a token.
      lengths: file of int32 lengths.
      documents: file of int32 sequences per document.
      modes: file of int8 modes, empty when there are none.
    """
    sequences, count = lengths.stat().st_size // 4, documents.stat().st_size // 4
    if modes.stat().st_size not in (0, sequences):
        raise ValueError(f"{modes.stat().st_size} modes for {sequences} sequences")
    with path.open("wb") as out:
        out.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], sequences, count + 1))
        _copy(lengths, out)
        total = 0
        for chunk in _chunks(lengths):
            size = chunk.astype("<i8") * dtype.itemsize
            ends = total + np.cumsum(size, dtype="<i8")
            out.write((ends - size).astype("<i8").data)
            total = int(ends[-1])
        # Megatron's list of documents begins with 0, and has one entry more than there are documents.
        out.write(np.zeros(1, "<i8").data)
        total = 0
        for chunk in _chunks(documents):
            ends = total + np.cumsum(chunk, dtype="<i8")
            out.write(ends.astype("<i8").data)
            total = int(ends[-1])
        _copy(modes, out)
        out.flush()
        os.fsync(out.fileno())


def _copy(path: Path, out: IO[bytes]) -> None:
    with path.open("rb") as file:
        shutil.copyfileobj(file, out, CHUNK)


def _chunks(path: Path) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        while data := file.read(4 * CHUNK):
            yield np.frombuffer(data, "<i4")
