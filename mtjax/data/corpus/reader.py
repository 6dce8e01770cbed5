"""Raw text in, in a stream: `.jsonl`, `.json` and plain text, also as .gz and .zst, as chunks of documents.

A chunk is the unit of work and of resuming. Where chunks begin and end depends on the text alone.
"""

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from mtjax.errors import UserError, lone_surrogate, require
from mtjax.storage import filesystem, url_of

CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1 << 30
LONGEST_INTEGER = 600
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Chunk:
    """Some consecutive documents of one file.

    Attributes:
      path: the file, or its URL.
      file: its number among the inputs.
      start: where the chunk starts in the decompressed file, in bytes.
      end: where it ends.
      first_line: number of its first line, from 1.
      documents: raw bytes of each: a line of JSON, or a piece of plain text.
      is_json: which of the two.
      read: bytes taken from the (compressed) file so far.
    """

    path: str
    file: int
    start: int
    end: int
    first_line: int
    documents: list[bytes]
    is_json: bool
    read: int


@dataclass(frozen=True)
class Position:
    """The next chunk to read: a file's number, a byte in it once decompressed, and the line there."""

    file: int = 0
    offset: int = 0
    line: int = 1


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that paths, globs and URLs name, each pattern's in sorted order.

    Raises:
      UserError: a directory, or a pattern that no file matches.
    """
    files: list[str] = []
    for pattern in patterns:
        if url := url_of(pattern):
            filesystem(url)  # names the extra where its library is missing
        if "://" in pattern:
            fs, _, paths = require("fsspec", "data").get_fs_token_paths(pattern)
            matches = [fs.unstrip_protocol(path) for path in sorted(paths)]
        elif Path(pattern).expanduser().is_file():
            matches = [str(Path(pattern).expanduser())]
        else:
            matches = sorted(p for p in _glob(pattern) if Path(p).is_file())
        if not matches and Path(pattern).expanduser().is_dir():
            raise UserError(f"{pattern} is a directory; name the files in it, say '{pattern.rstrip('/')}/*.jsonl'")
        if not matches:
            raise UserError(f"no file matches {pattern!r}")
        files += matches
    return files


def _glob(pattern: str) -> list[str]:
    # pathlib's glob takes no absolute patterns.
    return glob.glob(str(Path(pattern).expanduser()), recursive=True)  # noqa: PTH207


def total_bytes(path: str) -> int:
    """Size of a file as it is stored; 0 for what is not local, which is not asked."""
    return 0 if "://" in path else Path(path).stat().st_size


def is_json(path: str) -> bool:
    """Whether a file holds a JSON object per line; any other holds plain text."""
    name = Path(path).name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return Path(name).suffix in (".jsonl", ".json", ".ndjson")


def chunks(paths: Sequence[str], start: Position | None = None) -> Iterator[Chunk]:
    """The documents of files one after another, from `start` on.

    Raises:
      UserError: a file that can't be read or decompressed, by name.
    """
    start = start or Position()
    for number in range(start.file, len(paths)):
        position = start if number == start.file else Position(number)
        yield from _file_chunks(paths[number], position)


def _file_chunks(path: str, start: Position) -> Iterator[Chunk]:
    try:
        with _open_raw(path) as raw, _decompressed(path, raw) as file:
            _skip(file, start.offset)
            json_lines = is_json(path)
            documents = _lines(file) if json_lines else _pieces(file, piece_bytes(path))
            offset, line, held, size = start.offset, start.line, [], 0
            for document in documents:
                held.append(document)
                size += len(document)
                if size >= CHUNK_BYTES:
                    yield Chunk(path, start.file, offset, offset + size, line, held, json_lines, raw.tell())
                    line += sum(d.count(b"\n") for d in held)
                    offset, held, size = offset + size, [], 0
            if held:
                yield Chunk(path, start.file, offset, offset + size, line, held, json_lines, raw.tell())
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(f"{path} is damaged: {e}") from e
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e


def _open_raw(path: str) -> IO[bytes]:
    if "://" in path:
        return require("fsspec", "data").open(path, "rb").open()
    return Path(path).open("rb")


def _decompressed(path: str, raw: IO[bytes]) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw))
    if path.endswith(".zst"):
        return cast("IO[bytes]", io.BufferedReader(_ZstdStream(path, raw), CHUNK_BYTES))
    return raw


class _ZstdStream(io.RawIOBase):
    """A decompressing stream whose errors, a cut-off end among them, are the ones that gzip has."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        self._library = require("zstandard", "data")
        self._raw = raw
        self._decoder = self._library.ZstdDecompressor().decompressobj()
        self._ready = b""
        self._fresh = True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview[int]") -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._ready:
            if self._decoder.eof:  # files made by `cat a.zst b.zst` have several frames
                rest = self._decoder.unused_data or self._raw.read(CHUNK_BYTES)
                if not rest:
                    return 0
                self._decoder, self._fresh = self._library.ZstdDecompressor().decompressobj(), True
            else:
                rest = self._raw.read(CHUNK_BYTES)
                if not rest and self._fresh:
                    return 0
                if not rest:
                    raise EOFError("the compressed file ends in the middle")
            self._fresh = False
            try:
                self._ready = self._decoder.decompress(rest)
            except self._library.ZstdError as e:
                raise EOFError(str(e)) from e
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _skip(file: IO[bytes], offset: int) -> None:
    if file.seekable() and not isinstance(file, gzip.GzipFile):
        file.seek(offset)
        return
    while offset:
        data = file.read(min(offset, CHUNK_BYTES))
        if not data:
            raise EOFError("the file has become shorter since the run that is being resumed")
        offset -= len(data)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise EOFError(f"a line is longer than {LONGEST_LINE:,} bytes")
        yield line


def piece_bytes(path: str) -> int:
    """How long the documents are that plain text is cut into: 1/256 of the file, between 256 bytes and 8 KiB.

    Without such cuts a file would be one document, and no part of it could be held out for validation.
    """
    size = CHUNK_BYTES * 2 if "://" in path else Path(path).stat().st_size
    return min(max(size // 256, 256), 8192)


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Cuts at the first empty line after `size` bytes, at the latest at the first line end after 4 x `size`."""
    held: list[bytes] = []
    length = 0
    while line := file.readline(64 * size):
        held.append(line)
        length += len(line)
        if (
            (length >= size and not line.strip())
            or (length >= 4 * size and line.endswith(b"\n"))
            or length >= 64 * size
        ):
            yield b"".join(held)
            held, length = [], 0
    if held:
        yield b"".join(held)


def text_of(document: bytes, is_json: bool, keys: Sequence[str]) -> dict[str, list[str]]:
    """The pieces of text under each key of a raw document: one, or several where JSON has a list of strings.

    Plain text is one piece, under every key.

    Raises:
      ValueError: it isn't UTF-8 or isn't a JSON object, or a key is missing or holds something that isn't text.
    """
    text = document.decode("utf-8-sig")
    if not is_json:
        return {key: [text] for key in keys}
    row = _DECODER.decode(text)
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return {key: _pieces_of_text(row, key) for key in keys}


def _pieces_of_text(row: dict[str, Any], key: str) -> list[str]:
    value = row.get(key)
    pieces: list[Any] = value if isinstance(value, list) else [value]
    for piece in pieces:
        if not isinstance(piece, str):
            kind = f"a list with {type(piece).__name__}" if pieces is value else type(piece).__name__
            there = f"it holds {kind}" if key in row else f"it has {', '.join(map(repr, row)) or 'none'}"
            raise ValueError(f"no text under the key {key!r}; {there}")
        check_characters(piece, key)
    return pieces


def check_characters(text: str, key: str) -> None:
    """Refuses half of a surrogate pair, which JSON can write (`\\ud800`) and which isn't a character.

    Raises:
      ValueError: names the first one and its place.
    """
    if half := lone_surrogate(text):
        raise ValueError(f"the text under the key {key!r} has {half}")


def _integer(digits: str) -> int:
    """An integer of any length: Python refuses those of more than 4,300 digits, and nothing here reads them."""
    return int(digits) if len(digits) < LONGEST_INTEGER else 0


_DECODER = json.JSONDecoder(parse_int=_integer)
