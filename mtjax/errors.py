"""Errors of the user, in one sentence: raised where input is read, printed by the command line (exit code 2)."""

import difflib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

LOST = 75
"""Exit code of a run that ended because of its environment and can be resumed (EX_TEMPFAIL of sysexits.h)."""

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
    """Invalid input: the message names what was wrong, with the values, and what to do."""


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Puts the name of a file before the message of an error that lacks it.

    Raises:
      UserError: one was raised.
    """
    try:
        yield
    except UserError as e:
        if str(source) in str(e):
            raise
        raise UserError(f"{source}: {e}") from e


def nearest(name: str, known: Iterable[str], similarity: float = 0.5) -> str:
    """Returns ` - did you mean 'x'?` for the known name closest to `name`; "" if none is as similar (1: the same)."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=similarity)
    return f" - did you mean {match[0]!r}?" if match else ""


def listed(names: Sequence[str]) -> str:
    """Joins one name or more as a sentence does: "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def shortened(value: object, length: int = 60) -> str:
    """Converts a value to text, and cuts out its middle if it is too long for a sentence."""
    text = str(value)
    return text if len(text) <= length else f"{text[: length - 20]}...{text[-10:]}"


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of mtjax from a checkout, since no package index has mtjax."""
    return f"pip install '.[{extra}]' in a checkout of mtjax"


def require(library: str, extra: str) -> ModuleType:
    """Imports a library that an extra of mtjax installs.

    Raises:
      UserError: it isn't installed; the message says how to.
    """
    try:
        return import_module(library)
    except ImportError as e:
        raise UserError(f"this needs the library {library}: {install_extra(extra)}") from e


def first_line(error: BaseException, length: int = 200) -> str:
    """Returns the message of an error, shortened to one line; for a file error, its path and reason."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    text = str(error).strip()
    return text.splitlines()[0][:length] if text else repr(error)


def lone_surrogate(text: str) -> str | None:
    """Finds half of a surrogate pair, which JSON can contain (`\\ud800`) and which is not a character.

    Returns:
      `the lone surrogate \\ud800 at character 3, which isn't text` for the first one; None where there is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return f"the lone surrogate \\u{ord(text[e.start]):04x} at character {e.start}, which isn't text"
    return None


def parse_json(text: str | bytes, source: object) -> Any:
    """Parses JSON; `source` names its origin in messages.

    Raises:
      UserError: it is not JSON.
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode())
    # JSON that is nested thousands of times ends in a RecursionError, and numbers of thousands of digits in a
    # ValueError.
    except (ValueError, RecursionError) as e:
        raise UserError(f"{source} is not JSON: {first_line(e)}") from e


def parse_json_object(text: str | bytes, source: object) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      UserError: it is not a JSON object.
    """
    value = parse_json(text, source)
    if not isinstance(value, dict):
        raise UserError(f"{source} should be a JSON object")
    return value


def disk_reason(error: BaseException) -> str | None:
    """Returns the operating system's reason for a disk error; None for other errors.

    TensorStore and tokenizers raise other exceptions with these reasons in the message. When a full disk cuts off an
    array, numpy's message has the bytes "requested and" written.
    """
    reason = next((reason for reason in _DISK if reason in str(error)), None)
    if reason or not isinstance(error, OSError):
        return reason
    return os.strerror(errno.ENOSPC) if "requested and" in str(error) else error.strerror or first_line(error)
