"""Rows of a task's files, TSV with a header or JSON lines: texts and labels, and what is wrong with the others."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.errors import UserError, shortened

SHOWN = 3
"""Bad rows of a file that are named; the others are counted."""


@dataclass(frozen=True)
class Fields:
    """Names of fields, several choices of each."""

    texts: tuple[tuple[str, ...], ...]
    label: tuple[str, ...]


@dataclass(frozen=True)
class Example:
    """One row: its texts, and the label as the file writes it; None where labels are not asked for."""

    texts: tuple[str, ...]
    label: str | None
    line: int = field(default=0, compare=False)
    """In its file, from 1."""
    name: str = field(default="", compare=False)
    """Where lines have none of their own."""
    part: str = ""
    """Of its set that it belongs to, where metrics tell parts apart."""

    @property
    def key(self) -> dict[str, Any]:
        """By what answers name it."""
        return {"id": self.name} if self.name else {"line": self.line}


@dataclass
class Examples:
    """The rows of one file, and which were left out."""

    path: Path
    rows: list[Any] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    """One reason each, with the line's number."""
    unit: str = "rows"
    """What they are called."""
    remarks: list[str] = field(default_factory=list)
    """Other notes about the rows."""

    @property
    def note(self) -> str:
        """What to say of the rows that were left out; nothing where there are none."""
        if not self.bad:
            return ""
        total, more = len(self.rows) + len(self.bad), len(self.bad) - SHOWN
        named = "; ".join(self.bad[:SHOWN]) + (f"; and {more:,} more" if more > 0 else "")
        return f"{len(self.bad):,} of {total:,} {self.unit} of {self.path} are left out: {named}"

    @property
    def notes(self) -> list[str]:
        """All notes about the rows."""
        return [*([self.note] if self.note else []), *self.remarks]

    def check(self) -> "Examples":
        """Checks that most rows are good.

        Raises:
          UserError: there are none, or more bad ones than good ones.
        """
        if not self.rows and not self.bad:
            raise UserError(f"{self.path} has no {self.unit}")
        if len(self.bad) > len(self.rows):
            raise UserError(f"{self.note}: is it another task's file?")
        return self


def read_examples(path: Path, fields: Fields, *, labelled: bool = True) -> Examples:
    """The rows of a file; if they need not be `labelled`, labels where they are.

    Raises:
      UserError: it can't be read, it has none of the fields, or most rows are bad.
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
    """Rows by the names in the header; GLUE's tables have no quotes that mean anything."""
    header = lines[0].split("\t")
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("\t")
        if not line.strip():
            continue
        fits = len(cells) == len(header)
        yield number, dict(zip(header, cells, strict=True)) if fits else f"has {len(cells)} fields, not {len(header)}"


def _of_json(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Rows whose values are text: those that are not, as JSON."""
    for number, row in json_objects(lines):
        if isinstance(row, str):
            yield number, row
        else:
            yield number, {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items() if v is not None}


def json_objects(lines: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """The object of each line that is not empty, or what is wrong with it, by the line's number."""
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
        half = surrogate_in(row)
        yield number, f"has {half}" if half else row


def _chosen(path: Path, row: dict[str, str], choices: Sequence[tuple[str, ...]], what: str) -> tuple[str, ...]:
    """The first choice that a row has all names of.

    Raises:
      UserError: it has none.
    """
    for names in choices:
        if all(name in row for name in names):
            return names
    wanted = " or ".join(" and ".join(names) for names in choices)
    named = shortened(", ".join(row), 200)
    raise UserError(f"{path} has the fields {named}, and needs {wanted} for {what}: is it another task's file?")


def _label(row: dict[str, str], names: Sequence[str]) -> str | None:
    return next((row[name].strip() for name in names if row.get(name, "").strip()), None)


def _wrong(row: dict[str, str], names: Sequence[str]) -> str:
    """What is wrong with a row; nothing where it is good."""
    missing = next((name for name in names if not row.get(name, "").strip()), None)
    return f"has no {missing}" if missing else ""
