"""Raw documents to text: JSON objects with text under a key, also a nested one (`meta.content`), and plain text."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from mtjax.errors import UserError, lone_surrogate, require

# Far below Python's limit of 4,300 digits, and far above a number that means something.
LONGEST_INTEGER = 600
COUNTED_AT_A_TIME = 1 << 22
DEEPEST = 3
"""Levels of nested objects in which a key is looked for that the top level lacks."""
Value = TypeVar("Value")


@dataclass(frozen=True)
class TextFields:
    """Where rows have their text.

    Attributes:
      keys: of JSON objects, or columns of tables; `meta.content` is the key `content` of the object under `meta`.
      named: whether the user named them: in a table of unknown columns no key is a default.
      others: whether the fields under other keys are read too.
    """

    keys: tuple[str, ...] = ("text",)
    named: bool = False
    others: bool = False


@dataclass(frozen=True)
class DocumentChunk:
    """Some consecutive documents of one file.

    Attributes:
      path: the file, or its URL.
      file: its number among the inputs.
      start: where the chunk starts in the file's content, in bytes: decompressed text, or the JSON lines of a table.
      end: where it ends.
      first_line: number of its first line, or row of a table, from 1.
      documents: raw bytes of each: a line of JSON, or a piece of plain text.
      is_json: which of the two.
      read: bytes taken from the file as stored so far.
      unit: what messages call the position of a document.
      faults: number of a document in the chunk -> why it can't be used, known since it was read.
      lines_from: the byte of the file at which line 1 begins; not 0 in a part of a file.
    """

    path: str
    file: int
    start: int
    end: int
    first_line: int
    documents: list[bytes]
    is_json: bool
    read: int
    unit: str = "line"
    faults: dict[int, str] | None = None
    lines_from: int = 0

    def where(self, line: int) -> str:
        """Returns the position of a document, for messages: in the whole file, also of a part."""
        return f"{self.path}, {self.unit} {line + lines_before(self.path, self.lines_from)}"


@lru_cache(maxsize=16)
def lines_before(path: str, offset: int) -> int:
    """Counts the lines of a file that end before a byte: only messages need them, so parts don't count at the start."""
    if not offset:
        return 0
    with require("fsspec", "data").open(path, "rb") if "://" in path else Path(path).open("rb") as file:
        pieces = range(0, offset, COUNTED_AT_A_TIME)
        return sum(file.read(min(COUNTED_AT_A_TIME, offset - at)).count(b"\n") for at in pieces)


@dataclass(frozen=True)
class Fault:
    """Why a document can't be used."""

    message: str


def parsed(chunk: DocumentChunk, parse: Callable[[bytes], Value]) -> Iterator[tuple[int, Value | Fault]]:
    """Yields the line of each document of a chunk that is not blank, and what `parse` makes of it.

    Args:
      chunk: of documents.
      parse: raises `ValueError` for a document that can't be used.
    """
    faults, line = chunk.faults or {}, chunk.first_line
    for number, document in enumerate(chunk.documents):
        if number in faults:
            yield line, Fault(faults[number])
        # Blank lines are not documents, and not errors: many files end with one.
        elif document.strip():
            try:
                yield line, parse(document)
            # RecursionError: a line of a million brackets is not a reason to end a run that skips bad lines.
            except (ValueError, RecursionError) as e:
                yield line, Fault(str(e))
        # Plain text has documents of several lines; blank ones are counted, too.
        line += document.count(b"\n")


def text_of(document: bytes, is_json: bool, keys: Sequence[str]) -> dict[str, list[str]]:
    """Returns the pieces of text under each key of a raw document: one, or several where JSON has a list of strings.

    Plain text is one piece, under every key.

    Raises:
      ValueError: it isn't UTF-8 or isn't a JSON object, or a key is missing or holds something that isn't text.
    """
    text = decode(document)
    if not is_json:
        return {key: [text] for key in keys}
    row = json_object(text, _DECODER)
    return {key: pieces_of_text(row, key) for key in keys}


def decode(document: bytes) -> str:
    """Decodes UTF-8.

    Raises:
      ValueError: it is another encoding.
    """
    try:
        # A byte order mark at the start of a file is not a character of its first document.
        return document.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(
            f"byte 0x{document[e.start]:02x} at position {e.start} is not UTF-8: convert the file, for example with "
            "iconv -f ENCODING -t UTF-8"
        ) from e


def json_object(text: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    """Parses a JSON object.

    Raises:
      ValueError: it isn't one, or there is more than one.
    """
    try:
        row = decoder.decode(text)
    except json.JSONDecodeError as e:
        if e.msg == "Extra data" and text[e.pos] == "{":
            raise ValueError(
                "there are several JSON objects on this line, and each must be on its own: write the file anew with "
                "jq -c . FILE > NEW.jsonl"
            ) from e
        raise
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def pieces_of_text(row: dict[str, Any], key: str) -> list[str]:
    """Returns the text under a key, as one piece or the strings of a list.

    Raises:
      ValueError: there is none, or it has half of a surrogate pair.
    """
    pieces = strings_at(row, key)
    for piece in pieces:
        check_characters(piece, key)
    return pieces


def strings_at(row: dict[str, Any], key: str) -> list[str]:
    """Returns the string under a key, or the strings of a list.

    Raises:
      ValueError: there is none.
    """
    value, found = value_at(row, key)
    pieces: list[Any] = value if isinstance(value, list) else [value]
    for piece in pieces:
        if not isinstance(piece, str):
            kind = f"a list with {type(piece).__name__}" if pieces is value else type(piece).__name__
            names = ", ".join(map(repr, row)) or "none"
            raise ValueError(
                f"no text under the key {key!r}; "
                + (f"it holds {kind}" if found else f"it has {names}{_nested(row, key)}")
            )
    return pieces


def value_at(row: Any, key: str) -> tuple[Any, bool]:
    """Returns the value under a key, and whether there is one: under the key as it is, else under its parts."""
    if not isinstance(row, dict):
        return None, False
    # A key with a dot in its name wins over a nested one.
    if key in row:
        return row[key], True
    for at in (at for at, character in enumerate(key) if character == "."):
        # `a.b.c` may be c inside `a.b`, or b.c inside `a`: the shortest first key that leads to a value wins.
        value, found = value_at(row.get(key[:at]), key[at + 1 :])
        if found:
            return value, True
    return None, False


def with_value(row: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Returns a copy of a row with another value under a key that it has, or may be nested."""
    if key not in row:
        for at in (at for at, character in enumerate(key) if character == "."):
            if value_at(row.get(key[:at]), key[at + 1 :])[1]:
                return {**row, key[:at]: with_value(row[key[:at]], key[at + 1 :], value)}
    return {**row, key: value}


def _nested(row: dict[str, Any], key: str) -> str:
    """Returns how to name a key that is inside another one, as a clause; nothing where there is no such key."""
    inside = _path_to(row, key, DEEPEST)
    return f"; {key!r} is nested: --text-key {inside}" if inside else ""


def _path_to(row: dict[str, Any], key: str, levels: int) -> str | None:
    for name, value in row.items():
        if not isinstance(value, dict) or not levels:
            continue
        rest = key if key in value else _path_to(value, key, levels - 1)
        if rest:
            return f"{name}.{rest}"
    return None


def check_characters(text: str, key: str) -> None:
    """Refuses half of a surrogate pair, which JSON can write (`\\ud800`) and which isn't a character.

    Raises:
      ValueError: names the first one and its position.
    """
    if half := lone_surrogate(text):
        raise ValueError(f"the text under the key {key!r} has {half}")


def check_layout(path: str, head: bytes) -> None:
    """Refuses a JSON file that is not one object per line as a whole.

    Args:
      path: for the message.
      head: the beginning of the file.

    Raises:
      UserError: it is an array, or its objects are pretty-printed; says how to convert it.
    """
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    first, _, more = text.partition("\n")
    is_line = _is_json(first)
    # A list on the first line, with more lines after it, is one bad row, which is reported with its line.
    if text.startswith("[") and not (is_line and more.strip()):
        raise UserError(
            f"{path} is a JSON array, and must have one object per line: convert it with jq -c '.[]' FILE > NEW.jsonl"
        )
    # A first line that is merely broken is reported with its line, too.
    if text.startswith("{") and not is_line and (_first_object_end(text) > len(first) or first.strip() == "{"):
        raise UserError(
            f"{path} has pretty-printed JSON, and must have one object per line: convert it with "
            "jq -c . FILE > NEW.jsonl"
        )


def _first_object_end(text: str) -> int:
    """Returns where the JSON value at the beginning of a text ends; 0 where there is none, or not all of it."""
    try:
        return _DECODER.raw_decode(text)[1]
    except (ValueError, RecursionError):
        return 0


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _integer(digits: str) -> int:
    """Returns an integer of any length: Python refuses those of more than 4,300 digits, and nothing here reads them."""
    return int(digits) if len(digits) < LONGEST_INTEGER else 0


_DECODER = json.JSONDecoder(parse_int=_integer)
