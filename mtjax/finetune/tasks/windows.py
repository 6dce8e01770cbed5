"""Questions with windows on their passages, the logits of whose tokens become answers: an `Encoded` of spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mtjax.config import Finetuning
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.errors import UserError
from mtjax.finetune.metrics import Scores, mean_loss, softmax
from mtjax.finetune.samples import Ids, Joined, RowFormat, Samples
from mtjax.finetune.squad_metrics import exact_match, normalised, text_f1

if TYPE_CHECKING:
    from mtjax.finetune.tasks.squad import Question

MOST_QUESTION = 64
"""Tokens of a question that are read, as BERT's own script has it."""


class Window(NamedTuple):
    """Tokens of a passage from `begin` to `end` that stand in a row, behind the question `question`."""

    question: int
    begin: int
    end: int


class Span(NamedTuple):
    """An answer: its text, the sum of its two logits, and the characters from which to which it stands."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class _WindowIds(Sequence[Ids]):
    """Of each window its question's tokens and its own, which share their passage's memory."""

    windows: list[Window]
    questions: list[np.ndarray]
    contexts: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Ids:  # pyright: ignore[reportIncompatibleMethodOverride]
        number, begin, end = self.windows[index]
        return self.questions[number], self.contexts[number][begin:end]


class Windows:
    """Questions in tokens, and windows on their passages as soon as the length of a row is known.

    Args:
      examples: the questions.
      tokenizer: says where its tokens stand.
      row_format: how question and passage stand in a row.
      options: how windows follow each other, and which answers count.
      has_unanswerable: whether there may be no answer.
    """

    note = ""

    def __init__(
        self,
        examples: Sequence["Question"],
        tokenizer: FastTokenizer,
        row_format: RowFormat,
        options: Finetuning,
        has_unanswerable: bool,
    ) -> None:
        self.examples, self.format, self.options = examples, row_format, options
        self.has_unanswerable = has_unanswerable
        ids = tokenizer.encode_batch([example.question for example in examples])
        self.questions = [np.array(i[:MOST_QUESTION], np.int32) for i in ids]
        texts = list(dict.fromkeys(example.context for example in examples))
        found = zip(texts, tokenizer.encode_places(texts), strict=True)
        passages = {t: (np.array(i, np.int32), np.array(p, np.int32).reshape(-1, 2)) for t, (i, p) in found}
        self.contexts = [passages[example.context][0] for example in examples]
        self.places = [passages[example.context][1] for example in examples]
        self.windows: list[Window] = []
        self.starts: list[int] = []

    @property
    def lengths(self) -> Sequence[int]:
        """Of rows with the entire passage."""
        return [self.format.length(ids) for ids in zip(self.questions, self.contexts, strict=True)]

    def samples(self, length: int) -> Samples:
        """A row for each window, `doc_stride` tokens or less behind the one before.

        Raises:
          UserError: a question leaves no room for its passage.
        """
        self.windows = [window for number in range(len(self.examples)) for window in self._windows_of(number, length)]
        self.starts = [1 + len(self.questions[number]) + 1 for number, _, _ in self.windows]
        rows = Joined(_WindowIds(self.windows, self.questions, self.contexts), self.format, length)
        pairs = zip(self.windows, self.starts, strict=True)
        labels = [self._label(window, start) for window, start in pairs]
        weights = np.ones(len(rows), np.float32)
        return Samples(rows, np.array(labels, np.int32).reshape(-1, 2), weights, length, self.format.pad)

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """[windows, length, 2], as they are."""
        return outputs

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Logits, of which an ensemble takes the mean."""
        return values

    def loss(self, values: np.ndarray) -> float:
        """The mean cross-entropy of first and last tokens, over windows."""
        pairs = zip(self.windows, self.starts, strict=True)
        labels = np.array([self._label(window, start) for window, start in pairs])
        return float(np.mean([mean_loss(values[:, :, end], labels[:, end]) for end in (0, 1)]))

    def scores(self, values: np.ndarray) -> Scores:
        """Exact matches and F1 by the official rules, and of questions with and without an answer."""
        known = [(e, line["text"]) for e, line in zip(self.examples, self.lines(values), strict=True)]
        if any(e.answers is None for e, _ in known):
            return {}
        found = [(bool(e.answers), *_judged(text, [t for t, _ in e.answers or ()])) for e, text in known]
        scores = _means(found, "")
        if self.has_unanswerable:
            scores |= _means([one for one in found if one[0]], "_has_answer")
            scores |= _means([one for one in found if not one[0]], "_no_answer")
        return scores

    def lines(self, values: np.ndarray) -> list[dict[str, Any]]:
        """Of each question its id, the answer, and the best ones with their scores and probabilities."""
        rows: list[list[int]] = [[] for _ in self.examples]
        for row, window in enumerate(self.windows):
            rows[window.question].append(row)
        return [self._answer(number, values, rows[number]) for number in range(len(self.examples))]

    def _answer(self, number: int, values: np.ndarray, rows: list[int]) -> dict[str, Any]:
        spans = [span for row in rows for span in self._spans(values[row].astype(np.float64), row)]
        best: dict[str, Span] = {}
        for span in sorted(spans, key=lambda span: -span.score):
            best.setdefault(span.text, span)
        kept = list(best.values())[: self.options.n_best]
        line: dict[str, Any] = {"id": self.examples[number].id, "text": kept[0].text if kept else ""}
        scores = [span.score for span in kept]
        if self.has_unanswerable:
            null = min(float(values[row][0].astype(np.float64).sum()) for row in rows)
            is_null = not kept or null - kept[0].score > self.options.null_threshold
            line |= {"text": ""} if is_null else {}
            line["null_score"] = null
            scores.append(null)
        shares = softmax(np.array(scores)).tolist() if scores else []
        line["n_best"] = [
            {"text": s.text, "score": s.score, "probability": p, "start": s.start, "end": s.end}
            for s, p in zip(kept, shares, strict=False)
        ]
        return line

    def _spans(self, logits: np.ndarray, row: int) -> list[Span]:
        """The best answers of a window, from its best first and last tokens."""
        window, offset, options = self.windows[row], self.starts[row], self.options
        count = window.end - window.begin
        context, places = self.examples[window.question].context, self.places[window.question]
        inside = logits[offset : offset + count]
        first, last = (np.argsort(-inside[:, end], kind="stable")[: options.n_best] for end in (0, 1))
        spans = []
        for start in first.tolist():
            for end in last.tolist():
                if start <= end < start + options.max_answer_length:
                    begin, stop = int(places[window.begin + start][0]), int(places[window.begin + end][1])
                    spans.append(Span(context[begin:stop], float(inside[start, 0] + inside[end, 1]), begin, stop))
        return spans

    def _windows_of(self, number: int, length: int) -> list[Window]:
        question, tokens = len(self.questions[number]), len(self.contexts[number])
        room = length - question - 3
        if room < 1:
            raise UserError(
                f"sequence_length {length} leaves no room for the passage behind the {question} tokens of question "
                f"{self.examples[number].id}: use {question + 4} or more"
            )
        step, windows, begin = min(self.options.doc_stride, room), [], 0
        while True:
            windows.append(Window(number, begin, min(begin + room, tokens)))
            if begin + room >= tokens:
                return windows
            begin += step

    def _label(self, window: Window, offset: int) -> tuple[int, int]:
        """Places of the answer's first and last token in a row; of `[CLS]` where the window does not have both."""
        first, last = self._answer_tokens[window.question]
        if first < window.begin or last >= window.end:
            return 0, 0
        return offset + first - window.begin, offset + last - window.begin

    @cached_property
    def _answer_tokens(self) -> list[tuple[int, int]]:
        """Of each question the tokens in which its first answer begins and ends; -1 where there is none."""
        found = []
        for example, places in zip(self.examples, self.places, strict=True):
            if not example.answers:
                found.append((-1, -1))
                continue
            text, start = example.answers[0]
            inside = np.flatnonzero((places[:, 1] > start) & (places[:, 0] < start + len(text)))
            found.append((int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1))
        return found


def _judged(text: str, right: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1, each with the best of the right answers that have words; without any, no answer is right."""
    worded = [one for one in right if normalised(one)] or [""]
    return max(exact_match(text, one) for one in worded), max(text_f1(text, one) for one in worded)


def _means(found: Sequence[tuple[bool, float, float]], suffix: str) -> dict[str, float]:
    if not found:
        return {}
    exact, f1 = (float(np.mean([one[place] for one in found])) for place in (1, 2))
    return {f"exact{suffix}": exact, f"f1{suffix}": f1}
