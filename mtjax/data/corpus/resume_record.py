"""How far a preprocessing run has got, on disk next to its output, so that a killed run continues where it stopped."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.cache import digest
from mtjax.data.corpus.indexed import idx_path
from mtjax.data.corpus.reader import Position
from mtjax.data.corpus.writer import can_resume, discard, partial_path
from mtjax.errors import UserError


@dataclass
class ProcessedCounts:
    """What has been processed since the start, over all interruptions."""

    documents: int = 0
    skipped: int = 0
    text_bytes: int = 0


@dataclass
class PreprocessingState:
    """Where a run is.

    Attributes:
      position: the next chunk of text.
      counts: what has been processed.
      writers: per key, how much of its partial files counts.
      sealed: all text is through, and the files only need their names.
      share: how much of the text is through, from 0 to 1, for `mtjax data parts`.
    """

    position: Position = field(default_factory=Position)
    counts: ProcessedCounts = field(default_factory=ProcessedCounts)
    writers: dict[str, dict[str, int]] = field(default_factory=dict)
    sealed: bool = False
    share: float = 0.0


class ResumeRecord:
    """The record of one run, and the lock that keeps a second run from the same output."""

    def __init__(self, outputs: Mapping[str, Path], identity: Mapping[str, Any] | None) -> None:
        """Creates a record for datasets `outputs` (key -> prefix); without an identity nothing is saved nor resumed."""
        first = next(iter(outputs.values()))
        self._outputs = outputs
        self._path = partial_path(first, "progress")
        self._lock = partial_path(first, "lock")
        self._identity = None if identity is None else digest(identity)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs from writing the same output.

        Raises:
          UserError: another one does, or the folder can't be written.
        """
        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("w")
        except OSError as e:
            raise UserError(f"{self._lock.parent} can't be written: {e.strerror}") from e
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Another run may have deleted the file between `open` and `flock`: a lock on a file without a name
                # excludes no other run.
                mine = self._lock.is_file() and self._lock.stat().st_ino == os.fstat(file.fileno()).st_ino
            except BlockingIOError:
                mine = False
            except OSError:  # a file system without locks
                mine = True
            if not mine:
                raise UserError(f"another run is writing {next(iter(self._outputs.values()))} at this moment")
            try:
                yield
            finally:
                self._lock.unlink(missing_ok=True)

    def read(self) -> PreprocessingState | None:
        """Reads where an earlier run of the same job stopped; None without one, or if it can't be continued."""
        if self._identity is None or not self._path.is_file():
            return None
        try:
            saved = json.loads(self._path.read_text())
            if saved.pop("identity") != self._identity:
                return None
            state = PreprocessingState(
                Position(**saved["position"]), ProcessedCounts(**saved["counts"]), saved["writers"], saved["sealed"]
            )
        # A record of another version, or one that a full disk cut: the run begins anew.
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        resumable = state.sealed or all(can_resume(p, state.writers.get(k, {})) for k, p in self._outputs.items())
        return state if resumable else None

    def write(self, state: PreprocessingState) -> None:
        """Keeps `state`, atomically; does nothing for a run without identity."""
        if self._identity is None:
            return
        temporary = self._path.with_name(self._path.name + ".tmp")
        with temporary.open("w") as file:
            json.dump({"identity": self._identity, **asdict(state)}, file)
            file.flush()
            # Before the rename: a file system may do that first, and a power cut would leave an empty record.
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def remove(self) -> None:
        """Forgets the run and deletes what it left unfinished."""
        for prefix in self._outputs.values():
            discard(prefix)
        self._path.unlink(missing_ok=True)


def refuse_existing(prefixes: Sequence[Path]) -> None:
    """Raises `UserError` if a dataset of that name exists."""
    for prefix in prefixes:
        if idx_path(prefix).exists():
            raise UserError(f"{idx_path(prefix)} exists; choose another --output, or replace it with --overwrite")
