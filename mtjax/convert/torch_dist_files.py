"""Folders of PyTorch's `torch.distributed.checkpoint`, read without torch: a slice of a tensor at a time.

`.metadata` is a pickle that lists every tensor's chunks: boxes of it, which together are all of it. A chunk is an entry
of a `*.distcp` file, a complete `torch.save` archive: a zip without compression, so that its numbers can be mapped.
"""

import io
import math
import struct
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from mtjax.convert.torch_dist_pickle import (
    TYPES,
    MetadataUnpickler,
    Record,
    StateUnpickler,
    TensorEntry,
    TensorUnpickler,
    unpickled,
)
from mtjax.errors import UserError

METADATA_FILE = ".metadata"
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, None) or name) for name in TYPES}
_LOCAL_HEADER = 30
"""Bytes of a zip's local header before the name and the extra field."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


@dataclass(frozen=True)
class FileBytes:
    """Bytes of a file in the folder."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredBox:
    """A box of a tensor, and the archive that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    entry: FileBytes


class _Window(io.RawIOBase):
    """Bytes of a file, as a file: the offsets in a zip count from its start."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        # io's numbers: SEEK_SET, SEEK_CUR, SEEK_END.
        self._at = (0, self._at, self._length)[whence] + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        wanted = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[:wanted])  # pyright: ignore[reportAttributeAccessIssue]
        self._at += count
        return count


@dataclass(frozen=True)
class Archive:
    """A `torch.save` archive: all of a file, or an entry of a `.distcp` file."""

    path: Path
    start: int = 0
    length: int | None = None

    @contextmanager
    def _opened(self) -> Iterator[tuple[zipfile.ZipFile, _Window, str]]:
        """Yields the zip, its bytes, and the folder in it that holds `data.pkl`.

        Raises:
          UserError: it is not such an archive.
        """
        try:
            # Unbuffered: the window above has a buffer of its own.
            with self.path.open("rb", buffering=0) as file:
                size = self.path.stat().st_size
                length = size - self.start if self.length is None else self.length
                if self.start < 0 or length < 0 or self.start + length > size:
                    raise UserError(
                        f"{self.path} is truncated: it has {size} bytes, and an entry ends at {self.start + length}"
                    )
                window = _Window(file, self.start, length)
                with zipfile.ZipFile(io.BufferedReader(window, 4096)) as archive:
                    # torch names the folder in the zip after the file.
                    root = next(n for n in archive.namelist() if n.endswith("/data.pkl")).removesuffix("data.pkl")
                    order = f"{root}byteorder"
                    # Older archives lack the entry.
                    if order in archive.NameToInfo and archive.read(order) != b"little":
                        raise UserError(f"{self.path} was saved on a big-endian machine, which mtjax does not read")
                    yield archive, window, root
        except (zipfile.BadZipFile, StopIteration, KeyError, NotImplementedError, EOFError, struct.error) as e:
            raise UserError(f"{self.path} is corrupted: at byte {self.start} it has no archive of torch.save") from e
        except OSError as e:
            raise UserError(f"{self.path} can't be read: {e.strerror or e}") from e

    def state(self) -> Any:
        """Returns plain values, and records instead of all other objects.

        Raises:
          UserError: it is damaged, or would run code.
        """
        with self._opened() as (archive, _, root):
            value = unpickled(archive.read(f"{root}data.pkl"), StateUnpickler, str(self.path))
            return _with_scalars(value, lambda entry: archive.read(f"{root}data/{entry.storage}"))

    def tensor(self) -> tuple[np.ndarray, str]:
        """Returns the tensor, mapped from the file, and its type.

        Raises:
          UserError: it is damaged, or no tensor.
        """
        with self._opened() as (archive, window, root):
            entry = unpickled(archive.read(f"{root}data.pkl"), TensorUnpickler, str(self.path))
            if not isinstance(entry, TensorEntry) or entry.dtype not in DTYPES:
                raise UserError(f"{self.path} holds at byte {self.start} no tensor, or one of an unknown type")
            info, dtype = archive.getinfo(f"{root}data/{entry.storage}"), DTYPES[entry.dtype]
            window.seek(info.header_offset)
            # The local header's extra field differs from that of the list of members: torch aligns the numbers with it.
            name, extra = struct.unpack("<HH", window.read(_LOCAL_HEADER)[26:])
            begin = info.header_offset + _LOCAL_HEADER + name + extra
            end = begin + info.file_size
            # Compressed bytes can't be mapped; torch.save stores them as they are.
            is_stored = info.compress_type == zipfile.ZIP_STORED and end <= window.seek(0, io.SEEK_END)
        steps = sum((size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True))
        if 0 in entry.shape:
            return np.zeros(entry.shape, dtype), entry.dtype
        if not is_stored or (entry.first + steps + 1) * dtype.itemsize > info.file_size:
            raise UserError(f"{self.path} is corrupted: the tensor at byte {self.start} does not fit its bytes")
        # As bytes first: the start of an archive in a .distcp file is not aligned to the numbers' size.
        raw = np.memmap(self.path, np.uint8, "r", self.start + begin, (info.file_size,))
        flat = raw[: info.file_size // dtype.itemsize * dtype.itemsize].view(dtype)[entry.first :]
        # A saved tensor may be a view of a larger storage, such as a transposed one.
        strides = [stride * dtype.itemsize for stride in entry.strides]
        # Within the bounds that were checked above: strides of a damaged file would read elsewhere.
        return np.lib.stride_tricks.as_strided(flat, entry.shape, strides, writeable=False), entry.dtype


def _with_scalars(value: Any, read: Callable[[TensorEntry], bytes]) -> Any:
    """Returns plain values with tensors of one number as that number, such as the steps of torch's Adam."""
    if isinstance(value, TensorEntry) and math.prod(value.shape) == 1 and value.dtype in DTYPES:
        dtype = DTYPES[value.dtype]
        return np.frombuffer(read(value), dtype, 1, value.first * dtype.itemsize)[0].item()
    if isinstance(value, dict):
        return {key: _with_scalars(one, read) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_scalars(one, read) for one in value)
    return value


class StoredTensor:
    """A tensor of a folder: its type, its shape and its chunks."""

    def __init__(self, folder: Path, key: str, dtype: str, shape: tuple[int, ...], chunks: Sequence[StoredBox]) -> None:
        """Checks that the chunks are all of the tensor.

        Raises:
          UserError: they overlap, leave gaps or are outside of it.
        """
        self._folder, self.key, self.dtype, self.shape, self.chunks = folder, key, dtype, shape, tuple(chunks)
        self._check_boxes()
        # An optimizer's tensor may have thousands of chunks, and is read layer by layer.
        self._by_row: dict[int, list[StoredBox]] = defaultdict(list)
        for chunk in chunks:
            self._by_row[chunk.offsets[0] if shape else 0].append(chunk)
        self._tallest = max((chunk.sizes[0] for chunk in chunks if shape), default=1)

    def read(self, index: Sequence[int] = ()) -> np.ndarray:
        """Returns the tensor, or its slice at this index of the first dimensions.

        Raises:
          UserError: a chunk is missing, damaged, or not what `.metadata` says.
        """
        low = (*index, *(0,) * (len(self.shape) - len(index)))
        high = (*(i + 1 for i in index), *self.shape[len(index) :])
        return self._box(low, high).reshape(self.shape[len(index) :])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows from `start` to `stop` of the first dimension.

        Raises:
          UserError: a chunk is missing, damaged, or not what `.metadata` says.
        """
        return self._box((start, *(0,) * (len(self.shape) - 1)), (stop, *self.shape[1:]))

    def _box(self, low: Sequence[int], high: Sequence[int]) -> np.ndarray:
        # `_check_boxes` has made sure that the chunks fill it, so it need not be zeroed.
        out = np.empty([b - a for a, b in zip(low, high, strict=True)], DTYPES[self.dtype])
        for chunk in self._near(low, high):
            begin = [max(a, o) for a, o in zip(low, chunk.offsets, strict=True)]
            end = [min(b, o + s) for b, o, s in zip(high, chunk.offsets, chunk.sizes, strict=True)]
            if all(a < b for a, b in zip(begin, end, strict=True)):
                out[_slices(begin, end, low)] = self._numbers(chunk)[_slices(begin, end, chunk.offsets)]
        return out

    def _near(self, low: Sequence[int], high: Sequence[int]) -> Iterable[StoredBox]:
        """Returns the chunks that may share a row of the first dimension with a box."""
        # For a wide box looking at all chunks is as fast as looking up each row.
        if not self.shape or high[0] - low[0] + self._tallest > len(self._by_row):
            return self.chunks
        rows = range(low[0] - self._tallest + 1, high[0])
        return [chunk for row in rows for chunk in self._by_row.get(row, ())]

    def _numbers(self, chunk: StoredBox) -> np.ndarray:
        entry = chunk.entry
        array, dtype = Archive(self._folder / entry.file, entry.offset, entry.length).tensor()
        # Files and list must be of one save: a folder into which a run saved twice has chunks of both.
        if array.shape != chunk.sizes or dtype != self.dtype:
            raise UserError(
                f"{self._folder / entry.file} holds {dtype} {list(array.shape)} at byte {entry.offset}, and "
                f"{METADATA_FILE} lists {self.dtype} {list(chunk.sizes)} there, of {self.key}: the files are of "
                "different saves"
            )
        return array

    def _check_boxes(self) -> None:
        boxes = [(chunk.offsets, chunk.sizes) for chunk in self.chunks]
        name = f"{self._folder}: {self.key}"
        for offsets, sizes in boxes:
            ends = [o + s for o, s in zip(offsets, sizes, strict=False)]
            fits = len(offsets) == len(sizes) == len(self.shape) and min((*offsets, *sizes), default=0) >= 0
            if not fits or any(end > size for end, size in zip(ends, self.shape, strict=True)):
                raise UserError(f"{name} is {list(self.shape)}, and has a chunk of {list(sizes)} at {list(offsets)}")
        # Empty boxes may be at the place of others.
        filled = [box for box in boxes if math.prod(box[1])]
        if pair := overlapping(filled):
            raise UserError(f"{name} has chunks that overlap: {_text(pair[0])} and {_text(pair[1])}")
        # Boxes without overlaps fill the tensor if they have as many numbers as it has.
        found, needed = sum(math.prod(sizes) for _, sizes in filled), math.prod(self.shape)
        if found != needed:
            raise UserError(f"{name} has chunks with {found} of its {needed} numbers: some are missing")


def _slices(begin: Sequence[int], end: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, origin, strict=True))


def _text(box: Box) -> str:
    return f"{list(box[1])} at {list(box[0])}"


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two boxes that share a number, if any do.

    Boxes are separated along one dimension after the other, so that a grid of n boxes takes n log n comparisons.
    """
    groups: list[Sequence[Box]] = [boxes]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        smaller = next((parts for axis in range(len(group[0][0])) if len(parts := _separated(group, axis)) > 1), None)
        if smaller is not None:
            groups += smaller
            continue
        for i, one in enumerate(group):
            for other in group[:i]:
                edges = zip(*one, *other, strict=True)
                if all(max(a, b) < min(a + n, b + m) for a, n, b, m in edges):
                    return other, one
    return None


def _separated(boxes: Sequence[Box], axis: int) -> list[list[Box]]:
    """Returns groups of boxes whose ranges in a dimension do not overlap those of another group."""
    groups: list[list[Box]] = []
    edge = -1
    for box in sorted(boxes, key=lambda box: box[0][axis]):
        if not groups or box[0][axis] >= edge:
            groups.append([])
        groups[-1].append(box)
        edge = max(edge, box[0][axis] + box[1][axis])
    return groups


class DistributedCheckpoint:
    """A folder of `torch.distributed.checkpoint`: tensors in chunks, and pickled objects."""

    def __init__(self, folder: Path) -> None:
        """Reads `.metadata`; a tensor's chunks are checked when it is asked for.

        Raises:
          UserError: it is missing, damaged or would run code.
        """
        self.folder = folder
        path = folder / METADATA_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError as e:
            raise UserError(f"{folder} lacks {METADATA_FILE}, which `cp {folder}/*` leaves out: copy it too") from e
        except OSError as e:
            raise UserError(f"{path} can't be read: {e.strerror or e}") from e
        meta = unpickled(data, MetadataUnpickler, str(path))
        try:
            self._described: Mapping[str, Any] = dict(meta.state_dict_metadata)
            self._entries = dict(_entry(index, info) for index, info in meta.storage_data.items())
            # Tensors have chunks; what lacks them is a pickled object.
            self.keys = tuple(key for key, value in self._described.items() if hasattr(value, "chunks"))
        except (AttributeError, TypeError, ValueError) as e:
            raise UserError(f"{path} does not describe a checkpoint: {e}") from e
        self.objects = tuple(key for key in self._described if key not in set(self.keys))

    def tensor(self, key: str) -> StoredTensor:
        """Returns a tensor and its chunks.

        Raises:
          UserError: chunks are missing or overlap, or its type is not known.
        """
        try:
            value = self._described[key]
            shape = tuple(value.size)
            # The state of TensorProperties is a dict or a tuple, by the version of torch.
            dtype = value.properties.dtype if hasattr(value.properties, "dtype") else value.properties.state[0]
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.chunks]
            if not all(isinstance(number, int) for number in (*shape, *(n for box in boxes for of in box for n in of))):
                raise TypeError("a size is not an integer")
        except (AttributeError, TypeError, IndexError) as e:
            raise UserError(f"{self.folder / METADATA_FILE} does not describe the tensor {key}: {e}") from e
        if dtype not in DTYPES:
            raise UserError(f"{self.folder} holds {key} as {getattr(dtype, 'args', dtype)}, a type that is not read")
        chunks = [StoredBox(offsets, sizes, self._found(key, offsets)) for offsets, sizes in boxes]
        return StoredTensor(self.folder, key, dtype, shape, chunks)

    def object(self, key: str) -> Any:
        """Returns a pickled object: plain values, and records instead of all other objects.

        Raises:
          UserError: it is missing, damaged, or would run code.
        """
        entry = self._found(key, None)
        return Archive(self.folder / entry.file, entry.offset, entry.length).state()

    def missing_files(self, keys: Iterable[str]) -> list[str]:
        """Returns the files that hold chunks of these tensors and are not in the folder."""
        wanted = set(keys)
        files = sorted({entry.file for (key, _), entry in self._entries.items() if key in wanted})
        return [file for file in files if not (self.folder / file).is_file()]

    def _found(self, key: str, offsets: tuple[int, ...] | None) -> FileBytes:
        entry = self._entries.get((key, offsets))
        if entry is None:
            at = "" if offsets is None else f" at {list(offsets)}"
            raise UserError(f"{self.folder / METADATA_FILE} lists {key}{at}, and not the file that holds it")
        return entry


def _entry(index: Record, info: Record) -> tuple[tuple[str, tuple[int, ...] | None], FileBytes]:
    """Returns a chunk's key and offsets, and where its bytes are.

    Raises:
      UserError: it is outside the folder, or compressed.
    """
    stored: Any = info
    offsets = getattr(index, "offset", None)
    file, key = str(stored.relative_path), str(getattr(index, "fqn", ""))
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file:
        raise UserError(f"{METADATA_FILE} places {key} in {file!r}, which is outside the folder")
    if getattr(stored, "transform_descriptors", None):
        raise UserError(
            f"{METADATA_FILE} says that {key} is transformed, such as compressed, which mtjax does not read"
        )
    return (key, None if offsets is None else tuple(offsets)), FileBytes(file, int(stored.offset), int(stored.length))
