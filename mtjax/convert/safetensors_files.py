"""Folders of safetensors files: read lazily, and written tensor by tensor at precomputed offsets."""

import json
import struct
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

import ml_dtypes
import numpy as np

from mtjax.convert import compressed, fp8
from mtjax.convert.mxfp4 import BLOCKS, SCALES, packed_shapes, unpacked
from mtjax.errors import UserError, first_line, require
from mtjax.models.weight_grid import Grid

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# transformers' limit before version 5 (`max_shard_size`).
LARGEST_FILE = 5_000_000_000
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""dtypes of weights; float32 represents the values of all of them exactly."""
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
WRITTEN = {**DTYPES, "int32": np.dtype(np.int32), "int64": np.dtype(np.int64), "float8": compressed.FLOAT8}
"""dtypes of tensors that are written: of weights, and of their quantized parts."""
WRITTEN_CODES = {**CODES, "int32": "I32", "int64": "I64", "float8": fp8.CODE}
_ALIGNMENT = 8
_COMPARED = 2**26
"""Bytes of two copies of a tensor that are compared at a time."""


class SafetensorsReader:
    """The tensors of a folder: `model.safetensors`, or the files that its index names. Use as a context manager.

    A tensor that is packed as MXFP4, or in 8 bits with scales of its blocks, has its own name and shape, without the
    suffixes of its parts.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the files and reads their headers.

        Raises:
          UserError: there are none, one is missing, or one is corrupted.
        """
        open_file = require("safetensors", "convert").safe_open
        self._folder, self._stack, self._files, self._paths = folder, ExitStack(), {}, {}
        for path in _files_of(folder):
            try:
                opened = self._stack.enter_context(open_file(path, framework="np"))
            except Exception as e:  # the library's exception class is not public
                raise UserError(f"{path} can't be read as safetensors; it may be incomplete: {e}") from e
            # A tensor may be in two files. If they agree, it does not matter which is read.
            for name in sorted(self._files.keys() & set(opened.keys())):
                if not _are_equal(self._paths[name], path, name):
                    raise UserError(
                        f"{name} differs between {self._paths[name]} and {path}: save the model again with "
                        "save_pretrained"
                    )
            self._files |= dict.fromkeys(opened.keys(), opened)
            self._paths |= dict.fromkeys(opened.keys(), path)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        codes = {name: file.get_slice(name).get_dtype() for name, file in self._files.items()}
        self._packed, self._in_blocks = packed_shapes(shapes), fp8.packed_names(shapes, codes)
        parts = {name + part for name in self._packed for part in (BLOCKS, SCALES)}
        parts |= {name + fp8.SCALE for name in self._in_blocks}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in parts} | self._packed
        self.compressed = compressed.stored_tensors(shapes, codes, self._read_as_stored)
        compressed_parts = {part for name, stored in self.compressed.items() for part in stored.parts(name)}
        self.shapes = {name: shape for name, shape in self.shapes.items() if name not in compressed_parts}
        self.shapes |= {name: stored.shape for name, stored in self.compressed.items()}
        # Scales stay among the types: 16-bit scales give 16-bit weights.
        of_packed = parts | self._in_blocks | compressed_parts - {n + compressed.SCALE for n in self.compressed}
        self._codes = {name: code for name, code in codes.items() if name not in of_packed}
        self.dtype = _common_dtype(folder, self._codes)

    def ignore(self, names: Set[str]) -> None:
        """Leaves tensors that are not weights out of `dtype`."""
        self._codes = {name: code for name, code in self._codes.items() if name not in names}
        if self._codes:
            self.dtype = _common_dtype(self._folder, self._codes)

    def check_floats(self) -> None:
        """Checks that all weights are floating-point numbers.

        Raises:
          UserError: some are integers, whose scales the folder does not have or describe.
        """
        if odd := {code: name for name, code in self._codes.items() if code not in CODES.values()}:
            kinds = ", ".join(f"{code} ({odd[code]})" for code in sorted(odd))
            raise UserError(
                f"{self._folder} contains weights of type {kinds}, which are quantized: save them without quantization"
            )

    def read(self, name: str) -> np.ndarray:
        """Reads one tensor; a packed one in `dtype`."""
        if name in self._in_blocks:
            scales = self._files[name + fp8.SCALE].get_tensor(name + fp8.SCALE)
            return fp8.unpacked(_read_8_bits(self._paths[name], name), scales, DTYPES[self.dtype])
        if name in self.compressed:
            return self.compressed[name].values(name, self._read_as_stored).astype(DTYPES[self.dtype])
        if name not in self._packed:
            return self._files[name].get_tensor(name)
        blocks, scales = (self._files[name + part].get_tensor(name + part) for part in (BLOCKS, SCALES))
        return unpacked(blocks, scales, DTYPES[self.dtype])

    def grid(self, name: str) -> Grid | None:
        """Returns the values that a quantized tensor may have, in full size; None for any other."""
        found = self.compressed.get(name)
        return None if found is None else found.grid(name, self._read_as_stored)

    def _read_as_stored(self, name: str) -> np.ndarray:
        file = self._files[name]
        if file.get_slice(name).get_dtype() == fp8.CODE:
            return _read_8_bits(self._paths[name], name)
        return file.get_tensor(name)

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _common_dtype(folder: Path, codes: Mapping[str, str]) -> str:
    """Returns the dtype of weights of these types, float32 if they have several."""
    names = {code: name for name, code in CODES.items()}
    used = {names[code] for code in codes.values() if code in names}
    # Integers may be buffers, which `ignore` removes later; `check_floats` then reports what is left.
    odd = {code: name for name, code in codes.items() if code not in names and code.startswith(("F", "BF"))}
    if odd or not used:
        kinds = ", ".join(f"{code} ({odd[code]})" for code in sorted(odd)) or "only integers"
        raise UserError(
            f"{folder} contains {kinds}; supported types of weights: {', '.join(CODES.values())}, and {fp8.CODE} with "
            f"float scales of blocks of {fp8.BLOCK} x {fp8.BLOCK}, named NAME{fp8.SCALE}"
        )
    return used.pop() if len(used) == 1 else "float32"


def _read_8_bits(path: Path, name: str) -> np.ndarray:
    """Reads a tensor of 8-bit floats, a type that the safetensors library does not have for numpy."""
    entry, start, size = _entry_of(path, name)
    return np.fromfile(path, ml_dtypes.float8_e4m3fn, size, offset=start).reshape(entry["shape"])


def _are_equal(one: Path, other: Path, name: str) -> bool:
    """Returns whether a tensor has the same type, shape and bytes in two files."""
    (entry, start, size), (other_entry, other_start, _) = (_entry_of(path, name) for path in (one, other))
    if any(entry[key] != other_entry[key] for key in ("dtype", "shape")):
        return False
    for done in range(0, size, _COMPARED):
        count = min(_COMPARED, size - done)
        block = np.fromfile(one, np.uint8, count, offset=start + done)
        if not np.array_equal(block, np.fromfile(other, np.uint8, count, offset=other_start + done)):
            return False
    return True


def _entry_of(path: Path, name: str) -> tuple[dict[str, Any], int, int]:
    """Returns what the header of a file says of a tensor, at which byte of the file it starts, and its bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(length))[name]
    start, end = entry["data_offsets"]
    return entry, 8 + length + start, end - start


def _files_of(folder: Path) -> list[Path]:
    """Returns the safetensors files of a folder: as in transformers, the one file wins over those of an index.

    Raises:
      UserError: there are none, or files of the index are missing.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
            raise UserError(f"{folder / INDEX} is not an index of safetensors files: {first_line(e)}") from e
        for name in files:
            # An index from the internet must not name files elsewhere.
            if not isinstance(name, str) or "\0" in name or PurePath(name).name != name or name == "..":
                raise UserError(f"{folder / INDEX} names {name!r}, which is not a file in its folder")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} is missing {', '.join(missing)}, which its {INDEX} names")
        return [folder / name for name in files]
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = (
            ", only pickled weights: save them with transformers' model.save_pretrained(NEW), which writes safetensors"
        )
    raise UserError(f"{folder} contains neither {SINGLE} nor {INDEX}{hint}")


@dataclass(frozen=True)
class _Location:
    """Where a tensor is written."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsWriter:
    """Writes tensors in any order, each directly to its offset, so that only the current one is in memory.

    The safetensors library can only write a file from all of its tensors at once.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Sequence[int]],
        dtype: str,
        largest_file: int = LARGEST_FILE,
        others: Mapping[str, str] | None = None,
    ) -> None:
        """Creates the files at their full size, and the index if there are several.

        Args:
          folder: for the files.
          shapes: of all tensors.
          dtype: of the tensors that are not in `others`.
          largest_file: bytes of a file, unless a single tensor is larger.
          others: of tensors of another dtype, `WRITTEN`.
        """
        self._locations: dict[str, _Location] = {}
        self._unwritten = set(shapes)
        dtypes = dict.fromkeys(shapes, dtype) | dict(others or {})
        # Wide types first: each tensor is aligned to its type.
        order = sorted(shapes, key=lambda name: -WRITTEN[dtypes[name]].itemsize)
        sizes = {name: WRITTEN[dtypes[name]].itemsize * prod(shapes[name]) for name in order}
        groups = _grouped(sizes, largest_file)
        names = [SINGLE] if len(groups) == 1 else _shard_names(len(groups))
        for group, name in zip(groups, names, strict=True):
            self._begin(folder / name, {tensor: tuple(shapes[tensor]) for tensor in group}, dtypes)
        if len(groups) > 1:
            total = sum(sizes.values())
            files = {tensor: location.path.name for tensor, location in self._locations.items()}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes one tensor, in the files' dtype."""
        location = self._locations[name]
        assert tensor.shape == location.shape, (name, tensor.shape, location.shape)
        raw = np.ascontiguousarray(tensor, location.dtype).reshape(-1).view(np.uint8)
        with location.path.open("r+b") as file:
            file.seek(location.offset)
            file.write(raw.data)
        self._unwritten.remove(name)

    def map(self, name: str) -> np.ndarray:
        """Returns a tensor, memory-mapped, so that several parameters can write their parts of it; zeros at first."""
        location = self._locations[name]
        self._unwritten.discard(name)
        return np.memmap(location.path, location.dtype, "r+", location.offset, location.shape)

    def close(self) -> None:
        """Checks that every tensor was written."""
        assert not self._unwritten, f"not written: {sorted(self._unwritten)}"

    def _begin(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> None:
        """Writes the header of a file and extends it to its full size."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers requires it
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + WRITTEN[dtypes[name]].itemsize * prod(shape)
            header[name] = {"dtype": WRITTEN_CODES[dtypes[name]], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        # The format allows spaces after the header; aligned data can be memory-mapped as any dtype.
        text += b" " * (-len(text) % _ALIGNMENT)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            data = file.tell()
            # Creates a sparse file of the full size, into which write() seeks.
            file.truncate(data + end)
        for name, shape in shapes.items():
            self._locations[name] = _Location(
                path, data + header[name]["data_offsets"][0], shape, WRITTEN[dtypes[name]]
            )


def _grouped(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Groups names, in order, into files of at most `largest` bytes, unless a single tensor is larger."""
    groups, filled = [[]], 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _shard_names(count: int) -> list[str]:
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
