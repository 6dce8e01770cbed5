"""Log files of a run, which continue when the disk is full or unavailable: the run goes on, and lines are never cut
off."""

import contextlib
import logging
import os
import socket
import sys
import time
from io import FileIO
from pathlib import Path

from mtjax.errors import UserError, first_line
from mtjax.train.folder.events import FIRST, START, record, scalar

log = logging.getLogger(__name__)


def _append(file: FileIO, content: bytes) -> None:
    """Appends all of `content`, or nothing."""
    size = file.seek(0, os.SEEK_END)
    written = 0
    try:
        while written < len(content):
            written += file.write(content[written:])
    except OSError:
        if written:
            # Half a line would be joined with the next one.
            file.truncate(size)
        raise


class Lines:
    """Appends lines to a file: each is written completely, or waits in memory until it can be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Unbuffered: a line that `write` has returned from is with the operating system, also if the process is killed.
        self._file = FileIO(path, "ab")
        self._waiting: list[bytes] = []
        self._is_reported = False

    def write(self, line: str) -> None:
        """Appends a line, after those that are still waiting."""
        self._waiting.append(line.encode())
        try:
            while self._waiting:
                _append(self._file, self._waiting[0])
                self._waiting.pop(0)
        except OSError as e:
            if not self._is_reported:
                log.warning("%s can't be written (%s): its lines wait in memory", self._path, first_line(e))
            self._is_reported = True
            self._why = first_line(e)
        else:
            self._is_reported = False

    def close(self) -> None:
        """Closes the file.

        Raises:
          UserError: lines could not be written, and no other exception is being handled.
        """
        if self._waiting:
            # Tries once more, with all that waits.
            last = self._waiting.pop()
            self.write(last.decode())
        self._file.close()
        if self._waiting and sys.exc_info()[0] is None:
            raise UserError(f"{len(self._waiting)} lines of {self._path} could not be written: {self._why}")


class Events:
    """Writes scalars as TensorBoard events, unbuffered.

    They are the same numbers as in `metrics.jsonl`, so they simply stop when a disk fails.

    Args:
      folder: of the files; each start of a run adds one.
      from_step: events of earlier starts from here on don't count.
    """

    def __init__(self, folder: Path, from_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file: FileIO | None = FileIO(
            folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}", "ab"
        )
        self._write(0, FIRST)
        # TensorBoard then hides what an earlier start logged after the checkpoint from which this one resumes.
        self._write(from_step, START)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Writes a scalar."""
        self._write(step, scalar(name, value))

    def _write(self, step: int, content: bytes) -> None:
        if self._file is None:
            return
        try:
            _append(self._file, record(time.time(), step, content))
        except OSError as e:
            log.warning("TensorBoard events in %s stop here: %s", self._folder, first_line(e))
            self.close()

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
