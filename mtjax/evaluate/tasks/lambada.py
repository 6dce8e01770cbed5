"""LAMBADA: accuracy of predicting the last word of a passage (section 5.3 and appendix E of the paper).

Strict, as in the paper: all tokens of the last word must be the most likely ones. Lenient: only the last token of the
passage is scored. In both, the passage is encoded in one piece, because some tokenizers encode a separate word
differently from the same word within a text.
"""

from pathlib import Path

import numpy as np

from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.errors import UserError
from mtjax.evaluate.rows import RowScores, ScoredRow
from mtjax.evaluate.tasks.task import (
    EvaluationTask,
    NamedTokenizer,
    Results,
    RowSettings,
    TaskKind,
    begins_with,
    perplexity_of,
)
from mtjax.evaluate.tasks.text_file import json_lines


def open_lambada(path: Path, named: NamedTokenizer, settings: RowSettings) -> EvaluationTask:
    """Reads the dataset's JSON lines, with a `text` in each.

    Raises:
      UserError: a line has no text, or a text has fewer than two words.
    """
    tokenizer, strict, lenient, cut = named.tokenizer, [], [], 0
    front = added_tokens(tokenizer).front
    for number, text in json_lines(path, "text"):
        words = text.split()
        if len(words) < 2:
            raise UserError(f"{path}, line {number} has {len(words)} words, but must have at least two")
        passage = text.strip()
        ids = tokenizer.encode(passage)
        # Tokens after the common prefix with the context belong to the last word.
        # rindex: the last word may also occur before. rstrip: the space belongs to the token of the last word.
        last = len(ids) - _shared(tokenizer.encode(passage[: passage.rindex(words[-1])].rstrip()), ids)
        if not 0 < last < settings.length:
            raise UserError(
                f"{path}, line {number}: the last word has {last} tokens, but must have from 1 to {settings.length - 1}"
            )
        ids = front + ids
        cut += len(ids) > settings.length + 1
        strict.append(_row(ids, last, settings.length))
        lenient.append(_row(ids, 1, settings.length))
    if not strict:
        raise UserError(f"{path} contains no passages: name the file of LAMBADA's JSON lines")

    def results(scores: RowScores) -> Results:
        words, tokens = scores[: len(strict)], scores[len(strict) :]
        return {
            "accuracy": float(words.all_best.mean()),
            "accuracy_lenient": float(tokens.all_best.mean()),
            "perplexity": perplexity_of(-float(words.log_probability.mean())),
            "passages": len(strict),
        }

    notes = begins_with("each passage", tokenizer, front)
    if cut:
        notes.append(f"{cut} passages are longer than {settings.length} tokens: their beginnings are truncated")
    # Two rows for each passage: `all_best` is about all scored tokens of a row.
    return EvaluationTask([*strict, *lenient], results, "; ".join(notes))


def _shared(context: list[int], ids: list[int]) -> int:
    """Returns the length of the common prefix of a passage's ids and its context's."""
    return next((i for i, (a, b) in enumerate(zip(context, ids, strict=False)) if a != b), min(len(context), len(ids)))


def _row(ids: list[int], counted: int, length: int) -> ScoredRow:
    """Returns a row of the last ids that scores the last `counted` of them."""
    last_ids = ids[-length - 1 :]
    return ScoredRow(np.asarray(last_ids, np.int32), len(last_ids) - counted)


MEASURES = {"accuracy": True, "accuracy_lenient": True, "perplexity": False}
LAMBADA = TaskKind("lambada", MEASURES, open_lambada)
