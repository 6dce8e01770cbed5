"""Output of predictions: answers as JSON lines, and scores as a table."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from mtjax.errors import UserError
from mtjax.finetune.predictions import Predictions
from mtjax.storage import write_whole


def report(
    predictions: Predictions,
    out: Path | None,
    official: Path | None = None,
    members: Mapping[str, Predictions] | None = None,
) -> None:
    """Writes the answers to a file, or prints them; prints scores to stderr, those of an ensemble's members first.

    Args:
      predictions: the answers.
      out: file of JSON lines; None prints them.
      official: additional file in SQuAD's official format, a JSON object from ids to answers.
      members: predictions of an ensemble's members, by name.

    Raises:
      UserError: a file can't be written, or the answers are not SQuAD's.
    """
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions.lines)
    if predictions.note:
        print(f"note    {predictions.note}", file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        write_whole("--out", out, text)
        print(f"{len(predictions.lines):,} answers written to {out}", file=sys.stderr)
    if official is not None:
        answers = {line["id"]: line["text"] for line in predictions.lines if "text" in line}
        if not answers:
            raise UserError(f"--official {official} requires a model that was finetuned on SQuAD: remove it")
        write_whole("--official", official, json.dumps(answers, ensure_ascii=False, indent=0) + "\n")
    by_name = {**(members or {}), ("ensemble" if members else "scores"): predictions}
    width = max(map(len, by_name))
    for name, member in by_name.items():
        if member.scores:
            scores = "  ".join(f"{metric} {value:.4f}" for metric, value in member.scores.items())
            print(f"{name:{width}}  {scores}", file=sys.stderr)
