"""The best checkpoint of a run, in `best/`: that of the best validation whose checkpoint could be saved."""

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from mtjax.config import Config
from mtjax.runtime.checkpoints.checkpoint import Checkpoints
from mtjax.runtime.checkpoints.remote import METADATA, remove_later
from mtjax.runtime.checkpoints.saves import Saves
from mtjax.runtime.checkpoints.weights import BEST
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.storage import is_file, names_in, shown
from mtjax.train.observability.best import Best, Goal
from mtjax.train.observability.metrics import read_metrics
from mtjax.train.setup import RunEnvironment, checkpoints_in


@dataclass(frozen=True)
class BestCheckpoint:
    """The best validation, and the checkpoint in `best/`, which is of an earlier one if a save failed."""

    validation: Best
    """Of all validations: patience counts from it."""
    held: Best
    """Of the validations whose checkpoints were saved; the best of them is in `best/`."""
    saves: Saves

    def describe(self) -> str:
        """Describes the best validation for the end of a sentence, and what `best/` holds if that is another one."""
        best, held = self.validation, self.held
        if not best.step:
            return ""
        name = best.goal.metric.removeprefix("valid_")
        found = f", best {name} {best.value:.4f} after step {best.step}"
        if held.step == best.step:
            return found
        kept = f"holds that of step {held.step} with {held.value:.4f}" if held.step else "is empty"
        return f"{found}, of which there is no checkpoint ({BEST}/ {kept})"


def open_best(environment: RunEnvironment, step: int) -> tuple[Checkpoints, int]:
    """Opens the best checkpoint of a run that is resumed at `step`; removes one of a later step, which will be trained
    again.

    Returns:
      The checkpoints, and the step of the one that is there; 0 if there is none.
    """
    held = 0
    # `keep_last=1` keeps the one of the latest step, not the last one that was saved.
    if environment.is_first_process and environment.remote is not None:
        folder = environment.out / BEST
        remove_later(folder, step)
        steps = [int(name) for name in names_in(shown(folder)) if name.isdigit()]
        held = max((step for step in steps if is_file(folder / str(step) / METADATA)), default=0)
    elif environment.is_first_process:
        paths = {int(path.name): path for path in (environment.folder / BEST).glob("*") if path.name.isdigit()}
        for path in (path for saved, path in paths.items() if saved > step):
            shutil.rmtree(path, ignore_errors=True)
        held = max((saved for saved in paths if saved <= step), default=0)
    # Also a barrier: no process may open the folder while the first one removes from it.
    held = int(all_gather_text("the best checkpoint", str(held))[0])
    return checkpoints_in(environment, BEST, keep_last=1), held


def open_best_checkpoint(
    goal: Goal | None,
    config: Config,
    environment: RunEnvironment,
    step: int,
    stack: contextlib.ExitStack,
    say: Callable[[str], object],
) -> BestCheckpoint | None:
    """Reads the best validation up to a step from the metrics, which only the first process has; returns None without a
    goal."""
    if goal is None:
        return None
    entries = read_metrics(environment.folder / "metrics.jsonl") if environment.is_first_process else []
    history = [{name: e[name] for name in ("step", goal.metric) if name in e} for e in entries]
    # The first process's history in all of them: each decides from it what to save, and when the run ends.
    history = json.loads(all_gather_text("the best validation", json.dumps(history))[0])
    checkpoints, held = open_best(environment, step)
    stack.callback(checkpoints.close)
    saves = Saves(checkpoints, config.output.max_failed_saves, lambda: environment.peers.advice, say)
    # Of the validation at its step, which need not be the best: a save of a better one may have failed, or that
    # checkpoint was removed.
    return BestCheckpoint(Best(goal, history), Best(goal, [e for e in history if e["step"] == held]), saves)
