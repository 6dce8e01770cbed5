"""Reads raw text in a stream, as chunks of documents: JSON lines, tables (Parquet, Arrow, CSV, TSV) and plain text.

All commands read through `chunks`. A chunk is the unit of work and of resuming. Where chunks begin and end depends on
the text alone.
"""

import glob
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtjax.data.corpus.documents import DocumentChunk, TextFields, check_layout
from mtjax.data.corpus.folders import files_in
from mtjax.data.corpus.packed import OpenFile, open_packed, without_suffixes
from mtjax.data.corpus.tables import JsonRow, columnar_rows, delimited_rows, delimiter_of, is_columnar, parquet_rows
from mtjax.errors import UserError, require
from mtjax.storage import filesystem, url_of

# A change moves the borders of chunks, at which an interrupted run continues.
CHUNK_BYTES = 1 << 20
# A file without line ends would otherwise fill the memory.
LONGEST_LINE = 1 << 30
ANY_TEXT = TextFields()


@dataclass(frozen=True)
class Position:
    """The next chunk to read: a file's number, a byte in its content, and the line or row there."""

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class DocumentSpan:
    """The documents of a file that begin in a range of its bytes as stored, or all of them; see `parts.spans_of`.

    Attributes:
      path: the file.
      begin: first byte; not 0 only in files that can be divided.
      end: the byte after the last; None for the end of the file.
    """

    path: str
    begin: int = 0
    end: int | None = None


def expand(patterns: Sequence[str]) -> list[str]:
    """Returns the files that paths, folders, globs and URLs name, each pattern's in sorted order.

    Raises:
      UserError: a folder without rows or with those of several splits, or a pattern that no file matches.
    """
    files: list[str] = []
    for pattern in patterns:
        matches = _remote(pattern) if "://" in pattern else _local(pattern)
        if not matches:
            raise UserError(f"no file matches {pattern!r}")
        files += matches
    return files


def _local(pattern: str) -> list[str]:
    # A file that exists is never a pattern: names may have brackets.
    path = Path(pattern).expanduser()
    if path.is_file():
        return [str(path)]
    if path.is_dir():
        names = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
        named = pattern.rstrip("/") or "/"
        return [str(path / name) for name in files_in(named, names, lambda name: (path / name).read_bytes())]
    # pathlib's glob takes no absolute patterns.
    return sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file())  # noqa: PTH207


def _remote(pattern: str) -> list[str]:
    if url := url_of(pattern):
        filesystem(url)  # names the extra where its library is missing
    fs, _, paths = require("fsspec", "data").get_fs_token_paths(pattern)
    matches = []
    for path in sorted(paths):
        if not _is_remote_folder(fs, path):
            matches.append(fs.unstrip_protocol(path))
            continue
        names = [name.removeprefix(f"{path.rstrip('/')}/") for name in fs.find(path)]
        found = files_in(pattern.rstrip("/"), names, lambda name, path=path: fs.cat_file(f"{path.rstrip('/')}/{name}"))
        matches += [fs.unstrip_protocol(f"{path.rstrip('/')}/{name}") for name in found]
    return matches


def _is_remote_folder(fs: Any, path: str) -> bool:
    # Over HTTP everything that can be read is a file, and whether it lists other files takes a request to find out.
    return not str(fs.protocol).startswith("http") and "http" not in fs.protocol and fs.isdir(path)


def total_bytes(path: str) -> int:
    """Returns the size of a file as it is stored; 0 for files that are not local, without a request."""
    return 0 if "://" in path else Path(path).stat().st_size


def is_json(path: str) -> bool:
    """Returns whether a file's name is that of one with a JSON object per line."""
    return Path(without_suffixes(path)).suffix in (".jsonl", ".json", ".ndjson")


def chunks(
    paths: Sequence[str | DocumentSpan], start: Position | None = None, fields: TextFields = ANY_TEXT
) -> Iterator[DocumentChunk]:
    """Yields the documents of files one after another.

    Args:
      paths: of the files, or some of their documents.
      start: where to begin.
      fields: the keys or columns that will be read.

    Raises:
      UserError: a file can't be read or decompressed, or has no such column; names it.
    """
    start = start or Position()
    for number in range(start.file, len(paths)):
        position = start if number == start.file else Position(number)
        path = paths[number]
        yield from _file_chunks(DocumentSpan(path) if isinstance(path, str) else path, position, fields)


class _Documents(NamedTuple):
    """The documents of a file from a position on.

    Attributes:
      rows: the documents.
      is_json: whether each is a line of JSON.
      unit: what messages call the position of a document.
      offset: of the first one, in bytes of the content.
      line: of the first one, counted from the line that begins at `lines_from`.
      lines_from: a byte in the content.
    """

    rows: Iterator[JsonRow]
    is_json: bool
    unit: str
    offset: int
    line: int
    lines_from: int = 0


def _file_chunks(span: DocumentSpan, start: Position, fields: TextFields) -> Iterator[DocumentChunk]:
    path = span.path
    try:
        with open_packed(path) as file:
            documents = _documents(span, file, start, fields)
            offset, line, held, size, faults = documents.offset, documents.line, [], 0, {}

            def chunk() -> DocumentChunk:
                # Bytes of the file as it is stored: the size of its uncompressed content is not known.
                read = min(file.raw.tell(), total_bytes(path) or file.raw.tell()) - span.begin
                shape = (documents.is_json, max(read, 0), documents.unit, faults or None, documents.lines_from)
                return DocumentChunk(path, start.file, offset, offset + size, line, held, *shape)

            for document, fault in documents.rows:
                if fault is not None:
                    faults[len(held)] = fault
                held.append(document)
                size += len(document)
                # Chunks end with the document that reaches the size, so they depend on the text alone, not on how it is
                # read.
                if size >= CHUNK_BYTES:
                    yield chunk()
                    line += sum(d.count(b"\n") for d in held)
                    offset, held, size, faults = offset + size, [], 0, {}
            if held:
                yield chunk()
    except EOFError as e:
        raise UserError(f"{path} is corrupted: {e}") from e
    except OSError as e:
        raise UserError(f"{path} can't be read: {e.strerror or e}") from e


def _documents(span: DocumentSpan, file: OpenFile, start: Position, fields: TextFields) -> _Documents:
    path, start_of_span = span.path, (start.offset, start.line)
    if is_columnar(file.head):
        if file.content is not file.raw:
            raise UserError(f"{path} is a compressed Parquet or Arrow file: decompress it, for example with gzip -d")
        if span.begin or span.end is not None:
            return _rows_of_span(span, file, start, fields)
        return _Documents(columnar_rows(path, file.raw, file.head, fields, start.line - 1), True, "row", *start_of_span)
    delimiter = delimiter_of(path)
    if delimiter is not None:
        return _Documents(
            delimited_rows(path, file.content, delimiter, fields, start.line - 1), True, "row", *start_of_span
        )
    if not is_json(path):
        _skip(file.content, start.offset)
        return _Documents(map(JsonRow, _pieces(file.content, piece_bytes(path))), False, "line", *start_of_span)
    check_layout(path, file.head)
    first = _first_line_in(file.content, span.begin)
    offset = start.offset or first
    _skip(file.content, offset)
    left = None if span.end is None else span.end - offset
    return _Documents(map(JsonRow, _lines(file.content, left)), True, "line", offset, start.line, first)


def _rows_of_span(span: DocumentSpan, file: OpenFile, start: Position, fields: TextFields) -> _Documents:
    """Returns the rows of the row groups of a Parquet file that belong to a span."""
    size = file.raw.seek(0, io.SEEK_END)
    file.raw.seek(0)
    rows = parquet_rows(span.path, file.raw, size, span.begin, size if span.end is None else span.end)
    first = max(rows.start, start.line - 1)
    file.raw.seek(0)
    found = columnar_rows(span.path, file.raw, file.head, fields, first) if first < rows.stop else iter(())
    return _Documents(islice(found, max(rows.stop - first, 0)), True, "row", start.offset, first + 1)


def _first_line_in(file: IO[bytes], begin: int) -> int:
    """Returns the byte of the first line that begins at a byte or after it; at a byte other than 0 the file is moved.

    Raises:
      EOFError: the line in front of it is too long.
    """
    if not begin:
        return 0
    # One byte in front: a line that begins exactly at `begin` belongs here, and reading to the end of the line before
    # it takes just its line end.
    file.seek(begin - 1)
    if len(file.readline(LONGEST_LINE)) == LONGEST_LINE:
        raise EOFError(f"a line is longer than {LONGEST_LINE:,} bytes")
    return file.tell()


def _skip(file: IO[bytes], offset: int) -> None:
    if file.seekable():
        file.seek(offset)
        return
    while offset:
        data = file.read(min(offset, CHUNK_BYTES))
        if not data:
            raise EOFError("it has become shorter since the run that is being resumed")
        offset -= len(data)


def _lines(file: IO[bytes], left: int | None) -> Iterator[bytes]:
    """Yields lines, of `left` bytes those that begin in them."""
    while (left is None or left > 0) and (line := file.readline(LONGEST_LINE)):
        if len(line) == LONGEST_LINE:
            raise EOFError(f"a line is longer than {LONGEST_LINE:,} bytes")
        yield line
        if left is not None:
            left -= len(line)


def piece_bytes(path: str) -> int:
    """Returns the length of the documents that plain text is cut into: 1/256 of the file, from 256 bytes to 8 KiB."""
    # A file elsewhere has the pieces of one of 2 MiB: its size would take a request.
    size = CHUNK_BYTES * 2 if "://" in path else Path(path).stat().st_size
    # A file that is one document could not be divided into training and validation text.
    return min(max(size // 256, 256), 8192)


def _pieces(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Cuts at the first empty line after `size` bytes, at the latest at the first line end after 4 x `size`."""
    held: list[bytes] = []
    length = 0
    # Text without line ends is cut as well.
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
