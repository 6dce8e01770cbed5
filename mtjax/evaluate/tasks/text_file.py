"""Reads data files of tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtjax.data.corpus.tables import is_table
from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.errors import UserError, parse_json

HEAD = 16
"""Bytes by which a file of columns is recognised."""


def check_no_table(path: Path, wanted: str) -> None:
    """Checks that a file is not a table, whose delimiters and other columns would be scored as text.

    Args:
      path: of the file.
      wanted: what it must be, and what to do, for the message.

    Raises:
      UserError: it is one, or can't be read.
    """
    if not path.is_file():  # the prefix of a corpus
        return
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror}") from e
    if is_table(path.name, head):
        raise UserError(f"{path} is a table, and must be {wanted}")


def json_lines(path: Path, field: str) -> Iterator[tuple[int, str]]:
    """Yields the line number and a text field of each line that is not empty.

    Raises:
      UserError: a line is not a JSON object with the field, or the field is not a string.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}")
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{path}, line {number} has {_described(row)}, but needs {field!r} (a string): is it the data of "
                "another task?"
            )
        if half := surrogate_in(text, field):
            raise UserError(f"{path}, line {number} has {half}: correct the line, or remove it")
        yield number, text


def _described(row: Any) -> str:
    """Describes a line: its fields, or its type if it is not an object."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    return f"the fields {', '.join(map(repr, row))}" if row else "no fields"
