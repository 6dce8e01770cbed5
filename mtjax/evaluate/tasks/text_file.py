"""Reads data files of tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.errors import UserError, parse_json


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
