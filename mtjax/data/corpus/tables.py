"""Rows of tables as JSON lines: CSV and TSV, Parquet, and Arrow IPC files, which Hugging Face's `datasets` writes.

Parquet and Arrow are recognized by content. A row becomes the JSON line that the same text would be in a `.jsonl` file,
so what follows needs no other cases.
"""

import base64
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, time, timedelta
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

from mtjax.data.corpus.documents import TextFields
from mtjax.data.corpus.packed import without_suffixes
from mtjax.errors import UserError, first_line, require, shortened

ROWS_AT_A_TIME = 256
BYTES_AT_A_TIME = 1 << 22
COLUMNS_SHOWN = 20
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
ARROW_STREAM_MAGIC = b"\xff\xff\xff\xff"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""Endings of names of delimited text -> what is between its fields."""
LONGEST_FIELD = 1 << 30


class JsonRow(NamedTuple):
    """A row as a line of JSON.

    Attributes:
      document: the line.
      fault: why it can't be used, None where it can.
    """

    document: bytes
    fault: str | None = None


def is_columnar(head: bytes) -> bool:
    """Returns whether a file is Parquet or Arrow, by its first bytes."""
    return head.startswith((PARQUET_MAGIC, ARROW_MAGIC, ARROW_STREAM_MAGIC))


def delimiter_of(path: str) -> str | None:
    """Returns what is between the fields of a CSV or TSV file, by its name, compressed or not; None for other files."""
    return DELIMITERS.get(Path(without_suffixes(path)).suffix)


def is_table(path: str, head: bytes) -> bool:
    """Returns whether a file has rows of columns, and not lines of text: Parquet, Arrow, CSV or TSV.

    Args:
      path: of the file.
      head: its first bytes.
    """
    return is_columnar(head) or delimiter_of(path) is not None


def columnar_rows(path: str, raw: IO[bytes], head: bytes, fields: TextFields, skip: int) -> Iterator[JsonRow]:
    """Yields the rows of a Parquet or Arrow file.

    Args:
      path: for messages.
      raw: the file, at its beginning.
      head: its first bytes.
      fields: the columns that are read.
      skip: so many rows at the beginning are left out.

    Raises:
      UserError: the file is corrupted, has no such column, or pyarrow is not installed.
    """
    read = _parquet_batches if head.startswith(PARQUET_MAGIC) else _arrow_batches
    arrow = require("pyarrow", "parquet")
    try:
        for batch in read(path, raw, head, fields, skip):
            # Rows become Python objects a few at a time: a batch may have books, of a megabyte each.
            step = min(max(batch.num_rows * BYTES_AT_A_TIME // max(batch.nbytes, 1), 1), ROWS_AT_A_TIME)
            for start in range(0, batch.num_rows, step):
                for row in _python_rows(path, batch.slice(start, step)):
                    yield JsonRow(_line(row))
    except UnicodeDecodeError as e:
        raise UserError(f"{path} has a column of strings that are not UTF-8: {e}") from e
    except (arrow.ArrowException, OSError) as e:
        what = "Parquet" if read is _parquet_batches else "Arrow"
        raise UserError(f"{path} is not a valid {what} file: {first_line(e)}") from e


def parquet_rows(path: str, raw: IO[bytes], size: int, begin: int, end: int) -> range:
    """Returns the rows of those row groups of a Parquet file that are at bytes `begin` to `end`.

    Args:
      path: for messages.
      raw: the file, at its beginning.
      size: of the file in bytes.
      begin: a byte in the file.
      end: the byte after the last.

    Raises:
      UserError: the file is corrupted, or pyarrow is not installed.
    """
    arrow = require("pyarrow", "parquet")
    try:
        metadata = require("pyarrow.parquet", "parquet").ParquetFile(raw).metadata
    except (arrow.ArrowException, OSError) as e:
        raise UserError(f"{path} is not a valid Parquet file: {first_line(e)}") from e
    rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    starts = list(accumulate(rows, initial=0))
    # A group is taken to be where it would be if all rows had as many bytes: its own offset is optional in the format.
    inside = [g for g, row in enumerate(starts[:-1]) if begin <= size * row // max(starts[-1], 1) < end]
    return range(starts[inside[0]], starts[inside[-1] + 1]) if inside else range(0)


def _parquet_batches(path: str, raw: IO[bytes], head: bytes, fields: TextFields, skip: int) -> Iterator[Any]:
    file = require("pyarrow.parquet", "parquet").ParquetFile(raw)
    columns = _columns(path, file.schema_arrow.names, fields)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if skip >= rows:
            skip -= rows
            continue
        # Group by group, so that those in front are skipped without being read.
        for batch in file.iter_batches(ROWS_AT_A_TIME, row_groups=[group], columns=columns):
            yield batch.slice(skip)
            skip = max(0, skip - batch.num_rows)


def _arrow_batches(path: str, raw: IO[bytes], head: bytes, fields: TextFields, skip: int) -> Iterator[Any]:
    ipc = require("pyarrow.ipc", "parquet")
    if head.startswith(ARROW_MAGIC):
        file = ipc.open_file(raw)
        batches = (file.get_batch(number) for number in range(file.num_record_batches))
    else:
        batches = file = ipc.open_stream(raw)
    columns = _columns(path, file.schema.names, fields)
    for batch in batches:
        yield batch.select(columns).slice(skip)
        skip = max(0, skip - batch.num_rows)


def _python_rows(path: str, batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a batch as Python objects.

    Raises:
      UserError: a column has a date or a time zone that Python does not have.
    """
    names, columns = batch.schema.names, []
    for name, column in zip(names, batch.columns, strict=True):
        try:
            columns.append(_python_values(column))
        except UnicodeDecodeError:
            raise
        # Errors of Arrow are ValueErrors, unknown time zones LookupErrors.
        except (OverflowError, ValueError, LookupError) as e:
            raise UserError(
                f"{path} has a column {name!r} of {column.type} with values that Python does not have: write them "
                f"as strings, or leave the column out ({first_line(e)})"
            ) from e
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def _python_values(column: Any) -> list[Any]:
    """Returns a column as Python objects, which don't depend on whether pandas is installed."""
    arrow = require("pyarrow", "parquet")
    kind = column.type
    # Python's times end at microseconds: pyarrow takes pandas' for nanoseconds, cuts them off, or refuses them.
    if arrow.types.is_timestamp(kind):
        micro = arrow.timestamp("us", kind.tz)
    elif arrow.types.is_time64(kind):
        micro = arrow.time64("us")
    elif arrow.types.is_duration(kind):
        micro = arrow.duration("us")
    else:
        return column.to_pylist()
    if kind.unit != "ns":
        return column.to_pylist()
    counts = column.cast(arrow.int64()).to_pylist()
    whole = arrow.array([None if n is None else n // 1000 for n in counts], arrow.int64()).cast(micro).to_pylist()
    return [
        value if n is None or n % 1000 == 0 else _with_nanoseconds(value, n % 1000)
        for value, n in zip(whole, counts, strict=True)
    ]


def _with_nanoseconds(value: datetime | time | timedelta, more: int) -> str:
    """Returns a time as text with nine digits of a second, `more` being the last three."""
    if isinstance(value, timedelta):
        return f"{value}{'' if value.microseconds else '.000000'}{more:03}"
    text = value.isoformat(*([" "] if isinstance(value, datetime) else []), timespec="microseconds")
    place = text.index(".") + 7  # a time zone follows
    return f"{text[:place]}{more:03}{text[place:]}"


def _columns(path: str, names: Sequence[str], fields: TextFields) -> list[str]:
    """Returns the columns to read of those that a table has.

    Raises:
      UserError: it lacks the column of a key, or two columns that are read have the same name.
    """
    columns = {key: _column_of(key, names) for key in fields.keys}
    if missing := next((key for key, column in columns.items() if column is None), None):
        raise UserError(
            f"{path} has no column {missing!r}; its columns are {_listed(names)}: name the one with the text with "
            "--text-key"
        )
    # Columns that are not read are not decoded.
    read = list(names) if fields.others else sorted({column for column in columns.values() if column is not None})
    # A row has one value for each name: the other column would be lost. Columns without a name, such as those after
    # the commas at the end of a spreadsheet's header, have none that anyone reads.
    if twice := next((name for name in read if name and list(names).count(name) > 1), None):
        raise UserError(f"{path} has {list(names).count(twice)} columns named {twice!r}: rename all but one")
    return read


def _column_of(key: str, names: Sequence[str]) -> str | None:
    """Returns the column of a key: of that name, else of the longest name that a dotted key begins with."""
    prefixes = [key, *(key[:at] for at in range(len(key) - 1, 0, -1) if key[at] == ".")]
    return next((prefix for prefix in prefixes if prefix in names), None)


def _listed(names: Sequence[str]) -> str:
    """Returns names of columns for a message: a file that is not a table may have any line for a header."""
    shown = [name if name.isprintable() else ascii(name) for name in map(shortened, names[:COLUMNS_SHOWN])]
    return ", ".join(shown) + (f" and {len(names) - COLUMNS_SHOWN} more" if len(names) > COLUMNS_SHOWN else "")


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=_json_value).encode() + b"\n"


def _json_value(value: Any) -> Any:
    """Converts a value that JSON does not have: bytes are text where they are UTF-8, dates and decimals are strings."""
    if isinstance(value, Decimal):
        return f"{value:f}"  # not 1E+3
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def delimited_rows(path: str, file: IO[bytes], delimiter: str, fields: TextFields, skip: int) -> Iterator[JsonRow]:
    """Yields the rows of a CSV or TSV file below its header.

    Args:
      path: for messages.
      file: its content, in UTF-8, at its beginning.
      delimiter: between fields; a field in double quotes may have delimiters and ends of lines inside.
      fields: the columns that are read.
      skip: so many rows at the beginning are left out.

    Raises:
      UserError: no column was named, or there is no such column; the file ends within quotes, or is not UTF-8.
    """
    csv.field_size_limit(LONGEST_FIELD)
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    # Without strict, a quote that has no end makes one field of the rest of the file, and no error.
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, None)
        if names is None:
            return
        kind = "TSV" if delimiter == "\t" else "CSV"
        if not fields.named:
            raise UserError(
                f"{path} is a {kind} file: name the column with the text with --text-key; its columns are "
                f"{_listed(names)}"
            )
        columns = set(_columns(path, names, fields))
        for number, row in enumerate(row for row in reader if row):
            if number < skip:
                continue
            chosen = {name: value for name, value in zip(names, row, strict=False) if name in columns}
            fault = None
            if len(row) != len(names):
                fault = f"it has {len(row)} fields, and the header {len(names)}: quote fields that have {delimiter!r}"
            yield JsonRow(_line(chosen), fault)
    except csv.Error as e:
        raise UserError(f"{path}, line {reader.line_num}: {e}") from e
    except UnicodeDecodeError as e:
        raise UserError(
            f"{path} is not UTF-8 text (byte 0x{e.object[e.start]:02x} after line {reader.line_num}): convert it, for "
            "example with iconv -f ENCODING -t UTF-8"
        ) from e
    finally:
        text.detach()  # or it would close the file, which is not its own
