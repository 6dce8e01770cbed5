"""SQuAD 1.1 (arXiv 1606.05250) and 2.0 (arXiv 1806.03822): answers that stand in a passage, or not.

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
from mtjax.finetune.samples import Encoder
from mtjax.finetune.tasks.task import HeldOut
from mtjax.finetune.tasks.windows import Windows


@dataclass(frozen=True)
class Question:
    """A question on a passage.

    Attributes:
      id: of the file.
      question: its text.
      context: the passage.
      answers: texts that are right, and the characters with which they begin; empty where there is no answer; None
        where it is not known.
    """

    id: str
    question: str
    context: str = field(repr=False)
    answers: tuple[tuple[str, int], ...] | None


@dataclass(frozen=True)
class Squad:
    """A `Task`."""

    name: str
    version: str
    """Of the official files."""
    has_unanswerable: bool
    head: Literal["spans"] = "spans"
    goal: str = "f1"
    labels: None = None
    endings: tuple[str, ...] = (".json",)
    when_long: str = "are read in several windows, --doc-stride tokens apart"

    @property
    def train(self) -> tuple[str, ...]:
        """As it is called officially, or plainly."""
        return (f"train-v{self.version}", "train")

    @property
    def held_out(self) -> tuple[HeldOut, ...]:
        """As it is called officially, or plainly."""
        return (HeldOut("", (f"dev-v{self.version}", "dev", "valid", "validation")),)

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """The questions of a file.

        Raises:
          UserError: it is not such a file, or most of its questions are bad.
        """
        if config.finetuning.text_fields or config.finetuning.label_field or config.finetuning.labels:
            raise UserError(f"the fields of {self.name} are known, and it has no labels")
        try:
            data = json.loads(read_text(path))
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path} is not one JSON object, as SQuAD's files are: is it another task's file?") from e
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise UserError(f"{path} has no list \"data\", as SQuAD's files have: is it another task's file?")
        examples, reads = Examples(path, unit="questions"), _Reading(labelled)
        for number, found in enumerate(reads.questions(data["data"]), start=1):
            if isinstance(found, str):
                examples.bad.append(f"question {number} {found}")
            else:
                examples.rows.append(found)
        if reads.impossible and not self.has_unanswerable:
            raise UserError(
                f"{path} has {reads.impossible:,} questions that are impossible to answer, as SQuAD 2.0 has: use "
                "--task squad2"
            )
        return examples.check()

    def labels_of(self, config: Config, examples: Sequence[Question]) -> None:
        """None."""

    def encoded(self, examples: Sequence[Question], encoder: Encoder, config: Config, which: str = "") -> Windows:
        """Windows on the passages.

        Raises:
          UserError: the tokenizer has no character offsets.
        """
        tokenizer = encoder.tokenizer
        if not isinstance(tokenizer, FastTokenizer):
            raise UserError(
                f"{self.name} needs a tokenizer with character offsets (a tokenizer.json, or BERT's vocab.txt), and "
                f"{config.data.tokenizer or 'this one'} has none"
            )
        return Windows(examples, tokenizer, encoder.format, config.finetuning, self.has_unanswerable)


SQUAD1 = Squad("squad1", "1.1", has_unanswerable=False)
SQUAD2 = Squad("squad2", "2.0", has_unanswerable=True)


@dataclass
class _Reading:
    """Reads questions; `impossible` counts those that are said to have no answer."""

    labelled: bool
    impossible: int = 0

    def questions(self, data: Sequence[Any]) -> Iterator[Question | str]:
        """Of each question itself, or what is wrong with it."""
        for entry in data:
            for paragraph in _list(entry, "paragraphs"):
                context = paragraph.get("context") if isinstance(paragraph, dict) else None
                for asked in _list(paragraph, "qas"):
                    yield self._question(asked, context)

    def _question(self, asked: Any, context: Any) -> Question | str:
        if not isinstance(asked, dict):
            return "is not a JSON object"
        name, question, answers = asked.get("id"), asked.get("question"), asked.get("answers")
        if half := surrogate_in([asked, {"context": context}]):
            return f"has {half}"
        if not isinstance(name, str) or not name:
            return "has no id"
        if not isinstance(question, str) or not question.strip():
            return f"({name}) is empty"
        if not isinstance(context, str) or not context.strip():
            return f"({name}) has no passage"
        if asked.get("is_impossible"):
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
    """What is wrong with an answer; nothing where it stands where it says."""
    text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
    if not isinstance(text, str) or not text.strip():
        return "has an empty answer"
    if type(start) is not int or start < 0:
        return f"has an answer that begins at {start!r}"
    there = context[start : start + len(text)]
    return "" if there == text else f"has the answer {text!r}, and {there!r} stands at {start}"
