"""The list of a folder's arrays that `mtjax convert --show` prints; no numbers are read."""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mtjax.convert.recognized import ORBAX, Recognized, recognized
from mtjax.convert.torch_dist_files import DTYPES, METADATA_FILE, DistributedCheckpoint
from mtjax.errors import UserError

_CODES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
_LARGEST_HEADER = 100_000_000


@dataclass(frozen=True)
class ShownArray:
    """An array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: str
    """In how many pieces it is stored, and where."""


def show(folder: Path) -> Iterator[str]:
    """Yields what a folder is, and a line for each of its arrays.

    Raises:
      UserError: its content is not known, or can't be read.
    """
    found = recognized(folder)
    yield str(found)
    rows, others = _rows(found)
    name, dtype, shape = (max((len(_cells(row)[i]) for row in rows), default=0) for i in range(3))
    for row in rows:
        cells = _cells(row)
        yield f"  {cells[0]:{name}}  {cells[1]:{dtype}}  {cells[2]:{shape}}  {row.shards}".rstrip()
    numbers = sum(prod(row.shape) for row in rows)
    size = sum(prod(row.shape) * _bytes(row.dtype) for row in rows)
    yield f"{len(rows)} arrays with {numbers:,} numbers, {size / 1e9:,.3f} GB" + (f"; {others}" if others else "")


def _cells(row: ShownArray) -> tuple[str, str, str]:
    return row.name, row.dtype, str(list(row.shape))


def _bytes(dtype: str) -> int:
    if dtype in DTYPES:
        return DTYPES[dtype].itemsize
    # Names of types that numpy lacks: f8_e4m3 has 8 bits, i32 has 32.
    digits = "".join(letter for letter in dtype.partition("_")[0] if letter.isdigit())
    return max(1, int(digits or 8) // 8)


def _rows(found: Recognized) -> tuple[list[ShownArray], str]:
    """Returns the rows, and what else the folder holds."""
    files = found.files
    if (files / METADATA_FILE).is_file():
        return _of_distributed(files)
    if any(files.glob("mp_rank_*")):
        return list(_of_ranks(files)), ""
    if any(files.glob("*.safetensors")):
        return sorted(_of_safetensors(files), key=lambda row: row.name), ""
    if any((path / ORBAX).is_file() or any(path.glob("*/.zarray")) for path in (files, files / "state")):
        return list(_of_orbax(files)), ""
    raise UserError(f"{found}: its arrays can't be listed")


def _of_distributed(files: Path) -> tuple[list[ShownArray], str]:
    checkpoint = DistributedCheckpoint(files)
    rows = []
    for key in checkpoint.keys:
        tensor = checkpoint.tensor(key)
        count = len({chunk.entry.file for chunk in tensor.chunks})
        rows.append(ShownArray(key, tensor.dtype, tensor.shape, f"{len(tensor.chunks)} chunks in {count} files"))
    missing = checkpoint.missing_files(checkpoint.keys)
    others = f"{len(checkpoint.objects)} objects"
    return rows, others + (f"; missing files: {', '.join(missing[:5])}" if missing else "")


def _of_ranks(files: Path) -> Iterator[ShownArray]:
    from mtjax.convert.megatron_files import MegatronCheckpoint

    checkpoint = MegatronCheckpoint(files)
    for name, shape in checkpoint.shapes.items():
        yield ShownArray(name, checkpoint.dtype, shape, f"on each of {checkpoint.ranks} tensor-parallel ranks")


def _of_safetensors(files: Path) -> Iterator[ShownArray]:
    for path in sorted(files.glob("*.safetensors")):
        for name, value in safetensors_header(path).items():
            if name != "__metadata__":
                dtype = str(value["dtype"])
                yield ShownArray(name, _CODES.get(dtype, dtype.lower()), tuple(value["shape"]), path.name)


def safetensors_header(path: Path) -> Mapping[str, Any]:
    """Returns the header of a safetensors file: name -> dtype, shape and offsets.

    Raises:
      UserError: it has none.
    """
    try:
        with path.open("rb") as file:
            # The format begins with the length of its header, 8 bytes, little-endian.
            (length,) = struct.unpack("<Q", file.read(8))
            # A file that is not of the format may begin with any number.
            text = file.read(min(length, _LARGEST_HEADER))
        header = json.loads(text)
        if not all(isinstance(value, dict) for value in header.values()):
            raise ValueError("an entry is not an object")
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e
    except (struct.error, ValueError, AttributeError) as e:
        raise UserError(f"{path} is not a safetensors file, or is incomplete: it has no header") from e
    return header


def _of_orbax(files: Path) -> Iterator[ShownArray]:
    """Yields the arrays of a checkpoint of mtjax, or of any program that writes with Orbax."""
    from mtjax.runtime.checkpoints.arrays import open_array

    # mtjax's checkpoints have the arrays in `state`, other programs' anywhere.
    state = files if (files / ORBAX).is_file() or not (files / "state").is_dir() else files / "state"
    for name in _names(files, state):
        try:
            store = open_array(state, name)
        except (ValueError, OSError) as e:
            raise UserError(f"{state} lists {name}, which can't be opened: {str(e).splitlines()[0]}") from e
        chunk = [int(size or 1) for size in store.chunk_layout.read_chunk.shape or ()]
        count = prod(-(-size // part) for size, part in zip(store.shape, chunk, strict=True))
        yield ShownArray(name, store.dtype.name, tuple(store.shape), f"{count} chunks")


def _names(files: Path, state: Path) -> list[str]:
    page = files / "page" / "metadata"
    try:
        if page.is_file():
            return list(json.loads(page.read_text())["fingerprints"])
        tree = json.loads((state / ORBAX).read_text())["tree_metadata"]
        keys = [value["key_metadata"] for value in tree.values() if not _is_skipped(value)]
        return [".".join(str(part["key"]) for part in key) for key in keys]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{page if page.is_file() else state / ORBAX} does not list arrays: it is damaged") from e


def _is_skipped(value: Mapping[str, Any]) -> bool:
    # Orbax lists empty nodes of a tree, too, which have no array.
    return bool(value["value_metadata"].get("skip_deserialize"))
