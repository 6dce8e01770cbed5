"""Distinguishes corrupted checkpoints from checkpoints that could not be read.

Only a corrupted checkpoint is quarantined, so corruption must be verified: all of its files can be read, and their
contents are wrong. TensorStore and Orbax do not distinguish these: they report a folder without permission as "not
found".
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mtjax.config.renamed import with_new_names
from mtjax.errors import UserError, first_line
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.storage import read_bytes, shown, url_of

T = TypeVar("T")

_CORRUPTION_CODES = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND")
"""TensorStore's error codes for wrong contents. Other codes concern the machine: PERMISSION_DENIED, UNAVAILABLE,
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED."""


VERSION = 1
"""Format version of a checkpoint's metadata."""


class CorruptedCheckpoint(Exception):
    """The contents of a checkpoint are not what was saved."""


def read_on_all_processes(name: str, folder: Path, read: Callable[[], T]) -> T:
    """Returns the result of `read`, if it succeeded in every process.

    Args:
      name: name of the checkpoint or folder for messages.
      folder: the folder that `read` reads.
      read: may raise any error of a broken file, disk or network.

    Raises:
      CorruptedCheckpoint: in all processes, if one has verified it: all must continue with the same checkpoint.
      UserError: in all processes, if one refuses a checkpoint that may be good, or could not read it.
    """
    result, failure = None, None
    try:
        result = read()
    except Exception as e:
        failure = failure_of(e, folder)
    words = all_gather_text("reading", json.dumps(failure), shown=f"reading {name}")
    failures = [json.loads(word) for word in words]
    reasons = {failed["kind"]: failed["reason"] for failed in failures if failed}
    # In this order: what was refused or unreadable anywhere may be a good checkpoint, so no process may quarantine it.
    if REFUSED in reasons:
        raise UserError(reasons[REFUSED])
    if UNREADABLE in reasons:
        raise UserError(
            f"{name} can't be read: {reasons[UNREADABLE]}; nothing was changed: make it readable, or move it elsewhere"
        )
    if CORRUPTED in reasons:
        raise CorruptedCheckpoint(reasons[CORRUPTED])
    return result  # pyright: ignore[reportReturnType]  (no process failed: it is what `read` returned)


REFUSED, UNREADABLE, CORRUPTED = "refused", "unreadable", "corrupted"


def failure_of(error: Exception, folder: Path) -> dict[str, str]:
    """Classifies an error of reading files in a folder: its `kind` and `reason`."""
    if isinstance(error, UserError):
        return {"kind": REFUSED, "reason": str(error)}
    # An object store reports its errors correctly; for a file system, look which files can't be read.
    if not url_of(folder) and (problem := next(unreadable_files(folder), None)):
        return {"kind": UNREADABLE, "reason": first_line(problem)}
    chain = list(_causes(error))
    # An error of the machine anywhere in the chain: what follows from it does not prove wrong contents.
    if not any(isinstance(e, OSError | MemoryError) or "OS error" in str(e) for e in chain):
        for e in chain:
            if isinstance(e, CorruptedCheckpoint | json.JSONDecodeError | UnicodeDecodeError) or str(e).startswith(
                _CORRUPTION_CODES
            ):
                return {"kind": CORRUPTED, "reason": first_line(e)}
    return {"kind": UNREADABLE, "reason": first_line(error)}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # As in Python's own tracebacks: `raise ... from None` marks that the context is not a cause.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def unreadable_files(folder: Path) -> Iterator[OSError]:
    """Yields one error for each file in or below a folder that can't be read."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as e:
        yield e
        return
    for entry in entries:
        if entry.is_dir():
            yield from unreadable_files(Path(entry.path))
        elif problem := _unreadable(Path(entry.path)):
            yield problem


def _unreadable(path: Path) -> OSError | None:
    """Tries to read the first and the last byte of a file: reading it entirely may take long."""
    try:
        with path.open("rb") as file:
            file.read(1)
            if size := os.fstat(file.fileno()).st_size:
                file.seek(size - 1)
                file.read(1)
    except OSError as e:
        e.filename = e.filename or str(path)
        return e
    return None


def read_metadata(checkpoint: Path) -> dict[str, Any]:
    """Reads a checkpoint's metadata, without the checksum.

    Raises:
      CorruptedCheckpoint: it is missing, or not what was saved.
      UserError: another version of mtjax wrote it, in a format that this one can't read.
      OSError: it can't be read.
    """
    try:
        metadata = json.loads(read_bytes(checkpoint / "page" / "metadata"))
    except FileNotFoundError:
        raise CorruptedCheckpoint("its metadata is missing") from None
    except (ValueError, RecursionError) as e:  # of JSON, and of UTF-8
        raise CorruptedCheckpoint("its metadata is not what was saved") from e
    # Checked before any value is used.
    if not isinstance(metadata, dict) or metadata.pop("checksum", None) != metadata_checksum(metadata):
        raise CorruptedCheckpoint("its metadata is not what was saved")
    if (version := metadata.get("version", VERSION)) != VERSION:
        raise UserError(
            f"checkpoint {shown(checkpoint)} has format version {version!r}, and this version of mtjax reads "
            f"version {VERSION}: use the version of mtjax that wrote it, or a newer one"
        )
    if missing := {"config", "consumed_samples", "fingerprints"} - metadata.keys():
        raise CorruptedCheckpoint(f"its metadata lacks {', '.join(sorted(missing))}")
    if not _is_metadata(metadata):
        raise CorruptedCheckpoint("its metadata is not that of a checkpoint")
    return metadata | {"config": with_new_names(metadata["config"])}


def _is_metadata(metadata: Mapping[str, Any]) -> bool:
    """Returns whether the values of metadata have the right types: valid JSON with a valid checksum need not be
    mtjax's."""
    config, fingerprints, consumed = metadata["config"], metadata["fingerprints"], metadata["consumed_samples"]
    sections = [config.get("model"), config.get("parallel", {})] if isinstance(config, dict) else [None]
    return (
        all(isinstance(section, dict) for section in sections)
        and isinstance(fingerprints, dict)
        and type(consumed) is int
        and consumed >= 0
    )


def metadata_checksum(metadata: Mapping[str, Any]) -> str:
    """Computes the checksum of metadata without their `checksum`."""
    return hashlib.sha256(json.dumps(metadata, sort_keys=True).encode()).hexdigest()


def with_checksum(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata with their checksum, as they are written."""
    return {**metadata, "checksum": metadata_checksum(metadata)}
