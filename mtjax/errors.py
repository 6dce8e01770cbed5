"""A user's mistake, in one sentence: raised where the input enters, printed by the command line (exit code 2)."""

import difflib
import errno
import json
import os
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

LOST = 75
"""Exit code of a run that ended for what happened around it, and that can be resumed (EX_TEMPFAIL of sysexits.h)."""

_DISK = tuple(
    os.strerror(code)
    for code in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.ESTALE,
        errno.EIO,
    )
)


class UserError(Exception):
    """Input that can't be used: the message says what was wrong, with the values, and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """` - did you mean 'x'?` for the known name closest to `name`, or nothing when none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" - did you mean {match[0]!r}?" if match else ""


def shortened(value: object, length: int = 60) -> str:
    """A value as text, with its middle left out where it is longer than a sentence can hold."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 20]}...{text[-10:]}"


def install_extra(extra: str) -> str:
    """How to install an extra of mtjax, for a message: from a checkout, since no package index has mtjax."""
    return f"pip install '.[{extra}]' in a checkout of mtjax"


def require(library: str, extra: str) -> ModuleType:
    """A library, imported, that an extra of mtjax installs.

    Raises:
      UserError: it isn't installed; the message says how to.
    """
    try:
        return import_module(library)
    except ImportError as e:
        raise UserError(f"this needs the library {library}: {install_extra(extra)}") from e


def first_line(error: BaseException, length: int = 200) -> str:
    """What an error says, short enough for a sentence: of a file, its path and why."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = str(error).strip()
    return text.splitlines()[0][:length] if text else repr(error)


def lone_surrogate(text: str) -> str | None:
    """Finds half of a surrogate pair, which JSON can write (`\\ud800`) and which isn't a character.

    Returns:
      `the lone surrogate \\ud800 at character 3, which isn't text` for the first one; None where there is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return f"the lone surrogate \\u{ord(text[e.start]):04x} at character {e.start}, which isn't text"
    return None


def parse_json(text: str | bytes, source: object) -> Any:
    """The value that JSON stands for; `source` says where it is from.

    Raises:
      UserError: it is not JSON.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    except (ValueError, RecursionError) as e:
        raise UserError(f"{source} is not JSON: {first_line(e)}") from e


def parse_json_object(text: str | bytes, source: object) -> dict[str, Any]:
    """The same of an object.

    Raises:
      UserError: it is not one.
    """
    value = parse_json(text, source)
    if not isinstance(value, dict):
        raise UserError(f"{source} should be a JSON object")
    return value


def disk_reason(error: BaseException) -> str | None:
    """Why a disk refused, in the system's words; None where an error says nothing of one.

    TensorStore and tokenizers have errors of their own, with these words inside. Of an array that a full disk has not
    taken whole, numpy says how much was "requested and" how much written.
    """
    words = next((words for words in _DISK if words in str(error)), None)
    if words or not isinstance(error, OSError):
        return words
    return os.strerror(errno.ENOSPC) if "requested and" in str(error) else error.strerror or first_line(error)
