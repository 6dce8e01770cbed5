"""RACE (arXiv 1704.04683): questions on an article with four answers each, of examinations in middle and high schools.

A folder of it has `train`, `dev` and `test`, each with `middle` and `high`, of files `*.txt`; a file is a JSON object
{article, questions, options, answers}. A question's four choices are four rows of a batch: the question with the answer
in its blank, or behind it, and the article.
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
from mtjax.finetune.samples import Encoder, Ids
from mtjax.finetune.tasks.labelled import EncodedRows, check_own_fields, numbered
from mtjax.finetune.tasks.task import HeldOut, Scores

CHOICES = ("A", "B", "C", "D")
MOST_TOKENS = 128
"""Of a question with an answer."""
BLANK = "_"
LEVELS = ("middle", "high")


@dataclass(frozen=True)
class Race:
    """A `Task`."""

    name: str = "race"
    head: Literal["choices"] = "choices"
    goal: str = "accuracy"
    labels: tuple[str, ...] | None = CHOICES
    held_out: tuple[HeldOut, ...] = (HeldOut("", ("dev", "valid", "validation")),)
    train: tuple[str, ...] = ("train",)
    endings: tuple[str, ...] = ("", ".jsonl", ".json", ".txt")
    when_long: str = "their articles are cut"

    def examples(self, path: Path, config: Config, *, labelled: bool = True) -> Examples:
        """The questions of all files in a folder, or of one; texts are the question with each answer, and the article.

        Raises:
          UserError: there are none, or most are bad.
        """
        check_own_fields(self.name, self.labels, config)
        examples = Examples(path, unit="questions")
        files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
        if not files:
            raise UserError(f"{path} has no *.txt, as RACE's folders do: is it another task's folder?")
        for file in files:
            _read(file, file.relative_to(path).as_posix() if path.is_dir() else "", examples, labelled)
        return examples.check()

    def labels_of(self, config: Config, examples: Sequence[Example]) -> tuple[str, ...] | None:
        """The four."""
        return CHOICES

    def encoded(self, examples: Sequence[Example], encoder: Encoder, config: Config, which: str = "") -> "Choices":
        """Four rows for each."""
        return Choices(accuracy, *numbered(examples, CHOICES, which), encoder)


RACE = Race()


def _read(file: Path, name: str, examples: Examples, labelled: bool) -> None:
    """Adds a file's questions, and what is wrong with the others; each line is an object."""
    for number, line in enumerate(read_lines(file), start=1):
        place = f"{name} " if name else f"line {number} "
        if not line.strip():
            continue
        try:
            article = json.loads(line)
        except (ValueError, RecursionError):
            examples.bad.append(f"{place}is not JSON")
            continue
        if wrong := _wrong_article(article):
            examples.bad.append(f"{place}{wrong}")
            continue
        level = next((level for level in LEVELS if str(article.get("id", name)).startswith(level) or level in name), "")
        title = name or str(article.get("id", f"line {number}"))
        for question, example in enumerate(_questions(article, labelled), start=1):
            if isinstance(example, str):
                examples.bad.append(f"{place}question {question} {example}")
                continue
            texts, answer = example
            examples.rows.append(Example(texts, answer, number, f"{title}#{question}", level))


def _wrong_article(article: Any) -> str:
    """What is wrong with an object; nothing where its questions can be read one by one."""
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
        return f"has {len(article['questions'])} questions, and options for {len(article['options'])}"
    return ""


def _questions(article: dict[str, Any], labelled: bool) -> Iterator[tuple[tuple[str, ...], str | None] | str]:
    """Of each question its texts and its answer, or what is wrong with it."""
    answers = article.get("answers")
    answers = answers if isinstance(answers, list) else []
    for number, (question, options) in enumerate(zip(article["questions"], article["options"], strict=True)):
        answer = answers[number] if number < len(answers) else None
        is_list = isinstance(options, list) and all(isinstance(o, str) and o.strip() for o in options)
        if not isinstance(question, str) or not question.strip():
            yield "is empty"
        elif not is_list or len(options) != len(CHOICES):
            yield f"has no {len(CHOICES)} options"
        elif (labelled or answer is not None) and answer not in CHOICES:
            yield "has no answer" if answer is None else f"has the answer {answer!r}, not A, B, C or D"
        else:
            yield (*(filled(question, option) for option in options), article["article"]), answer


def filled(question: str, option: str) -> str:
    """A question with an answer in its blank, or behind it."""
    return question.replace(BLANK, option) if BLANK in question else f"{question} {option}"


class Choices(EncodedRows):
    """Questions with a row for each of their choices."""

    def _ids(self, encoder: Encoder) -> list[Ids]:
        texts = encoder.ids([example.texts for example in self.examples])
        return [(choice[:MOST_TOKENS], article) for *choices, article in texts for choice in choices]

    def read(self, outputs: np.ndarray) -> np.ndarray:
        """[questions, choices]"""
        return outputs.reshape(-1, len(CHOICES))

    def scores(self, values: np.ndarray) -> Scores:
        """Accuracy, and that of middle and high schools' questions."""
        scores = dict(super().scores(values))
        if scores:
            places, numbers = self._known
            levels = np.array([self.examples[place].part for place in places])
            parts = [(level, levels == level) for level in LEVELS]
            scores |= {
                f"accuracy_{n}": accuracy(values[places][i], numbers[i])["accuracy"] for n, i in parts if i.any()
            }
        return scores
