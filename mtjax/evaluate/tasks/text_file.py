"""A task's data file, read with one sentence for what is wrong with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtjax.errors import UserError, parse_json


def read_text(path: Path) -> str:
    """All of a file.

    Raises:
      UserError: it can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): is it the task's data?") from e


def json_lines(path: Path, field: str) -> Iterator[tuple[int, str]]:
    """A text field of each line, with the line's number.

    Raises:
      UserError: a line is not a JSON object that has the field, as text.
    """
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}")
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{path}, line {number} has {_described(row)}, and needs {field!r}, a text: is it another task's data?"
            )
        yield number, text


def _described(row: Any) -> str:
    """The fields of a line, or what it has instead."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    return f"the fields {', '.join(map(repr, row))}" if row else "no fields"
