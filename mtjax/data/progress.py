"""A bar on a terminal, plain lines elsewhere: how far a long preparation is, how fast, and when it ends."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0
QUIET_SECONDS = 1.0


class BytesProgress:
    """Shows `task`: done of total in bytes, and MB/s of text. Silent when it ends within a second.

    Use as a context manager, and call `update` as often as you like.
    """

    def __init__(self, task: str, total: int, text_before: int = 0) -> None:
        self._task = task
        self._total = total or None
        self._text_before = text_before
        self._start = self._last_line = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> "BytesProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, text_bytes: int = 0) -> None:
        """Reports that `done` of the total is done, and `text_bytes` of text were processed (for the MB/s)."""
        now = time.monotonic()
        seconds = now - self._start
        if seconds < QUIET_SECONDS:
            return
        speed = f"{(text_bytes - self._text_before) / seconds / 1e6:.1f} MB/s" if text_bytes else ""
        if sys.stderr.isatty():
            self._show_bar(done, speed)
        elif now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            share = f"{done / self._total:.0%} " if self._total else ""
            eta = f", {seconds * (self._total / done - 1):.0f} s left" if self._total and done else ""
            print(f"{self._task}: {share}{speed}{eta}", file=sys.stderr, flush=True)

    def _show_bar(self, done: int, speed: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            speed_column = TextColumn("{task.fields[speed]}")
            console = Console(stderr=True)
            self._bar = Progress(*columns, speed_column, TimeRemainingColumn(), console=console, transient=True)
            self._bar.add_task(self._task, total=self._total, speed=speed)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, speed=speed)


def say(text: str) -> None:
    """Prints one line to the user on stderr, separately from a command's output on stdout."""
    print(text, file=sys.stderr, flush=True)
