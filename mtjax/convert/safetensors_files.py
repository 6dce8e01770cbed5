"""Folders of safetensors files: read lazily, written tensor by tensor at places that are known beforehand."""

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any

import ml_dtypes
import numpy as np

from mtjax.errors import UserError, first_line, require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_FILE = 5_000_000_000
DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Types that weights are kept in; all of them are exact in float32."""
CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALIGNMENT = 8


class SafetensorsReader:
    """The tensors of a folder: `model.safetensors`, or the files that its index names. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Opens the files; reads nothing but their headers.

        Raises:
          UserError: there are none, one is missing, or one is damaged.
        """
        open_file = require("safetensors", "convert").safe_open
        self._stack, self._files = ExitStack(), {}
        for path in _files_of(folder):
            try:
                opened = self._stack.enter_context(open_file(path, framework="np"))
            except Exception as e:  # the library's own error has no public name
                raise UserError(f"{path} can't be read as safetensors; perhaps it is only a part: {e}") from e
            self._files |= dict.fromkeys(opened.keys(), opened)
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
        self.dtype = self._common_dtype(folder)

    def read(self, name: str) -> np.ndarray:
        """One tensor."""
        return self._files[name].get_tensor(name)

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _common_dtype(self, folder: Path) -> str:
        """The widest of the floating-point types in use."""
        names = {code: name for name, code in CODES.items()}
        codes = {file.get_slice(name).get_dtype() for name, file in self._files.items()}
        used = {names[code] for code in codes if code in names}
        odd = {code for code in codes if code not in names and code.startswith(("F", "BF"))}
        if odd or not used:
            kinds = ", ".join(sorted(odd)) or "integers alone"
            raise UserError(f"{folder} holds {kinds}; weights are converted from {', '.join(CODES.values())}")
        return used.pop() if len(used) == 1 else "float32"


def _files_of(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
            raise UserError(f"{folder / INDEX} is not an index of safetensors files: {first_line(e)}") from e
        for name in files:
            if not isinstance(name, str) or "\0" in name or PurePath(name).name != name or name == "..":
                raise UserError(f"{folder / INDEX} names {name!r}, which is not a file of its folder")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which its {INDEX} names")
        return [folder / name for name in files]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    hint = ""
    if any(folder.glob("pytorch_model*.bin")):
        hint = (
            ", only pickled weights: save them with transformers' model.save_pretrained(NEW), which writes safetensors"
        )
    raise UserError(f"{folder} holds no {SINGLE} and no {INDEX}{hint}")


@dataclass(frozen=True)
class _Place:
    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


class SafetensorsWriter:
    """Writes tensors in any order, each straight to its place: none but the current one is in memory.

    The library writes a file from all of its tensors at once; the format is simple enough to write them one by one.
    """

    def __init__(
        self, folder: Path, shapes: Mapping[str, Sequence[int]], dtype: str, largest_file: int = LARGEST_FILE
    ) -> None:
        """Makes the files, at their full size, and the index when there are several."""
        self._places: dict[str, _Place] = {}
        self._unwritten = set(shapes)
        width = DTYPES[dtype].itemsize
        groups = _grouped({name: width * prod(shape) for name, shape in shapes.items()}, largest_file)
        names = [SINGLE] if len(groups) == 1 else _shard_names(len(groups))
        for group, name in zip(groups, names, strict=True):
            self._begin(folder / name, {tensor: tuple(shapes[tensor]) for tensor in group}, dtype)
        if len(groups) > 1:
            total = sum(width * prod(shape) for shape in shapes.values())
            files = {tensor: place.path.name for tensor, place in self._places.items()}
            index = {"metadata": {"total_size": total}, "weight_map": files}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes one tensor, in the files' type."""
        place = self._places[name]
        assert tensor.shape == place.shape, (name, tensor.shape, place.shape)
        raw = np.ascontiguousarray(tensor, place.dtype).reshape(-1).view(np.uint8)
        with place.path.open("r+b") as file:
            file.seek(place.offset)
            file.write(raw.data)
        self._unwritten.remove(name)

    def close(self) -> None:
        """Checks that every tensor was written."""
        assert not self._unwritten, f"not written: {sorted(self._unwritten)}"

    def _begin(self, path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + DTYPES[dtype].itemsize * prod(shape)
            header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            data = file.tell()
            file.truncate(data + end)
        for name, shape in shapes.items():
            self._places[name] = _Place(path, data + header[name]["data_offsets"][0], shape, DTYPES[dtype])


def _grouped(sizes: Mapping[str, int], largest: int) -> list[list[str]]:
    """Names in order, in groups of at most `largest` bytes, unless one alone is larger."""
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
