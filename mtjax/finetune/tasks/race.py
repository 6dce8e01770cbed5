"""RACE (arXiv 1704.04683): multiple-choice questions on articles, from examinations in middle and high schools.

The dataset's folder contains `train`, `dev` and `test`, each with `middle` and `high`, with files `*.txt`; a file is a
JSON object {article, questions, options, answers}. A question's four choices are four rows of a batch: the question
with the answer in its blank, or appended to it, and the article.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mtjax.config import Config
from mtjax.data.json_lines import read_lines, surrogate_in
from mtjax.errors import UserError
from mtjax.finetune.metrics import accuracy
from mtjax.finetune.rows import Example, Examples
from mtjax.finetune.samples import Ids, RowEncoder
from mtjax.finetune.tasks.labelled import EncodedRows, check_own_fields, numbered
from mtjax.finetune.tasks.task import HeldOut, Scores

CHOICES = ("A", "B", "C", "D")
# As in Megatron-LM's RACE data.
MOST_TOKENS = 128
"""Most tokens of a question with an answer."""
BLANK = "_"
LEVELS = ("middle", "high")


@dataclass(frozen=True)
class Race:
    """RACE as a `Task`."""

    name: str = "race"
    head: Literal["choices"] = "choices"
    goal: str = "accuracy"
    labels: tuple[str, ...] | None = CHOICES
    held_out: tuple[HeldOut, ...] = (HeldOut("", ("dev", "valid", "validation")),)
    train: tuple[str, ...] = ("train",)
    endings: tuple[str, ...] = ("", ".jsonl", ".json", ".txt")
    when_long: str = "their articles are truncated"

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """Reads the questions of all files in a folder, or of one file.

        Texts of an example are the question with each answer, and the article.

        Raises:
          UserError: there are none, or most are invalid.
        """
        check_own_fields(self.name, self.labels, config)
        examples = Examples(path, unit="questions")
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} contains no *.txt, as RACE's folders do: is it the folder of another task?")
        for file in files:
            _read(file, file.relative_to(path).as_posix() if path.is_dir() else "", examples, labelled)
        return examples.check()

    def labels_of(self, config: Config, examples: Sequence[Example]) -> tuple[str, ...] | None:
        """Returns the four choices."""
        return CHOICES

    def encoded(self, examples: Sequence[Example], encoder: RowEncoder, config: Config, which: str = "") -> "Choices":
        """Encodes each example as four rows."""
        return Choices(accuracy, *numbered(examples, CHOICES, which), encoder)


RACE = Race()


def _read(file: Path, name: str, examples: Examples, labelled: bool) -> None:
    """Adds a file's valid questions and reasons for skipped ones to `examples`; each line is a JSON object."""
    for number, line in enumerate(read_lines(file), start=1):
        source = f"{name} " if name else f"line {number} "
        if not line.strip():
            continue
        try:
            article = json.loads(line)
        except (ValueError, RecursionError):
            examples.bad.append(f"{source}is not JSON")
            continue
        if wrong := _wrong_article(article):
            examples.bad.append(f"{source}{wrong}")
            continue
        level = next((level for level in LEVELS if str(article.get("id", name)).startswith(level) or level in name), "")
        title = name or str(article.get("id", f"line {number}"))
        for question, example in enumerate(_questions(article, labelled), start=1):
            if isinstance(example, str):
                examples.bad.append(f"{source}question {question} {example}")
                continue
            texts, answer = example
            examples.rows.append(Example(texts, answer, number, f"{title}#{question}", level))


def _wrong_article(article: Any) -> str:
    """Returns what is wrong with an article's object; "" if it has questions and options."""
    if not isinstance(article, dict):
        return "is not a JSON object"
    if half := surrogate_in(article):
        return f"has {half}"
    if not isinstance(article.get("article"), str) or not article["article"].strip():
        return "has no article"
    lists = [article.get(name) for name in ("questions", "options")]
    if not all(isinstance(one, list) for one in lists):
        return "has no lists of questions and options"
    if len({len(one) for one in lists if one is not None}) > 1:
        return f"has {len(article['questions'])} questions, but options for {len(article['options'])}"
    return ""


def _questions(article: dict[str, Any], labelled: bool) -> Iterator[tuple[tuple[str, ...], str | None] | str]:
    """Yields each question's texts and answer, or what is wrong with it."""
    answers = article.get("answers")
    answers = answers if isinstance(answers, list) else []
    for number, (question, options) in enumerate(zip(article["questions"], article["options"], strict=True)):
        answer = answers[number] if number < len(answers) else None
        is_list = isinstance(options, list) and all(isinstance(o, str) and o.strip() for o in options)
        if not isinstance(question, str) or not question.strip():
            yield "is empty"
        elif not is_list or len(options) != len(CHOICES):
            yield f"does not have {len(CHOICES)} options"
        elif (labelled or answer is not None) and answer not in CHOICES:
            yield "has no answer" if answer is None else f"has the answer {answer!r}, not A, B, C or D"
        else:
            yield (*(filled(question, option) for option in options), article["article"]), answer


def filled(question: str, option: str) -> str:
    """Returns a question with an answer in its blank, or appended to it."""
    # As in Megatron-LM.
    return question.replace(BLANK, option) if BLANK in question else f"{question} {option}"


class Choices(EncodedRows):
    """Encoded questions with a row for each of their choices."""

    def _ids(self, encoder: RowEncoder) -> list[Ids]:
        texts = encoder.encode([example.texts for example in self.examples])
        # Four adjacent rows: the head's loss is over them together.
        return [(choice[:MOST_TOKENS], article) for *choices, article in texts for choice in choices]

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """Reshapes outputs to [questions, choices]."""
        return outputs.reshape(-1, len(CHOICES))

    def scores(self, values: np.ndarray) -> Scores:
        """Returns accuracy, also of middle and high school questions separately."""
        scores = dict(super().scores(values))
        if scores:
            indices, numbers = self._known
            levels = np.array([self.examples[index].part for index in indices])
            subsets = [(level, levels == level) for level in LEVELS]
            scores |= {
                f"accuracy_{n}": accuracy(values[indices][i], numbers[i])["accuracy"] for n, i in subsets if i.any()
            }
        return scores
