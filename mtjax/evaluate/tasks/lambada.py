"""LAMBADA: does the model guess the last word of a passage (section 5.3 and appendix E of the paper).

Strict, as the paper counts: all tokens of the last word, after the passage without it, are the most likely ones.
Lenient: the last token of the passage alone counts. In both the passage is encoded at once: a tokenizer that marks the
beginning of a text encodes a word on its own as other tokens than the same word within a text.
"""

from pathlib import Path

import numpy as np

from mtjax.data import Tokenizer
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.errors import UserError
from mtjax.evaluate.rows import Row, Scores
from mtjax.evaluate.tasks.task import Kind, Results, Settings, Task, begins_with, perplexity_of
from mtjax.evaluate.tasks.text_file import json_lines


def open_lambada(path: Path, tokenizer: Tokenizer, settings: Settings) -> Task:
    """The dataset's JSON lines, a `text` in each.

    Raises:
      UserError: a line has no text, or a text has no word before its last.
    """
    strict, lenient, cut = [], [], 0
    front = added_tokens(tokenizer).front
    for number, text in json_lines(path, "text"):
        words = text.split()
        if len(words) < 2:
            raise UserError(f"{path}, line {number} has {len(words)} words, and guessing the last needs one before it")
        passage = text.strip()
        ids = tokenizer.encode(passage)
        last = len(ids) - _shared(tokenizer.encode(passage[: passage.rindex(words[-1])].rstrip()), ids)
        if not 0 < last < settings.length:
            raise UserError(f"{path}, line {number}: the last word has {last} tokens of {settings.length}")
        ids = front + ids
        cut += len(ids) > settings.length + 1
        strict.append(_row(ids, last, settings.length))
        lenient.append(_row(ids, 1, settings.length))
    if not strict:
        raise UserError(f"{path} has no passages: name LAMBADA's JSON lines")

    def results(scores: Scores) -> Results:
        words, tokens = scores[: len(strict)], scores[len(strict) :]
        return {
            "accuracy": float(words.all_best.mean()),
            "accuracy_lenient": float(tokens.all_best.mean()),
            "perplexity": perplexity_of(-float(words.log_probability.mean())),
            "passages": len(strict),
        }

    notes = begins_with("each passage", tokenizer, front)
    if cut:
        notes.append(f"{cut} passages are longer than {settings.length} tokens: their beginnings are left out")
    return Task([*strict, *lenient], results, "; ".join(notes))


def _shared(context: list[int], ids: list[int]) -> int:
    """Counts the first ids that a passage has in common with its context."""
    return next((i for i, (a, b) in enumerate(zip(context, ids, strict=False)) if a != b), min(len(context), len(ids)))


def _row(ids: list[int], counted: int, length: int) -> Row:
    kept = ids[-length - 1 :]
    return Row(np.asarray(kept, np.int32), len(kept) - counted)


MEASURES = {"accuracy": True, "accuracy_lenient": True, "perplexity": False}
LAMBADA = Kind("lambada", MEASURES, open_lambada)
