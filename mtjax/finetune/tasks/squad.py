"""SQuAD 1.1 (arXiv 1606.05250) and 2.0 (arXiv 1806.03822): answers are spans of a passage; in 2.0 there may be none.

The official files are one JSON object {version, data: [{title, paragraphs: [{context, qas: [{id, question, answers:
[{text, answer_start}], is_impossible}]}]}]}.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtjax.config import Config
from mtjax.data.json_lines import read_text, surrogate_in
from mtjax.data.tokens.tokenizer import FastTokenizer
from mtjax.errors import UserError
from mtjax.finetune.rows import Examples
from mtjax.finetune.samples import RowEncoder
from mtjax.finetune.tasks.task import HeldOut
from mtjax.finetune.tasks.windows import Windows


@dataclass(frozen=True)
class Question:
    """A question on a passage.

    Attributes:
      id: its id in the file.
      question: its text.
      context: the passage.
      answers: correct answers, each with the index of its first character in the passage; empty if the question has no
        answer; None if unknown.
    """

    id: str
    question: str
    context: str = field(repr=False)
    answers: tuple[tuple[str, int], ...] | None


@dataclass(frozen=True)
class Squad:
    """SQuAD as a `Task`."""

    name: str
    version: str
    """Version in the names of the official files."""
    has_unanswerable: bool
    head: Literal["spans"] = "spans"
    goal: str = "f1"
    labels: None = None
    endings: tuple[str, ...] = (".json",)
    when_long: str = "they are read in several windows, --doc-stride tokens apart"

    @property
    def train(self) -> tuple[str, ...]:
        """The official file name, and a generic one."""
        return (f"train-v{self.version}", "train")

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """The official file name, and a generic one."""
        return (HeldOut("", (f"dev-v{self.version}", "dev", "valid", "validation")),)

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """Reads the questions of a file.

        Raises:
          UserError: it is not a file of SQuAD, or most of its questions are invalid.
        """
        if config.finetuning.text_fields or config.finetuning.label_field or config.finetuning.labels:
            raise UserError(
                f"--text-fields, --label-field and --labels have no effect on --task {self.name}: remove them"
            )
        try:
            data = json.loads(read_text(path))
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path} is not one JSON object, as in SQuAD: is it the file of another task?") from e
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise UserError(f'{path} has no list "data", as in SQuAD: is it the file of another task?')
        examples, reads = Examples(path, unit="questions"), _Reading(labelled)
        for number, found in enumerate(reads.questions(data["data"]), start=1):
            if isinstance(found, str):
                examples.bad.append(f"question {number} {found}")
            else:
                examples.rows.append(found)
        # Their right answer would be "", which a model of SQuAD 1.1 can't give.
        if reads.impossible and not self.has_unanswerable:
            raise UserError(
                f"{path} has {reads.impossible:,} questions with is_impossible, as in SQuAD 2.0: use --task squad2"
            )
        return examples.check()

    def labels_of(self, config: Config, examples: Sequence[Question]) -> None:
        """Returns None: answers are spans."""

    def encoded(self, examples: Sequence[Question], encoder: RowEncoder, config: Config, which: str = "") -> Windows:
        """Encodes questions, and windows of their passages.

        Raises:
          UserError: the tokenizer has no character offsets.
        """
        tokenizer = encoder.tokenizer
        # Answers are characters of the passage; only these tokenizers say which ones a token stands for.
        if not isinstance(tokenizer, FastTokenizer):
            raise UserError(
                f"--task {self.name} requires a tokenizer with character offsets (tokenizer.json, or BERT's vocab.txt)"
                f", but {config.data.tokenizer or 'this one'} has none"
            )
        return Windows(examples, tokenizer, encoder.format, config.finetuning, self.has_unanswerable)


SQUAD1 = Squad("squad1", "1.1", has_unanswerable=False)
SQUAD2 = Squad("squad2", "2.0", has_unanswerable=True)


@dataclass
class _Reading:
    """Parses questions; `impossible` counts those with is_impossible."""

    labelled: bool
    impossible: int = 0

    def questions(self, data: Sequence[Any]) -> Iterator[Question | str]:
        """Yields each question, or what is wrong with it."""
        for article in data:
            for paragraph in _list(article, "paragraphs"):
                context = paragraph.get("context") if isinstance(paragraph, dict) else None
                for entry in _list(paragraph, "qas"):
                    yield self._question(entry, context)

    def _question(self, entry: Any, context: Any) -> Question | str:
        """Parses a question; returns what is wrong if it is invalid."""
        if not isinstance(entry, dict):
            return "is not a JSON object"
        name, question, answers = entry.get("id"), entry.get("question"), entry.get("answers")
        if half := surrogate_in([entry, {"context": context}]):
            return f"has {half}"
        if not isinstance(name, str) or not name:
            return "has no id"
        if not isinstance(question, str) or not question.strip():
            return f"({name}) is empty"
        if not isinstance(context, str) or not context.strip():
            return f"({name}) has no passage"
        # Its answers, if any, are "plausible" ones, which are wrong.
        if entry.get("is_impossible"):
            self.impossible += 1
            return Question(name, question, context, ())
        if answers is None and not self.labelled:
            return Question(name, question, context, None)
        if not isinstance(answers, list) or not answers:
            return f"({name}) has no answer"
        wrong = next(filter(None, (_wrong(answer, context) for answer in answers)), "")
        if wrong:
            return f"({name}) {wrong}"
        return Question(name, question, context, tuple((a["text"], a["answer_start"]) for a in answers))


def _list(of: Any, name: str) -> list[Any]:
    found = of.get(name) if isinstance(of, dict) else None
    return found if isinstance(found, list) else []


def _wrong(answer: Any, context: str) -> str:
    """Returns what is wrong with an answer; "" if the passage contains it at its answer_start."""
    text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
    if not isinstance(text, str) or not text.strip():
        return "has an empty answer"
    if type(start) is not int or start < 0:
        return f"has an answer with answer_start {start!r}"
    found = context[start : start + len(text)]
    return "" if found == text else f"has the answer {text!r}, but its passage has {found!r} at answer_start {start}"
