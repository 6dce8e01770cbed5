"""Predictions for people and for files: answers as JSON lines, and a table of scores."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from mtjax.errors import UserError
from mtjax.finetune.predictions import Predictions


def check_out(out: Path | None) -> None:
    """Checks that answers can be written to a file, before there are any.

    Raises:
      UserError: it is a folder, or its folder does not exist.
    """
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder: name a file for the answers")
    if out is not None and not out.parent.is_dir():
        raise UserError(f"--out {out} can't be written: {out.parent} does not exist")


def report(predictions: Predictions, out: Path | None, members: Mapping[str, Predictions] | None = None) -> None:
    """Writes the answers to a file, or prints them; scores go to the terminal, those of an ensemble's members first.

    Raises:
      UserError: the file can't be written.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions.lines())
    if predictions.examples.note:
        print(f"note    {predictions.examples.note}", file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        try:
            temporary = out.with_name(f".{out.name}.new")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(out)
        except OSError as e:
            raise UserError(f"--out {out} can't be written: {e.strerror}") from e
        print(f"{len(predictions.values):,} answers written to {out}", file=sys.stderr)
    named = {**(members or {}), ("ensemble" if members else "scores"): predictions}
    width = max(map(len, named))
    for name, one in named.items():
        if one.scores:
            scores = "  ".join(f"{metric} {value:.4f}" for metric, value in one.scores.items())
            print(f"{name:{width}}  {scores}", file=sys.stderr)
