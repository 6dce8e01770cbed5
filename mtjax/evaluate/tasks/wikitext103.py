"""WikiText-103's word-level perplexity from the losses of tokens (section 5.3 and appendix E of the paper).

The dataset is tokenized into words and punctuation, separated by spaces. For a subword tokenizer, the text is
detokenized first; the sum of the losses is then divided by the number of words in the original.
"""

import re
from pathlib import Path

import numpy as np

from mtjax.data.json_lines import read_text
from mtjax.data.tokens.special_tokens import added_tokens
from mtjax.errors import UserError
from mtjax.evaluate.rows import RowScores, rows_of_text, windows
from mtjax.evaluate.tasks.task import (
    EvaluationTask,
    NamedTokenizer,
    Results,
    RowSettings,
    TaskKind,
    begins_with,
    perplexity_of,
)
from mtjax.evaluate.tasks.text_file import check_no_table

SPACED = {
    "s '": "s'",
    " @-@ ": "-",
    " @,@ ": ",",
    " @.@ ": ".",
    " : ": ": ",
    " ; ": "; ",
    " . ": ". ",
    " ! ": "! ",
    " ? ": "? ",
    " , ": ", ",
}
"""Replacements of Megatron's detokenizer, in its order."""
ENCLOSED = ("()", "[]", "{}", '""', "''")
"""Brackets and quotes, inside which spaces are removed."""
FURTHER_REPLACEMENTS = {
    "= = = =": "====",
    "= = =": "===",
    "= =": "==",
    " \N{DEGREE SIGN} ": "\N{DEGREE SIGN}",
    " \n": "\n",
    "\n ": "\n",
    " N ": " 1 ",
    " 's": "'s",
}


def detokenized(text: str) -> str:
    """Detokenizes the dataset's text, with Megatron's rules."""
    for tokenized, original in SPACED.items():
        text = text.replace(tokenized, original)
    for opening, closing in ENCLOSED:
        inside = rf"{re.escape(opening)}\s*([^{re.escape(closing)}]*?)\s*{re.escape(closing)}"
        text = re.sub(inside, rf"{opening}\1{closing}", text)
    for tokenized, original in FURTHER_REPLACEMENTS.items():
        text = text.replace(tokenized, original)
    return text


def open_wikitext(path: Path, named: NamedTokenizer, settings: RowSettings) -> EvaluationTask:
    """Reads the dataset's file of validation or test tokens.

    Raises:
      UserError: it can't be read, is a table, or has fewer than two tokens.
    """
    tokenizer = named.tokenizer
    check_no_table(path, "text: name WikiText-103's wiki.test.tokens")
    raw = read_text(path)
    # Megatron's count, which splits at single spaces only: line breaks do not separate words there.
    words = len(raw.strip().split(" "))
    front, text = added_tokens(tokenizer).front, tokenizer.encode(detokenized(raw))
    if len(text) < 2 or words < 2:
        raise UserError(
            f"{path} has {len(text)} tokens, but must have at least 2: name WikiText-103's wiki.test.tokens"
        )
    ids = np.asarray([*front, *text], np.int32)
    # The paper's protocol predicts T - 1 tokens: not the first of the text, whatever the tokenizer prepends.
    rows = rows_of_text(ids, settings.length, settings.overlap, len(front) + 1)
    in_megatron = sum(1 for _ in windows(len(ids), settings.length, settings.overlap))

    def results(scores: RowScores) -> Results:
        loss = -float(scores.log_probability.sum())
        # As in Megatron, T - 1 tokens and O - 1 words: the first of the text is predicted in neither count.
        return {
            "perplexity": perplexity_of(loss / (words - 1)),
            "token_perplexity": perplexity_of(loss / (len(text) - 1)),
            "loss": loss / (len(text) - 1),
            "words (O)": words,
            "tokens (T)": len(text),
            "windows": in_megatron,
        }

    notes = begins_with("the text", tokenizer, front)
    if " @-@ " not in raw and " @,@ " not in raw:
        notes.append(f"{path} contains no ' @-@ ' or ' @,@ ': is it the original WikiText-103?")
    return EvaluationTask(rows, results, "; ".join(notes))


MEASURES = {"perplexity": False, "token_perplexity": False, "loss": False}
WIKITEXT103 = TaskKind("wikitext103", MEASURES, open_wikitext)
