"""Files that a run appends to while a disk may be full or gone: the run goes on, and what is there stays whole."""

import contextlib
import logging
import os
import sys
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

from mtjax.errors import UserError, first_line

log = logging.getLogger(__name__)


class Lines:
    """Lines at the end of a file: each is on disk whole, or waits in memory until it can be."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: list[bytes] = []
        self._told = False

    def write(self, line: str) -> None:
        """Appends a line, after those that could not be written before."""
        self._waiting.append(line.encode())
        try:
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as e:
            if not self._told:
                log.warning("%s can't be written (%s): its lines wait in memory", self._path, first_line(e))
            self._told = True
            self._why = first_line(e)
        else:
            self._told = False

    def _append(self, line: bytes) -> None:
        size = self._file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            if written:
                self._file.truncate(size)
            raise

    def close(self) -> None:
        """Ends it.

        Raises:
          UserError: lines still wait, and no other error is on its way.
        """
        if self._waiting:
            last = self._waiting.pop()
            self.write(last.decode())
        self._file.close()
        if self._waiting and sys.exc_info()[0] is None:
            raise UserError(f"{len(self._waiting)} lines of {self._path} could not be written: {self._why}")


class Events:
    """Scalars as TensorBoard events, written at once: a thread that meets a full disk would die, and its queue fill up.

    They are the same numbers as the lines', so when a disk fails, they end.

    Args:
      folder: of the files; each start of a run adds one.
      from_step: events of earlier starts from here on don't count.
    """

    def __init__(self, folder: Path, from_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writer: EventsWriter | None = EventsWriter(str(folder / "events"))
        self._write(Event(step=from_step, session_log=SessionLog(status=SessionLog.START)))

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Adds a number."""
        self._write(Event(step=step, summary=scalar(name, value)))

    def _write(self, event: Event) -> None:
        if self._writer is None:
            return
        try:
            self._writer.write_event(event)
            self._writer.flush()
        except OSError as e:
            log.warning("TensorBoard events in %s end here: %s", self._folder, first_line(e))
            self.close()

    def close(self) -> None:
        """Ends the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(OSError):  # what it still holds
                writer.close()
