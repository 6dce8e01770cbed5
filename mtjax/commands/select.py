"""`mtjax data select`: keeps the rows of JSON lines whose score is low or high."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.cli import read, run_main
from mtjax.config.field_metadata import WIDTH, at_least
from mtjax.data.json_lines import read_objects
from mtjax.errors import UserError
from mtjax.storage import check_out, write_whole
from mtjax.waiting import IMPORTS, waiting

DESCRIPTION = """Keeps rows of JSON lines by a score, in their order.

The score is a number in each row, or comes from --scorer, which is written into the rows that are kept: a run of
mtjax finetune --task classify or regress, hf:DIR, or command:PROGRAM, which reads lines {"text": ...} and writes lines
{"score": ...}. Of rows with the same score, the first are kept.

Examples:
  mtjax data select --input texts.jsonl --output kept.jsonl --scorer runs/toxic-1 --score-label toxic --lowest 0.5
  mtjax data select --input texts.jsonl --output kept.jsonl --scorer "command:python my_scores.py" --at-most 0.2
  mtjax data select --input rows.jsonl --output kept.jsonl --score-key quality --highest 0.1
"""


@dataclass(frozen=True)
class Options:
    """The options of `mtjax data select`."""

    input: Path
    """JSON lines."""
    output: Path
    """JSON lines to write: the rows that are kept."""
    text_key: str = "text"
    """Key of the text, for --scorer."""
    score_key: str = "score"
    """Key of the score: read without --scorer, written with it."""
    scorer: str | None = None
    """A classifier's run or folder, hf:DIR, or command:PROGRAM with its arguments."""
    score_label: str | None = None
    """The class whose probability is the score. Default: the second of two classes."""
    mesh: str = "1x1"
    """Devices of a classifier, as DATAxMODEL."""
    rows: int = at_least(1, 32, most=WIDTH)
    """Batch size of a classifier per data-parallel rank."""
    lowest: float | None = None
    """Keep this share of the rows, those with the lowest scores."""
    highest: float | None = None
    """Keep this share of the rows, those with the highest scores."""
    at_most: float | None = None
    """Keep rows with scores up to this."""
    at_least: float | None = None
    """Keep rows with scores from this on."""
    overwrite: bool = False
    """Replace --output if it exists."""


RULES = ("lowest", "highest", "at_most", "at_least")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    return run_main(lambda: run(read(Options, argv, "mtjax data select", DESCRIPTION)))


def run(options: Options) -> None:
    """Scores and selects as the options say, and prints what was kept.

    Raises:
      UserError: options or rows can't be used, or the output exists.
    """
    check(options)
    rows = _rows(options)
    # float64, in which a score that is read is compared as it was written.
    scores = np.array(_scores(options, rows), np.float64)
    kept = selected(scores, options)
    # Rows were checked to exist, so the range in the message is never empty.
    if not len(kept):
        raise UserError(f"no row has such a score: they are from {scores.min():g} to {scores.max():g}")
    if options.scorer:
        for index in kept:
            rows[index][options.score_key] = float(scores[index])
    lines = (json.dumps(rows[index], ensure_ascii=False) + "\n" for index in kept)
    write_whole("--output", options.output, "".join(lines))
    for name, some in (("read", scores), ("kept", scores[kept])):
        print(f"{name}    {len(some):,} rows, scores {some.min():.6g} to {some.max():.6g}, mean {some.mean():.6g}")


def check(options: Options) -> None:
    """Checks that the options can be combined.

    Raises:
      UserError: they can't.
    """
    given = [name for name in RULES if getattr(options, name) is not None]
    names = [f"--{name.replace('_', '-')}" for name in RULES]
    if not given:
        raise UserError(f"nothing says which rows to keep: give one of {', '.join(names)}")
    if len(given) > 1 and set(given) != {"at_most", "at_least"}:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UserError(f"{first} and {second} exclude each other: remove one of them")
    for name in given:
        value = getattr(options, name)
        if not math.isfinite(value) or (name in RULES[:2] and not 0 < value <= 1):
            expected = "above 0 and at most 1" if name in RULES[:2] else "a finite number"
            raise UserError(f"--{name.replace('_', '-')} is {value:g}, and must be {expected}")
    if options.score_label is not None and options.scorer is None:
        raise UserError("--score-label needs --scorer: add that, or remove it")
    if options.output.exists() and not options.overwrite:
        raise UserError(f"{options.output} exists: name another --output, or replace it with --overwrite")
    check_out(options.output, "--output")


def selected(scores: np.ndarray, options: Options) -> np.ndarray:
    """Returns the indices of the rows to keep, in order."""
    # Neither is 0: `check` has refused it.
    share = options.lowest or options.highest
    if share is None:
        is_kept = np.ones(len(scores), bool)
        if options.at_most is not None:
            is_kept &= scores <= options.at_most
        if options.at_least is not None:
            is_kept &= scores >= options.at_least
        return np.flatnonzero(is_kept)
    # Stable, so that the first rows of equal scores are kept on every machine.
    order = np.argsort(scores if options.lowest else -scores, kind="stable")
    return np.sort(order[: math.floor(share * len(scores) + 0.5)])


def _rows(options: Options) -> list[dict[str, Any]]:
    rows = []
    key = options.text_key if options.scorer else options.score_key
    for where, row in read_objects(options.input):
        value = row.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not (isinstance(value, str) if options.scorer else is_number):
            expected = f'a string "{key}"' if options.scorer else f'a finite number "{key}"'
            raise UserError(f"{where} must be an object with {expected}")
        rows.append(row)
    if not rows:
        raise UserError(f"{options.input} has no rows")
    return rows


def _scores(options: Options, rows: Sequence[dict[str, Any]]) -> list[float]:
    if options.scorer is None:
        return [float(row[options.score_key]) for row in rows]
    with waiting(IMPORTS):
        from mtjax.finetune.scorer import open_scorer

    scorer = open_scorer(options.scorer, options.score_label, mesh=options.mesh, rows=options.rows)
    with waiting(f"scoring {len(rows):,} texts with {options.scorer}"):
        return scorer([row[options.text_key] for row in rows])
