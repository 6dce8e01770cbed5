"""Records in JSON with a checksum, and arrays of a known shape in `.npy` files: what is damaged is never read."""

import io
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.errors import UserError, parse_json_object

CHECKSUM = "crc32"


def sealed(values: Mapping[str, Any]) -> str:
    """Returns a record as JSON, with the checksum of its values."""
    return json.dumps({**values, CHECKSUM: _checksum(values)}, indent=1) + "\n"


def unsealed(path: Path, version: int, command: str, kind: type) -> dict[str, Any]:
    """Reads a record that `sealed` wrote.

    Args:
      path: of the file.
      version: the known one, under the key `format`.
      command: what makes the record, for messages.
      kind: dataclass whose fields it has; those with defaults may be missing.

    Raises:
      UserError: it isn't there, is another record or of another version, or has other values than were written.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist: make it with {command}")
    values = parse_json_object(path.read_bytes(), path)
    if values.get("format") != version:
        raise UserError(f"{path} has format {values.get('format')!r}, and {version} is known: make it with {command}")
    checksum = values.pop(CHECKSUM, None)
    if checksum != _checksum(values):
        raise UserError(f"{path} is corrupted or was edited, as its checksum says: make it anew with {command}")
    # Fields with defaults are those that later versions have added.
    required = {field.name for field in fields(kind) if field.default is MISSING}
    if not required <= values.keys() <= {field.name for field in fields(kind)}:
        raise UserError(f"{path} is another record than {command} writes: name a file that {command} made")
    return values


def _checksum(values: Mapping[str, Any]) -> int:
    # Sorted, so that the order of keys does not count.
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


def array_header(shape: Sequence[int], kind: str) -> bytes:
    """Returns the bytes with which the `.npy` file of an array begins."""
    header = io.BytesIO()
    described = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": tuple(shape)}
    # Version 1.0, which has a fixed layout: numpy would choose a version by the length of the header.
    np.lib.format.write_array_header_1_0(header, described)
    return header.getvalue()


def open_array(path: Path, shape: tuple[int, ...], kinds: Sequence[str]) -> np.ndarray:
    """Maps a `.npy` file of known shape and one of some types.

    Raises:
      UserError: it is missing, truncated, or another array.
    """
    try:
        size = path.stat().st_size
        for kind in kinds:
            header = array_header(shape, kind)
            with path.open("rb") as file:
                # The first bytes say shape and type: compared as bytes, nothing of a damaged header is parsed.
                if file.read(len(header)) != header:
                    continue
            expected = len(header) + int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
            if size != expected:
                fault = "is truncated" if size < expected else "is too long"
                raise UserError(f"{path} {fault}: {size:,} bytes, and {kind} {shape} takes {expected:,}")
            return np.memmap(path, kind, "r", len(header), shape)
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e
    raise UserError(f"{path} is not the array that its record describes, {' or '.join(kinds)} {shape}")
