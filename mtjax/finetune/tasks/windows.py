"""Question answering with sliding windows over passages: an `Encoded` whose answers are spans."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mtjax.config import Finetuning
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.errors import UserError
from mtjax.finetune.metrics import Scores, mean_loss, softmax
from mtjax.finetune.samples import Ids, LazyRows, RowFormat, Samples
from mtjax.finetune.squad_metrics import exact_match, normalized, text_f1

if TYPE_CHECKING:
    from mtjax.finetune.tasks.squad import Question

MOST_QUESTION = 64
"""Most tokens of a question, as in BERT's run_squad.py."""


class Window(NamedTuple):
    """A row with question number `question`, and tokens `begin` to `end` of its passage."""

    question: int
    begin: int
    end: int


class AnswerSpan(NamedTuple):
    """An answer: its text, the sum of its start and end logits, and its characters from `start` to `end`."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class _WindowIds(Sequence[Ids]):
    """Token ids of each window's question and passage; views of the passage's array."""

    windows: list[Window]
    questions: list[np.ndarray]
    contexts: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Ids:  # pyright: ignore[reportIncompatibleMethodOverride]
        number, begin, end = self.windows[index]
        return self.questions[number], self.contexts[number][begin:end]


class Windows:
    """Encoded questions, with windows over their passages once the length of a row is known.

    Args:
      examples: the questions.
      tokenizer: a tokenizer with character offsets.
      row_format: the layout of question and passage in a row.
      options: stride of the windows, and limits of answers.
      has_unanswerable: whether a question may have no answer.
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
        # Several questions share a passage, which is encoded once.
        ids = tokenizer.encode_batch([example.question for example in examples])
        self.questions = [np.array(i[:MOST_QUESTION], np.int32) for i in ids]
        texts = list(dict.fromkeys(example.context for example in examples))
        found = zip(texts, tokenizer.encode_places(texts), strict=True)
        # reshape: a passage without tokens would be an array without a second dimension.
        passages = {t: (np.array(i, np.int32), np.array(p, np.int32).reshape(-1, 2)) for t, (i, p) in found}
        self.contexts = [passages[example.context][0] for example in examples]
        self.characters = [passages[example.context][1] for example in examples]
        self.windows: list[Window] = []
        self.starts: list[int] = []

    @property
    def lengths(self) -> Sequence[int]:
        """Lengths of rows with the entire passage."""
        return [self.format.length(ids) for ids in zip(self.questions, self.contexts, strict=True)]

    def samples(self, length: int) -> Samples:
        """Returns a row for each window; windows start every `doc_stride` tokens or less.

        Raises:
          UserError: `length` has no space for a passage after a question.
        """
        self.windows = [window for number in range(len(self.examples)) for window in self._windows_of(number, length)]
        # [CLS], the question, and the separators after it.
        self.starts = [1 + len(self.questions[number]) + self.format.between for number, _, _ in self.windows]
        rows = LazyRows(_WindowIds(self.windows, self.questions, self.contexts), self.format, length)
        pairs = zip(self.windows, self.starts, strict=True)
        labels = [self._label(window, start) for window, start in pairs]
        weights = np.ones(len(rows), np.float32)
        return Samples(rows, np.array(labels, np.int32).reshape(-1, 2), weights, length, self.format.pad)

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """Returns the outputs [windows, length, 2] unchanged."""
        return outputs

    def comparable(self, values: np.ndarray) -> np.ndarray:
        """Returns the logits, which an ensemble averages."""
        return values

    def loss(self, values: np.ndarray) -> float:
        """Returns the mean cross-entropy of the first and last tokens of answers, over windows."""
        pairs = zip(self.windows, self.starts, strict=True)
        labels = np.array([self._label(window, start) for window, start in pairs])
        return float(np.mean([mean_loss(values[:, :, end], labels[:, end]) for end in (0, 1)]))

    def scores(self, values: np.ndarray) -> Scores:
        """Returns the official exact match and F1, also separately for questions with and without an answer."""
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
        """Returns for each question its id, the answer, and the n best with scores and probabilities."""
        rows: list[list[int]] = [[] for _ in self.examples]
        for row, window in enumerate(self.windows):
            rows[window.question].append(row)
        return [self._answer(number, values, rows[number]) for number in range(len(self.examples))]

    def _answer(self, number: int, values: np.ndarray, rows: list[int]) -> dict[str, Any]:
        """Returns the JSON answer of a question from the logits of its windows, which are `rows` of `values`."""
        spans = [span for row in rows for span in self._spans(values[row].astype(np.float64), row)]
        best: dict[str, AnswerSpan] = {}
        # Overlapping windows find the same text several times: keep its best score.
        for span in sorted(spans, key=lambda span: -span.score):
            best.setdefault(span.text, span)
        n_best = list(best.values())[: self.options.n_best]
        line: dict[str, Any] = {"id": self.examples[number].id, "text": n_best[0].text if n_best else ""}
        scores = [span.score for span in n_best]
        if self.has_unanswerable:
            # [CLS] is the span of "no answer"; as in run_squad.py, the lowest score over windows.
            null = min(float(values[row][0].astype(np.float64).sum()) for row in rows)
            is_null = not n_best or null - n_best[0].score > self.options.null_threshold
            line |= {"text": ""} if is_null else {}
            line["null_score"] = null
            scores.append(null)
        probabilities = softmax(np.array(scores)).tolist() if scores else []
        line["n_best"] = [
            {"text": s.text, "score": s.score, "probability": p, "start": s.start, "end": s.end}
            for s, p in zip(n_best, probabilities, strict=False)
        ]
        return line

    def _spans(self, logits: np.ndarray, row: int) -> list[AnswerSpan]:
        """Returns the best answers in a window, from its best start and end tokens."""
        window, offset, options = self.windows[row], self.starts[row], self.options
        count = window.end - window.begin
        context, characters = self.examples[window.question].context, self.characters[window.question]
        inside = logits[offset : offset + count]
        # Only tokens of the passage: an answer can't begin in the question.
        first, last = (np.argsort(-inside[:, end], kind="stable")[: options.n_best] for end in (0, 1))
        spans = []
        for start in first.tolist():
            for end in last.tolist():
                if start <= end < start + options.max_answer_length:
                    begin = int(characters[window.begin + start][0])
                    stop = int(characters[window.begin + end][1])
                    spans.append(AnswerSpan(context[begin:stop], float(inside[start, 0] + inside[end, 1]), begin, stop))
        return spans

    def _windows_of(self, number: int, length: int) -> list[Window]:
        """Returns the windows over a question's passage, in rows of `length` tokens.

        Raises:
          UserError: `length` has no space for a passage.
        """
        question, tokens = len(self.questions[number]), len(self.contexts[number])
        added = 2 + self.format.between  # [CLS] question [SEP] passage [SEP]
        size = length - question - added
        if size < 1:
            raise UserError(
                f"sequence_length {length} is too short for the {question} tokens of question "
                f"{self.examples[number].id} and its passage: use {question + added + 1} or more"
            )
        # A longer stride than a window would leave tokens in no window.
        step, windows, begin = min(self.options.doc_stride, size), [], 0
        while True:
            windows.append(Window(number, begin, min(begin + size, tokens)))
            if begin + size >= tokens:
                return windows
            begin += step

    def _label(self, window: Window, offset: int) -> tuple[int, int]:
        """Returns the positions of the answer's first and last token in a row; of `[CLS]` if one is outside."""
        first, last = self._answer_tokens[window.question]
        # As in BERT's run_squad.py: a window with a part of the answer is trained as one without.
        if first < window.begin or last >= window.end:
            return 0, 0
        return offset + first - window.begin, offset + last - window.begin

    @cached_property
    def _answer_tokens(self) -> list[tuple[int, int]]:
        """First and last token of each question's first answer; -1 if there is none."""
        found = []
        for example, characters in zip(self.examples, self.characters, strict=True):
            if not example.answers:
                found.append((-1, -1))
                continue
            text, start = example.answers[0]
            # Tokens that overlap the answer's characters.
            inside = np.flatnonzero((characters[:, 1] > start) & (characters[:, 0] < start + len(text)))
            found.append((int(inside[0]), int(inside[-1])) if len(inside) else (-1, -1))
        return found


def _judged(text: str, right: Sequence[str]) -> tuple[float, float]:
    """Returns the best exact match and F1 over the correct answers that have words; without any, "" is correct."""
    # evaluate-v2.0.py drops answers that are articles or punctuation only.
    with_words = [answer for answer in right if normalized(answer)] or [""]
    return max(exact_match(text, answer) for answer in with_words), max(text_f1(text, answer) for answer in with_words)


def _means(found: Sequence[tuple[bool, float, float]], suffix: str) -> dict[str, float]:
    if not found:
        return {}
    exact, f1 = (float(np.mean([entry[i] for entry in found])) for i in (1, 2))
    return {f"exact{suffix}": exact, f"f1{suffix}": f1}
