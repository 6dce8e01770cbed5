"""Megatron's indexed dataset: `PREFIX.bin` holds token ids, `PREFIX.idx` says where each sequence and document starts.

The index, little-endian: magic, u64 version, u8 type code, u64 sequences, u64 document indices, then int32 lengths,
int64 byte offsets, int64 document starts, and for multimodal data int8 modes. Same bytes as Megatron-LM's
`megatron/core/datasets/indexed_dataset.py`.
"""

import hashlib
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.data.corpus.meta import meta_path, read_meta
from mtjax.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"), start=1)
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# Megatron's limit (`DType.optimal_dtype`).
UINT16_VOCAB = 65_500
SAMPLES, SAMPLED = 64, 1024
"""Parts of a `.bin`, and bytes of each, from which a digest of its content is made."""
CHUNK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the type that Megatron writes: uint16 while the vocabulary is below 65,500, else int32."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Returns the path of the tokens of `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Returns the path of the index of `prefix`."""
    return Path(f"{prefix}.idx")


def is_indexed(prefix: str | Path) -> bool:
    """Returns whether `prefix` names an indexed dataset: both of its files exist."""
    return bin_path(prefix).is_file() and idx_path(prefix).is_file()


class IndexedDataset:
    """An indexed dataset, memory-mapped and checked: nothing outside its files is ever read.

    Attributes:
      prefix: path without `.bin` and `.idx`.
      dtype: type of a token.
      lengths: int32[sequences], tokens in each.
      offsets: int64[sequences], where each starts in `.bin`, in bytes.
      documents: int64[documents + 1], first sequence of each document; the last entry is the number of sequences.
      modes: int8[sequences] of a multimodal dataset, else None.
      meta: tokenizer and checksums, when the dataset was made by mtjax.
    """

    def __init__(self, prefix: str | Path) -> None:
        """Opens `prefix`.

        Raises:
          UserError: a file is missing, or not what it should be; the message names it.
        """
        self.prefix = Path(prefix)
        self._open()

    def _open(self) -> None:
        path = idx_path(self.prefix)
        if self.prefix.is_dir() and not path.exists():
            raise UserError(f"{self.prefix} is a directory; name a dataset: a path without .bin and .idx")
        index = _map(path)
        self.dtype, sequences, document_entries = _read_header(path, index)
        self.lengths, self.offsets, self.documents, self.modes = _read_arrays(path, index, sequences, document_entries)
        tokens = bin_path(self.prefix)
        self._tokens = _map(tokens)
        check_index(path, self.dtype, self.lengths, self.offsets, self.documents, tokens, len(self._tokens))
        self.meta = read_meta(self.prefix)
        # Only the index is compared, which is small; `mtjax data verify` compares the tokens.
        if self.meta is not None and self.meta.idx_crc32 != zlib.crc32(index):
            raise UserError(
                f"{path} is corrupted: its checksum is not the one in {meta_path(self.prefix)} (delete that file if "
                "the dataset was rewritten by another program)"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Returns the tokens of sequence `index`, `length` of them from `offset` on (to its end when None): a read-only
        view."""
        size = int(self.lengths[index])
        length = size - offset if length is None else length
        # numpy would read the tokens of the next sequence.
        if not 0 <= offset <= offset + length <= size:
            raise IndexError(f"tokens {offset}..{offset + length} of sequence {index}, which has {size}")
        start = int(self.offsets[index]) + offset * self.dtype.itemsize
        return np.frombuffer(self._tokens, self.dtype, length, start)

    def flat(self, begin: int, end: int) -> np.ndarray:
        """Returns the tokens `begin` to `end` of all sequences put together: a read-only view."""
        if not 0 <= begin <= end <= len(self._tokens) // self.dtype.itemsize:
            raise IndexError(f"tokens {begin}..{end} of {self.num_tokens}")
        return np.frombuffer(self._tokens, self.dtype, end - begin, begin * self.dtype.itemsize)

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def num_documents(self) -> int:
        """Documents; a document is one or more sequences, rarely none."""
        return len(self.documents) - 1

    def fingerprint(self) -> str:
        """Returns a hash of the lengths: what the order of samples depends on."""
        return hashlib.blake2b(np.ascontiguousarray(self.lengths).data, digest_size=16).hexdigest()

    def content(self) -> str:
        """Returns a digest of the lengths of all sequences, of the number of tokens, and of tokens from all over the
        `.bin`."""
        hashed = hashlib.blake2b(f"{self.fingerprint()} {len(self._tokens)}".encode(), digest_size=16)
        # A corpus may have terabytes: a part of the tokens distinguishes one that was replaced, grown or encoded anew.
        for start in np.linspace(0, max(0, len(self._tokens) - SAMPLED), SAMPLES, dtype=np.int64):
            hashed.update(self._tokens[int(start) : int(start) + SAMPLED])
        return hashed.hexdigest()

    # Worker processes get the path and map the files themselves: copying a corpus through a pipe would be absurd.
    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix = state["prefix"]
        self._open()


def _map(path: Path) -> mmap.mmap | bytes:
    try:
        with path.open("rb") as file:
            # An empty file can't be mapped.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if os.fstat(file.fileno()).st_size else b""
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror}") from e


def _read_header(path: Path, index: mmap.mmap | bytes) -> tuple[np.dtype[Any], int, int]:
    if index[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not an index of tokens: it starts with {index[: len(MAGIC)]!r}, not {MAGIC!r}")
    if len(index) < HEADER.size:
        raise UserError(f"{path} is truncated: {len(index)} bytes, and its header alone has {HEADER.size}")
    _, version, code, sequences, document_entries = HEADER.unpack_from(index)
    if version != VERSION:
        raise UserError(f"{path} has version {version} of the format; only version {VERSION} is known")
    if code not in DTYPES:
        raise UserError(f"{path} has type code {code}; the known ones are 1 to {len(DTYPES)}")
    return DTYPES[code], sequences, document_entries


def _read_arrays(
    path: Path, index: mmap.mmap | bytes, sequences: int, document_entries: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    plain = HEADER.size + 12 * sequences + 8 * document_entries
    if len(index) not in (plain, plain + sequences):
        fault = "is truncated" if len(index) < plain else "is too long"
        raise UserError(
            f"{path} {fault}: {len(index):,} bytes, and {sequences:,} sequences with {document_entries:,} document "
            f"indices take {plain:,}"
        )
    at = HEADER.size
    lengths = np.frombuffer(index, "<i4", sequences, at)
    offsets = np.frombuffer(index, "<i8", sequences, at + 4 * sequences)
    documents = np.frombuffer(index, "<i8", document_entries, at + 12 * sequences)
    multimodal = len(index) > plain
    return lengths, offsets, documents, np.frombuffer(index, "i1", sequences, plain) if multimodal else None


def check_index(
    path: Path,
    dtype: np.dtype[Any],
    lengths: np.ndarray,
    offsets: np.ndarray,
    documents: np.ndarray,
    tokens: Path,
    token_bytes: int,
) -> None:
    """Checks that an index describes exactly its `.bin`, in pieces, so that memory stays bounded.

    Raises:
      UserError: the first thing that is inconsistent, and where.
    """
    _check_documents(path, documents, len(lengths))
    total = 0
    for at in range(0, len(lengths), CHUNK):
        size = lengths[at : at + CHUNK].astype(np.int64)
        if size.min() < 0:
            raise UserError(f"{path} is corrupted: sequence {at + int(np.argmin(size))} has {size.min()} tokens")
        # Megatron reads each sequence at its offset, and `flat` reads across sequences: only without gaps is it the
        # same text.
        ends = total + np.cumsum(size * dtype.itemsize)
        wrong = offsets[at : at + CHUNK] != ends - size * dtype.itemsize
        if wrong.any():
            sequence = at + int(np.argmax(wrong))
            expected = ends[sequence - at] - size[sequence - at] * dtype.itemsize
            raise UserError(
                f"{path} is corrupted: sequence {sequence} starts at byte {offsets[sequence]}, and should at {expected}"
            )
        total = int(ends[-1])
    if total != token_bytes:
        fault = "is truncated" if token_bytes < total else "has bytes that its index doesn't know"
        raise UserError(f"{tokens} {fault}: {token_bytes:,} bytes, and {path.name} describes {total:,}")


def _check_documents(path: Path, documents: np.ndarray, sequences: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != sequences:
        ends = "there are none" if len(documents) == 0 else f"they run from {documents[0]} to {documents[-1]}"
        raise UserError(f"{path} is corrupted: its document starts should run from 0 to {sequences}; {ends}")
    for at in range(0, len(documents), CHUNK):
        falls = np.diff(documents[at : at + CHUNK + 1]) < 0
        if falls.any():
            document = at + int(np.argmax(falls)) + 1
            raise UserError(f"{path} is corrupted: document {document} starts before the one before it")


def prefix_of(name: str) -> str:
    """Returns the prefix of a dataset that is named by it, or by one of its two files."""
    return name.removesuffix(".idx").removesuffix(".bin")


def checked_ids(parts: Sequence[np.ndarray], vocab_size: int, prefix: Path) -> np.ndarray:
    """Joins ids to int32[tokens] and refuses those that the vocabulary doesn't have.

    Args:
      parts: ids as the corpus holds them, in any of its types.
      vocab_size: ids are below this.
      prefix: of the corpus, for messages.

    Raises:
      UserError: names the first id that is wrong.
    """
    ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
    # Before the cast to int32, which would make another token of 2^33 + 5 or of 2.5.
    wrong = ~((ids >= 0) & (ids < vocab_size))  # of a NaN, too
    if ids.dtype.kind == "f":
        wrong |= ids != np.floor(ids)
    if wrong.any():
        raise UserError(
            f"{prefix}.bin holds the token {ids[int(np.argmax(wrong))]}, and the vocabulary has {vocab_size}: it was "
            "made with another tokenizer, or is corrupted"
        )
    return ids.astype(np.int32, copy=False)
