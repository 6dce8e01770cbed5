"""LAMBADA: does the model guess the last word of a passage (section 5.3 and appendix E of the paper).

Strict, as the paper counts: all tokens of the last word, after the passage without it, are the most likely ones.
Lenient: the passage is tokenized as a whole, and its last token alone counts.
"""

from pathlib import Path

import numpy as np

from mtjax.data import Tokenizer
from mtjax.errors import UserError
from mtjax.evaluate.rows import Row, Scores
from mtjax.evaluate.tasks.task import Kind, Results, Settings, Task, perplexity_of
from mtjax.evaluate.tasks.text_file import json_lines


def open_lambada(path: Path, tokenizer: Tokenizer, settings: Settings) -> Task:
    """The dataset's JSON lines, a `text` in each.

    Raises:
      UserError: a line has no text, or a text has no word before its last.
    """
    strict, lenient, cut = [], [], 0
    for number, text in json_lines(path, "text"):
        words = text.split()
        if len(words) < 2:
            raise UserError(f"{path}, line {number} has {len(words)} words, and guessing the last needs one before it")
        before = tokenizer.encode(text[: text.rindex(words[-1])].strip())
        last, whole = tokenizer.encode(f" {words[-1]}"), tokenizer.encode(text)
        if len(last) >= settings.length:
            raise UserError(f"{path}, line {number}: the last word has {len(last)} tokens of {settings.length}")
        cut += len(before) + len(last) > settings.length + 1
        strict.append(_row(before + last, len(last), settings.length))
        lenient.append(_row(whole, 1, settings.length))
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

    note = f"{cut} passages are longer than {settings.length} tokens: their beginnings are left out" if cut else ""
    return Task([*strict, *lenient], results, note)


def _row(ids: list[int], counted: int, length: int) -> Row:
    kept = ids[-length - 1 :]
    return Row(np.asarray(kept, np.int32), len(kept) - counted)


MEASURES = {"accuracy": True, "accuracy_lenient": True, "perplexity": False}
LAMBADA = Kind("lambada", MEASURES, open_lambada)
