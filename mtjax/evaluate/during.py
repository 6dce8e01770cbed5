"""Tasks of `mtjax evaluate` while a model learns: on the run's mesh, stages included, with the weights at hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax.config import Config
from mtjax.convert.saved_model import for_rows
from mtjax.data.tokens.pretrained_settings import CONFIG, SPECIAL, special_names
from mtjax.errors import UserError, nearest, parse_json_object
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.rows import scores_of
from mtjax.evaluate.score import Scorer, score_all
from mtjax.evaluate.tasks.registry import KINDS, check_data
from mtjax.evaluate.tasks.task import Kind, Settings, Task
from mtjax.generate.first_tokens import first_tokens
from mtjax.models.sharded_model import ShardedModel
from mtjax.train.checkpoints.weights import SPECIAL_IDS
from mtjax.train.objective import VALID_LOSS, RunData
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep

ROWS = 8
"""Rows that each data rank reads at once; twice the stages where those are more."""
WRITERS = ("gpt", "llama")


def evaluations_of(config: Config) -> "RunEvaluations | None":
    """What `evaluate` asks; None where it asks nothing.

    Raises:
      UserError: a task or a result is unknown, a file is missing, or the model does not predict the next token.
    """
    asked = dict(parsed(entry) for entry in config.output.evaluate or ())
    if len(asked) < len(config.output.evaluate or ()):
        raise UserError(f"--evaluate {' '.join(config.output.evaluate or ())} names a task twice: one file for each")
    if asked and (config.model.family not in WRITERS or config.model.head != "language"):
        raise UserError(
            f"--evaluate asks for next tokens, which a {config.model.family} does not predict: leave it out"
        )
    for task, path in asked.items():
        check_data(task, path, f"--evaluate {task}:")
    check_goal(config, asked)
    return RunEvaluations(config.output.keep_best, asked) if asked else None


def parsed(entry: str) -> tuple[str, Path]:
    """TASK=FILE as the task and its file.

    Raises:
      UserError: it is not, or there is no such task.
    """
    name, equals, path = entry.partition("=")
    if not equals or not path:
        raise UserError(f"--evaluate {entry} is not TASK=FILE, say wikitext103=wiki.valid.tokens")
    if name not in KINDS:
        raise UserError(
            f"--evaluate {entry}: no task is called {name!r}{nearest(name, KINDS)}; there are {', '.join(KINDS)}"
        )
    return name, Path(path).expanduser()


def check_goal(config: Config, asked: Mapping[str, Path]) -> None:
    """Checks that the run measures what its best checkpoint is chosen by.

    Raises:
      UserError: it doesn't.
    """
    metric, output = config.output.keep_best, config.output
    known = [f"{task}/{name}" for task in asked for name in KINDS[task].measures]
    if metric is None or metric in known:
        return
    if metric != VALID_LOSS:
        known = [VALID_LOSS, *known]
        hint = "" if asked else "; results of tasks need --evaluate"
        raise UserError(f"--keep-best {metric} is not one of {', '.join(known)}{nearest(metric, known)}{hint}")
    if not output.valid_every:
        raise UserError(f"--keep-best {VALID_LOSS} needs validations, and valid_every is 0: say how often they come")


@dataclass(frozen=True)
class Opened:
    """A task with its questions."""

    kind: Kind
    task: Task


def first_tokens_in(text: RunData) -> list[int]:
    """Returns the ids that stand before a text: the same as `mtjax evaluate` takes for the run's folder.

    Raises:
      UserError: a file that the run keeps with its tokenizer is not a JSON object.
    """
    settings, legacy, ids = (
        parse_json_object(text.files[name], name) if name in text.files else {}
        for name in (CONFIG, SPECIAL, SPECIAL_IDS)
    )
    return first_tokens(text.tokenizer, special_names(settings, legacy), ids)


class RunEvaluations:
    """Tasks that are asked of a model while it learns.

    Args:
      keep_best: the result by which the best checkpoint is chosen; that may be none of theirs.
      asked: tasks and their files.
    """

    def __init__(self, keep_best: str | None, asked: Mapping[str, Path]) -> None:
        self._keep_best, self._asked = keep_best, asked
        self._opened: list[Opened] = []
        self._scorer: Scorer | None = None

    @property
    def goal(self) -> Goal | None:
        """By which result the best checkpoint is chosen."""
        task, _, name = (self._keep_best or "").partition("/")
        return Goal(f"{task}/{name}", KINDS[task].measures[name]) if task in self._asked else None

    def open(self, program: TrainStep, text: RunData) -> None:
        """Reads the tasks' files for the program's model.

        Rows go through it as `mtjax evaluate` sends them, whatever batches the run has; parameters lie as the run's.

        Raises:
          UserError: a file is not its task's.
        """
        config = for_rows(program.config, program.config.parallel, max(ROWS, 2 * program.stages))
        self._scorer = Scorer(ShardedModel(config, program.mesh, trains=True))
        settings = Settings(self._scorer.longest, self._scorer.longest, tuple(first_tokens_in(text)))
        for name, path in self._asked.items():
            self._opened.append(Opened(KINDS[name], KINDS[name].open(path, text.tokenizer, settings)))

    def ask(self, parameters: Any) -> dict[str, float]:
        """What the tasks measure, as `TASK/RESULT`: the same in all processes."""
        assert self._scorer is not None  # it was opened
        entries = {}
        for opened in self._opened:
            kept = SavedAnswers(None, "")
            for _ in score_all(self._scorer, parameters, opened.task.rows, kept):
                pass
            results = opened.task.results(scores_of(kept.answers))
            entries |= {f"{opened.kind.name}/{name}": float(results[name]) for name in opened.kind.measures}
        return entries
