"""JSON lines, read in one way by all commands: UTF-8, a byte order mark skipped, lines that end in \n or \r\n.

Other ends of lines, which `str.splitlines` and text mode know (\r, U+0085, U+2028...), may occur within a line.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtjax.errors import UserError, lone_surrogate


def read_text(path: Path) -> str:
    """Reads a text file, with its ends of lines as they are.

    Raises:
      UserError: it can't be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 text (byte {e.start}): is it the right file?") from e


def read_lines(path: Path) -> list[str]:
    """Reads the lines of a text file, without their ends.

    Raises:
      UserError: it can't be read, or is not UTF-8.
    """
    # Not splitlines, for the reason in the module's docstring.
    return [line.removesuffix("\r") for line in read_text(path).split("\n")]


def json_objects(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yields the line number, and the JSON object or an error, of each line that is not empty."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            yield number, "is not JSON"
            continue
        if not isinstance(row, dict):
            yield number, "is not a JSON object"
            continue
        # Such a string can't be written anywhere: better an error with its line than one when an answer is saved.
        half = surrogate_in(row)
        yield number, f"has {half}" if half else row


def read_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields `FILE:LINE` and the JSON object of each line that is not empty.

    Raises:
      UserError: the file can't be read, or a line is not a JSON object.
    """
    for number, row in json_objects(read_lines(path)):
        if isinstance(row, str):
            raise UserError(f"{path}:{number} {row}")
        yield f"{path}:{number}", row


def surrogate_in(value: Any, name: str = "") -> str | None:
    """Finds half of a surrogate pair in any text of a JSON value.

    Args:
      value: of a line.
      name: of the field that it is in.

    Returns:
      Which half, where it is, and in which field; None where there is none.
    """
    if isinstance(value, str):
        half = lone_surrogate(value)
        return half and half + (f" (in {name!r})" if name else "")
    if isinstance(value, dict):
        found = [surrogate_in(key, "the name of a field") or surrogate_in(v, name or key) for key, v in value.items()]
    elif isinstance(value, list):
        found = [surrogate_in(item, name) for item in value]
    else:
        return None
    return next(filter(None, found), None)
