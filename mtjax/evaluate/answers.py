"""Saves scores during an evaluation, so that the same command continues an interrupted one."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from mtjax.data.json_lines import read_lines
from mtjax.errors import UserError, first_line

Answers = dict[int, tuple[float, bool]]
"""Row number -> log-probability of its scored tokens, and whether they are the most likely ones."""


class SavedAnswers:
    """Answers, saved next to the file of results, one line per batch. Use as a context manager.

    Attributes:
      answers: the answers of an interrupted evaluation, and those that were added.

    Args:
      path: file of the results; None keeps answers only in memory.
      identity: identity of questions and model; saved answers with another identity are discarded.
      writes: whether this process writes the file, which all processes read.
    """

    def __init__(self, path: Path | None, identity: str, *, writes: bool = True) -> None:
        self.path = None if path is None else path.with_name(f".{path.name}.partial")
        self.answers: Answers = {}
        self._identity, self._file = identity, None
        if self.path is not None:
            with _writable(self.path):
                self.answers = self._read(self.path)
        self._writes = writes and self.path is not None

    def __enter__(self) -> "SavedAnswers":
        if self._writes:
            assert self.path is not None
            # Rewrites the file, without an incomplete last line.
            before, self.answers = self.answers, {}
            with _writable(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("w")
                self._file.write(f"{self._identity}\n")
            self.add(before)
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, new: Answers) -> None:
        """Saves the answers of a batch.

        Raises:
          UserError: the file can't be written.
        """
        self.answers |= new
        if self._file is not None and new:
            assert self.path is not None
            with _writable(self.path):
                self._file.write(json.dumps([[number, *answer] for number, answer in new.items()]) + "\n")
                # A batch may take minutes; an interruption loses at most the one that is running.
                self._file.flush()

    def remove(self) -> None:
        """Removes the file, once the results are written."""
        if self._writes and self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> Answers:
        """Reads the answers with this identity; ignores an incomplete last line."""
        lines = read_lines(path) if path.is_file() else [""]
        answers: Answers = {}
        # The first line identifies questions and model; with another, all answers are discarded.
        if lines[0] == self._identity:
            for line in lines[1:]:
                try:
                    rows = json.loads(line)
                except ValueError:
                    break
                answers |= {number: (log_probability, best) for number, log_probability, best in rows}
        return answers


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise UserError(f"{path} can't be used: {e.strerror or first_line(e)}") from e
