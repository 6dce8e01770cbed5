"""Reads rows with texts and labels from TSV with a header or JSON lines, and reports invalid rows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import json_objects, read_lines
from mtjax.errors import UserError, shortened

SHOWN = 3
"""Most invalid rows of a file that are listed; others are counted."""


@dataclass(frozen=True)
class FieldNames:
    """Names of the fields with texts and label; several alternatives of each."""

    texts: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """One row: its texts, and the label as in the file, if any."""

    texts: tuple[str, ...]
    label: str | None
    line: int = field(default=0, compare=False)
    """Number of its line in the file, from 1."""
    name: str = field(default="", compare=False)
    """Its id, if it is not identified by its line."""
    part: str = ""
    """Its subset, for tasks with metrics by subset."""

    @property
    def key(self) -> dict[str, Any]:
        """The id or line by which answers identify it."""
        return {"id": self.name} if self.name else {"line": self.line}


@dataclass
class Examples:
    """The valid rows of one file, and the reasons why others were skipped."""

    path: Path
    rows: list[Any] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """Reason for each skipped row, with its line number."""
    unit: str = "rows"
    """Plural noun for the rows."""
    remarks: list[str] = field(default_factory=list)
    """Other notes about the rows."""

    @property
    def note(self) -> str:
        """Note on the rows that were skipped; empty if there are none."""
        if not self.bad:
            return ""
        total, more = len(self.rows) + len(self.bad), len(self.bad) - SHOWN
        reasons = "; ".join(self.bad[:SHOWN]) + (f"; and {more:,} more" if more > 0 else "")
        return f"{len(self.bad):,} of {total:,} {self.unit} of {self.path} are skipped: {reasons}"

    @property
    def notes(self) -> list[str]:
        """All notes about the rows."""
        return [*([self.note] if self.note else []), *self.remarks]

    def check(self) -> "Examples":
        """Checks that most rows are valid.

        Raises:
          UserError: there are no rows, or more invalid than valid ones.
        """
        if not self.rows and not self.bad:
            raise UserError(f"{self.path} has no {self.unit}")
        if len(self.bad) > len(self.rows):
            raise UserError(f"{self.note}: is it the file of another task?")
        return self


def read_examples(path: Path, fields: FieldNames, *, labelled: bool = True) -> Examples:
    """Reads the rows of a file; labels are optional if not `labelled`.

    Raises:
      UserError: the file can't be read or does not have the fields, or most rows are invalid.
    """
    lines = read_lines(path)
    examples = Examples(path)
    rows = _of_json(lines) if _is_json(path, lines) else _of_table(lines)
    texts: tuple[str, ...] | None = None
    label = None
    for number, row in rows:
        if isinstance(row, str):
            examples.bad.append(f"line {number} {row}")
            continue
        # The first valid row decides which alternative a file has: rows of one file have the same fields.
        if texts is None:
            texts = _chosen(path, row, fields.texts, "texts")
            names = [(name,) for name in fields.label]
            label = _chosen(path, row, names, "a label")[0] if labelled else None
        wrong = _wrong(row, (*texts, *([label] if label else [])))
        if wrong:
            examples.bad.append(f"line {number} {wrong}")
            continue
        examples.rows.append(
            Example(tuple(row[name] for name in texts), _label(row, (label,) if label else fields.label), number)
        )
    return examples.check()


def _is_json(path: Path, lines: Sequence[str]) -> bool:
    return path.suffix in (".jsonl", ".json") or next((line for line in lines if line.strip()), "").startswith("{")


def _of_table(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yields line numbers and rows of a TSV with a header, or errors; quotes are ordinary characters, as in GLUE."""
    header = lines[0].split("\t")
    for number, line in enumerate(lines[1:], start=2):
        # Not the csv module: a quote that opens in one of GLUE's rows would swallow the rows after it.
        cells = line.split("\t")
        if not line.strip():
            continue
        fits = len(cells) == len(header)
        yield number, dict(zip(header, cells, strict=True)) if fits else f"has {len(cells)} fields, not {len(header)}"


def _of_json(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yields line numbers and rows of JSON lines, or errors; values that are not strings are converted to JSON."""
    for number, row in json_objects(lines):
        if isinstance(row, str):
            yield number, row
        else:
            # So that a label 1 in JSON is the label "1" of a TSV.
            yield number, {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items() if v is not None}


def _chosen(path: Path, row: dict[str, str], choices: Sequence[tuple[str, ...]], what: str) -> tuple[str, ...]:
    """Returns the first alternative of which a row has all fields.

    Raises:
      UserError: there is none.
    """
    for names in choices:
        if all(name in row for name in names):
            return names
    wanted = " or ".join(" and ".join(names) for names in choices)
    named = shortened(", ".join(row), 200)
    raise UserError(f"{path} has the fields {named}, but needs {wanted} for {what}: is it the file of another task?")


def _label(row: dict[str, str], names: Sequence[str]) -> str | None:
    """Returns the first of the fields that is not empty, if any."""
    return next((row[name].strip() for name in names if row.get(name, "").strip()), None)


def _wrong(row: dict[str, str], names: Sequence[str]) -> str:
    """Returns what is wrong with a row; "" if it is valid."""
    missing = next((name for name in names if not row.get(name, "").strip()), None)
    return f"has no {missing}" if missing else ""
