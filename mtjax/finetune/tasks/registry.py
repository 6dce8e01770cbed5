"""The tasks by name."""

from collections.abc import Mapping

from mtjax.config import Config
from mtjax.finetune.tasks.glue import CLASSIFY, MNLI, QQP, REGRESS, RTE
from mtjax.finetune.tasks.race import RACE
from mtjax.finetune.tasks.squad import SQUAD1, SQUAD2
from mtjax.finetune.tasks.task import Task

TASKS: Mapping[str, Task] = {task.name: task for task in (MNLI, QQP, RTE, RACE, SQUAD1, SQUAD2, CLASSIFY, REGRESS)}

OF_HEADS: Mapping[str, Task] = {"classification": CLASSIFY, "regression": REGRESS, "choices": RACE, "spans": SQUAD2}


def task_of(config: Config) -> Task:
    """Returns the task of a finetuned model; for converted weights without one, a task with the same head."""
    return TASKS.get(config.finetuning.task) or OF_HEADS[config.model.head]
