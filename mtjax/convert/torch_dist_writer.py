"""Folders of PyTorch's `torch.distributed.checkpoint`, written without torch: a chunk at a time."""

import argparse
import io
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mtjax.convert.torch_dist_files import METADATA_FILE, Box, FileBytes
from mtjax.convert.torch_dist_pickle import FILESYSTEM, METADATA, STORAGES

FILE_BYTES = 4 << 30
"""A file that has more is ended."""
ALIGNMENT = 64
"""Of numbers, in bytes from the start of their archive, as torch aligns them."""
_PART = 1 << 24
"""Bytes that are copied at once."""
_ZIP64 = 20
"""Bytes of the extra field that zipfile adds for a large member."""
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if dtype}
_FIRST_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Global:
    """A class or function, by its full name: it need not be installed."""

    name: str


@dataclass(frozen=True)
class Call:
    """What a function returns."""

    function: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)  # hashed by identity, so that it can be the key of a dict
class Instance:
    """An object of a class, with its state: attributes, or what its `__setstate__` takes."""

    of: str
    state: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """An object that the archive holds elsewhere: a storage."""

    id: tuple[Any, ...]


def pickled(value: Any) -> bytes:
    """Returns a pickle, protocol 2, of plain values and the classes above.

    Raises:
      TypeError: it holds something else.
    """
    # Written by hand, as pickle.dumps needs the classes, which are torch's.
    return b"\x80\x02" + _pickled(value) + b"."


def _pickled(value: Any) -> bytes:
    match value:
        case None:
            return b"N"
        # Before int, of which bool is a subclass.
        case bool():
            return b"\x88" if value else b"\x89"
        case int() | np.integer():
            return _integer(int(value))
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case tuple():
            return b"(" + b"".join(map(_pickled, value)) + b"t"
        case list():
            return b"](" + b"".join(map(_pickled, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_pickled(key) + _pickled(one) for key, one in value.items()) + b"u"
        case Global():
            module, _, name = value.name.rpartition(".")
            return f"c{module}\n{name}\n".encode()
        case Call():
            return _pickled(Global(value.function)) + _pickled(value.arguments) + b"R"
        case Instance():
            return _pickled(Global(value.of)) + b")\x81" + _pickled(value.state) + b"b"
        case Persistent():
            return _pickled(value.id) + b"Q"
        case argparse.Namespace():
            return _pickled(Instance("argparse.Namespace", vars(value)))
        case _:
            raise TypeError(f"{type(value).__name__} has no plain pickle")


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    # One bit more than the number has, for the sign.
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


class _Tail(io.RawIOBase):
    """A file from its current end on: a zip in it counts its offsets from there."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._start = file, file.tell()

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = self._start if whence == io.SEEK_SET else 0
        return self._file.seek(offset + start, whence) - self._start

    def write(self, data: Any, /) -> int:
        return self._file.write(data)


def write_archive(file: BinaryIO, value: Any, arrays: Sequence[np.ndarray] = (), root: str = "archive") -> None:
    """Appends what `torch.save` writes of a value; `arrays` are the numbers of its storages "0", "1", ..."""
    tail = _Tail(file)
    with zipfile.ZipFile(tail, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:  # pyright: ignore[reportArgumentType]
        archive.writestr(_member(f"{root}/data.pkl"), pickled(value))
        archive.writestr(_member(f"{root}/byteorder"), b"little")
        for number, array in enumerate(arrays):
            info = _member(f"{root}/data/{number}")
            info.file_size = array.nbytes
            is_large = array.nbytes * 1.05 > zipfile.ZIP64_LIMIT  # zipfile's rule
            start = tail.tell() + 30 + len(info.filename) + 4 + (_ZIP64 if is_large else 0)
            padding = -start % ALIGNMENT
            # As torch pads: a reader that maps numbers needs them aligned.
            info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
            with archive.open(info, "w") as member:
                flat = array.reshape(-1).view(np.uint8)
                for first in range(0, flat.size, _PART):
                    member.write(flat[first : first + _PART].data)
        archive.writestr(_member(f"{root}/version"), b"3\n")


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, _FIRST_EPOCH)


def _size(shape: Sequence[int]) -> Call:
    return Call("torch.Size", (tuple(map(int, shape)),))


def _index(key: str, offsets: tuple[int, ...] | None) -> Instance:
    state = {"fqn": key, "offset": None if offsets is None else _size(offsets), "index": None}
    return Instance(f"{METADATA}.MetadataIndex", state)


def _stored(entry: FileBytes) -> Instance:
    state = {"relative_path": entry.file, "offset": entry.offset, "length": entry.length}
    return Instance(f"{FILESYSTEM}._StorageInfo", state)


def _tensor_metadata(dtype: str, shape: Sequence[int], boxes: Sequence[Box]) -> Instance:
    layout = Call("torch.serialization._get_layout", ("torch.strided",))
    # Type, layout, requires_grad, memory format (0 is contiguous), pin_memory.
    properties = (Global(f"torch.{dtype}"), layout, False, Call(f"{METADATA}._MEM_FORMAT_ENCODING", (0,)), False)
    chunks = [
        Instance(f"{METADATA}.ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(sizes)})
        for offsets, sizes in boxes
    ]
    state = {"properties": Instance(f"{METADATA}.TensorProperties", properties), "size": _size(shape)}
    return Instance(f"{METADATA}.TensorStorageMetadata", state | {"chunks": chunks})


class DistributedWriter:
    """Writes a folder chunk by chunk; `close` writes the list of the chunks."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder, which must be new."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._tensors: dict[str, tuple[str, tuple[int, ...], list[Box]]] = {}
        self._objects: list[str] = []
        self._entries: dict[tuple[str, tuple[int, ...] | None], FileBytes] = {}
        self._number = 0

    def chunk(self, key: str, shape: Sequence[int], offsets: Sequence[int], array: np.ndarray) -> None:
        """Writes a box of a tensor of this shape."""
        array = np.ascontiguousarray(array).reshape(array.shape)  # numpy makes of a scalar one with a dimension
        dtype = array.dtype.name
        self._tensors.setdefault(key, (dtype, tuple(shape), []))[2].append((tuple(offsets), array.shape))
        strides = tuple(stride // array.itemsize for stride in array.strides)
        storage = Persistent(("storage", Global(f"torch.{_STORAGE_OF[dtype]}"), "0", "cpu", array.size))
        hooks = Call("collections.OrderedDict")
        tensor = Call("torch._utils._rebuild_tensor_v2", (storage, 0, array.shape, strides, False, hooks))
        self._append(key, tuple(offsets), tensor, [array])

    def object(self, key: str, value: Any) -> None:
        """Writes an object."""
        self._objects.append(key)
        self._append(key, None, value)

    def close(self) -> None:
        """Writes `.metadata`."""
        described: Mapping[str, Any] = {
            **{key: _tensor_metadata(*tensor) for key, tensor in self._tensors.items()},
            **{key: Instance(f"{METADATA}.BytesStorageMetadata") for key in self._objects},
        }
        content = {
            "state_dict_metadata": described,
            "planner_data": None,
            "storage_data": {_index(*key): _stored(entry) for key, entry in self._entries.items()},
            "storage_meta": None,
        }
        (self._folder / METADATA_FILE).write_bytes(pickled(Instance(f"{METADATA}.Metadata", content)))

    def _append(self, key: str, offsets: tuple[int, ...] | None, value: Any, arrays: Sequence[np.ndarray] = ()) -> None:
        path = self._folder / f"__0_{self._number}.distcp"
        if path.exists() and path.stat().st_size > FILE_BYTES:
            self._number += 1
            path = path.with_name(f"__0_{self._number}.distcp")
        with path.open("r+b" if path.exists() else "w+b") as file:  # zip writes its headers last: not "a"
            start = file.seek(0, io.SEEK_END)
            write_archive(file, value, arrays)
            self._entries[key, offsets] = FileBytes(path.name, start, file.tell() - start)
