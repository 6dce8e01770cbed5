"""Predictions for people and for files: answers as JSON lines, and a table of scores."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from mtjax.errors import UserError
from mtjax.finetune.predictions import Predictions


def check_out(out: Path | None, option: str = "--out") -> None:
    """Checks that answers can be written to a file, before there are any.

    Raises:
      UserError: it is a folder, or its folder does not exist.
    """
    if out is not None and out.is_dir():
        raise UserError(f"{option} {out} is a folder: name a file for the answers")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"{option} {out} can't be written: {out.parent} does not exist")


def report(
    predictions: Predictions,
    out: Path | None,
    official: Path | None = None,
    members: Mapping[str, Predictions] | None = None,
) -> None:
    """Writes the answers to a file, or prints them; scores go to the terminal, those of an ensemble's members first.

    Args:
      predictions: the answers.
      out: file of JSON lines; None prints them.
      official: file of SQuAD's own form besides, a JSON object from ids to answers.
      members: of an ensemble, by name.

    Raises:
      UserError: a file can't be written, or the answers have no official form.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions.lines)
    if predictions.note:
        print(f"note    {predictions.note}", file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        _write("--out", out, text)
        print(f"{len(predictions.lines):,} answers written to {out}", file=sys.stderr)
    if official is not None:
        answers = {line["id"]: line["text"] for line in predictions.lines if "text" in line}
        if not answers:
            raise UserError(f"--official {official} is for answers to SQuAD's questions, and this model gives others")
        _write("--official", official, json.dumps(answers, ensure_ascii=False, indent=0) + "\n")
    named = {**(members or {}), ("ensemble" if members else "scores"): predictions}
    width = max(map(len, named))
    for name, one in named.items():
        if one.scores:
            scores = "  ".join(f"{metric} {value:.4f}" for metric, value in one.scores.items())
            print(f"{name:{width}}  {scores}", file=sys.stderr)


def _write(option: str, path: Path, text: str) -> None:
    try:
        temporary = path.with_name(f".{path.name}.new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as e:
        raise UserError(f"{option} {path} can't be written: {e.strerror}") from e
