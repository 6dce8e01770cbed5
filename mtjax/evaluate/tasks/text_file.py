"""A task's data file, read with one sentence for what is wrong with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.errors import UserError, parse_json


def json_lines(path: Path, field: str) -> Iterator[tuple[int, str]]:
    """A text field of each line, with the line's number.

    Raises:
      UserError: a line is not a JSON object that has the field, as text.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        row = parse_json(line, f"{path}, line {number}")
        text = row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{path}, line {number} has {_described(row)}, and needs {field!r}, a text: is it another task's data?"
            )
        if half := surrogate_in(text, field):
            raise UserError(f"{path}, line {number} has {half}: correct the line, or remove it")
        yield number, text


def _described(row: Any) -> str:
    """The fields of a line, or what it has instead."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}"
    return f"the fields {', '.join(map(repr, row))}" if row else "no fields"
