"""What a failed read proves: that a checkpoint is damaged, or only that it could not be read here and now.

A checkpoint is set aside for damage alone, so damage must be proven: all of its files can be read, and what they hold
is wrong. TensorStore and Orbax are not witnesses of the first: a folder without permission is "not found" to them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mtjax.config.renamed import with_new_names
from mtjax.errors import UserError, first_line
from mtjax.storage import read_bytes, shown, url_of
from mtjax.train.processes.coordination import all_gather_text

T = TypeVar("T")

_DAMAGE = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "INVALID_ARGUMENT", "NOT_FOUND")
"""TensorStore's words for contents that are wrong. Others speak of the machine: PERMISSION_DENIED, UNAVAILABLE,
DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED."""


VERSION = 1
"""Of the format of a checkpoint's page of metadata."""


class CorruptedCheckpoint(Exception):
    """A checkpoint does not hold what was saved."""


def read_on_all_processes(name: str, folder: Path, read: Callable[[], T]) -> T:
    """What `read` returns, if it succeeded in every process.

    Args:
      name: of what is read, for messages.
      folder: whose files `read` reads.
      read: raises whatever a broken file, disk or network may cause.

    Raises:
      Damaged: in all processes, when it is proven in one: each must go on to the same checkpoint.
      UserError: in all processes, when one refuses what may be good, or could not read it.
    """
    result, failure = None, None
    try:
        result = read()
    except Exception as e:
        failure = failure_of(e, folder)
    failures = [json.loads(word) for word in all_gather_text(f"reading {name}", json.dumps(failure))]
    reasons = {failed["kind"]: failed["reason"] for failed in failures if failed}
    if REFUSED in reasons:
        raise UserError(reasons[REFUSED])
    if UNREADABLE in reasons:
        raise UserError(
            f"{name} can't be read: {reasons[UNREADABLE]}; nothing was changed: make it readable, or move it elsewhere"
        )
    if DAMAGED in reasons:
        raise CorruptedCheckpoint(reasons[DAMAGED])
    return result  # pyright: ignore[reportReturnType]  (no process failed: it is what `read` returned)


REFUSED, UNREADABLE, DAMAGED = "refused", "unreadable", "damaged"


def failure_of(error: Exception, folder: Path) -> dict[str, str]:
    """What `kind` of failure an error is that came of reading files of a folder, and its `reason`."""
    if isinstance(error, UserError):
        return {"kind": REFUSED, "reason": str(error)}
    if not url_of(folder) and (problem := next(unreadable_files(folder), None)):  # a store's own words can be trusted
        return {"kind": UNREADABLE, "reason": first_line(problem)}
    chain = list(_causes(error))
    if not any(isinstance(e, OSError | MemoryError) or "OS error" in str(e) for e in chain):
        for e in chain:
            if isinstance(e, CorruptedCheckpoint | json.JSONDecodeError | UnicodeDecodeError) or str(e).startswith(
                _DAMAGE
            ):
                return {"kind": DAMAGED, "reason": first_line(e)}
    return {"kind": UNREADABLE, "reason": first_line(error)}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        # As Python itself prints them: `raise ... from None` says that the context is not a cause.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def unreadable_files(folder: Path) -> Iterator[OSError]:
    """What keeps the files of a folder, and those below it, from being read: one error for each that can't be."""
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
    """Opens a file and reads its first and last byte: a whole one may be large, and each process may have to look."""
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
    """A checkpoint's page of metadata, without its checksum.

    Raises:
      Damaged: it is missing, or not what was saved.
      UserError: another version of mtjax wrote it, in a format that this one can't read.
      OSError: it can't be read.
    """
    try:
        page = json.loads(read_bytes(checkpoint / "page" / "metadata"))
    except FileNotFoundError:
        raise CorruptedCheckpoint("its page of metadata is missing") from None
    except (ValueError, RecursionError) as e:  # of JSON, and of UTF-8
        raise CorruptedCheckpoint("its page of metadata is not what was saved") from e
    if not isinstance(page, dict) or page.pop("checksum", None) != metadata_checksum(page):
        raise CorruptedCheckpoint("its page of metadata is not what was saved")
    if (version := page.get("version", VERSION)) != VERSION:
        raise UserError(
            f"checkpoint {shown(checkpoint)} has version {version!r} of the format, and this mtjax reads "
            f"version {VERSION}: use the mtjax that wrote it, or a newer one"
        )
    if missing := {"config", "consumed_samples", "fingerprints"} - page.keys():
        raise CorruptedCheckpoint(f"its page of metadata lacks {', '.join(sorted(missing))}")
    if not _is_metadata(page):
        raise CorruptedCheckpoint("its page of metadata is not what a checkpoint has")
    return page | {"config": with_new_names(page["config"])}


def _is_metadata(page: Mapping[str, Any]) -> bool:
    """Whether the parts of a page are of the right kinds: a page with the right checksum need not be mtjax's."""
    config, prints, consumed = page["config"], page["fingerprints"], page["consumed_samples"]
    sections = [config.get("model"), config.get("parallel", {})] if isinstance(config, dict) else [None]
    return (
        all(isinstance(section, dict) for section in sections)
        and isinstance(prints, dict)
        and type(consumed) is int
        and consumed >= 0
    )


def metadata_checksum(page: Mapping[str, Any]) -> str:
    """Of a page without its `checksum`."""
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()


def with_checksum(page: Mapping[str, Any]) -> dict[str, Any]:
    """A page as it is written."""
    return {**page, "checksum": metadata_checksum(page)}
