"""Evaluates tasks of `mtjax evaluate` during training, on the run's mesh."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtjax.config import Config
from mtjax.config.families import is_decoder
from mtjax.convert.saved_model import for_rows
from mtjax.data.tokens.pretrained_settings import CONFIG, SPECIAL, special_names
from mtjax.errors import UserError, nearest, parse_json_object
from mtjax.evaluate.answers import SavedAnswers
from mtjax.evaluate.rows import digest_of_rows, scores_of
from mtjax.evaluate.score import Scorer, score_all
from mtjax.evaluate.tasks.registry import KINDS, check_data
from mtjax.evaluate.tasks.task import EvaluationTask, NamedTokenizer, RowSettings, TaskKind
from mtjax.generate.first_tokens import first_tokens
from mtjax.models.named_parameters import without_other_modules
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.weights import SPECIAL_IDS
from mtjax.runtime.processes.coordination import check_same
from mtjax.train.objective import VALID_LOSS, RunData
from mtjax.train.observability.best import Goal
from mtjax.train.step import TrainStep

ROWS = 8
"""Batch size per data-parallel rank, or twice the number of stages if that is larger."""


def evaluations_of(config: Config) -> "RunEvaluations | None":
    """Returns the evaluations that the setting `evaluate` requests; None if it is empty.

    Raises:
      UserError: a task or a result is unknown, a file is missing, or the model does not predict the next token.
    """
    files = dict(parsed(entry) for entry in config.output.evaluate or ())
    if len(files) < len(config.output.evaluate or ()):
        raise UserError(
            f"--evaluate {' '.join(config.output.evaluate or ())} names a task twice: give one file for each task"
        )
    if files and (not is_decoder(config.model) or config.model.head != "language"):
        raise UserError(
            f"--evaluate requires a model that predicts next tokens, which a {config.model.family} does not: remove it"
        )
    for task, path in files.items():
        check_data(task, path, f"--evaluate {task}:")
    check_goal(config, files)
    return RunEvaluations(config.output.keep_best, files) if files else None


def parsed(entry: str) -> tuple[str, Path]:
    """Parses TASK=FILE.

    Raises:
      UserError: it is malformed, or the task is unknown.
    """
    name, equals, path = entry.partition("=")
    if not equals or not path:
        raise UserError(f"--evaluate {entry} is not TASK=FILE, such as wikitext103=wiki.valid.tokens")
    if name not in KINDS:
        raise UserError(
            f"--evaluate {entry}: unknown task {name!r}{nearest(name, KINDS)}; the tasks are {', '.join(KINDS)}"
        )
    return name, Path(path).expanduser()


def check_goal(config: Config, files: Mapping[str, Path]) -> None:
    """Checks that the run computes the metric by which its best checkpoint is selected.

    Raises:
      UserError: it does not.
    """
    metric, output = config.output.keep_best, config.output
    known = [f"{task}/{name}" for task in files for name in KINDS[task].measures]
    if metric is None or metric in known:
        return
    if metric != VALID_LOSS:
        known = [VALID_LOSS, *known]
        hint = "" if files else "; results of tasks require --evaluate"
        raise UserError(f"--keep-best {metric} is not one of {', '.join(known)}{nearest(metric, known)}{hint}")
    if not output.valid_every:
        raise UserError(f"--keep-best {VALID_LOSS} requires validation, but valid_every is 0: add --valid-every")


@dataclass(frozen=True)
class OpenedTask:
    """A task with its rows."""

    kind: TaskKind
    task: EvaluationTask


def first_tokens_in(text: RunData) -> list[int]:
    """Returns the ids that are prepended to a text, as `mtjax evaluate` does for the run's folder.

    Raises:
      UserError: a file that is saved with the run's tokenizer is not a JSON object.
    """
    settings, legacy, ids = (
        parse_json_object(text.files[name], name) if name in text.files else {}
        for name in (CONFIG, SPECIAL, SPECIAL_IDS)
    )
    return first_tokens(text.tokenizer, special_names(settings, legacy), ids)


class RunEvaluations:
    """Tasks that are evaluated during training.

    Args:
      keep_best: the metric by which the best checkpoint is selected; may be another than the tasks' results.
      files: tasks -> their files.
    """

    def __init__(self, keep_best: str | None, files: Mapping[str, Path]) -> None:
        self._keep_best, self._files = keep_best, files
        self._opened: list[OpenedTask] = []
        self._scorer: Scorer | None = None

    @property
    def goal(self) -> Goal | None:
        """The result by which the best checkpoint is selected, if it is one of the tasks'."""
        task, _, name = (self._keep_best or "").partition("/")
        return Goal(f"{task}/{name}", KINDS[task].measures[name]) if task in self._files else None

    def open(self, program: TrainStep, text: RunData) -> None:
        """Reads the tasks' files for the program's model.

        Batches are those of `mtjax evaluate`, not the run's; parameters have the run's shardings.

        Raises:
          UserError: a file is not in its task's format, or differs between processes.
        """
        config = for_rows(program.config, program.config.parallel, max(ROWS, 2 * program.stages))
        # trains=True: parameters keep the shardings of training, so that they are not moved.
        self._scorer = Scorer(ShardedModel(config, program.mesh, trains=True))
        # Adjacent windows: overlapping ones would cost many times as much at each evaluation.
        settings = RowSettings(self._scorer.longest, self._scorer.longest, tuple(first_tokens_in(text)))
        tokenizer = NamedTokenizer(text.tokenizer_name, text.tokenizer)
        for name, path in self._files.items():
            task = KINDS[name].open(path, tokenizer, settings)
            # With other rows, a process would run another number of batches, and their collectives would hang.
            check_same(f"rows of --evaluate {name}", digest_of_rows(task.rows), path)
            self._opened.append(OpenedTask(KINDS[name], task))

    def evaluate(self, parameters: Any) -> dict[str, float]:
        """Returns the tasks' results as `TASK/RESULT`; the same in all processes."""
        assert self._scorer is not None  # set by open
        entries = {}
        for opened in self._opened:
            # In memory only: the next evaluation has other weights.
            answers = SavedAnswers(None, "")
            for _ in score_all(
                self._scorer, without_other_modules(self._scorer.sharded_model, parameters), opened.task.rows, answers
            ):
                pass
            results = opened.task.results(scores_of(answers.answers))
            entries |= {f"{opened.kind.name}/{name}": float(results[name]) for name in opened.kind.measures}
        return entries
