"""The same finetuning with several batch sizes and learning rates: a run for each pair, and which is best."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.sizes import rows_of_question
from mtjax.errors import UserError, nearest
from mtjax.finetune.asked import record_settings
from mtjax.finetune.seeds import run_seeds, spread
from mtjax.train.folder.run_folder import choose_folder, writing
from mtjax.train.observability.best import Goal

RESULTS = "sweep.json"
"""The file of the results."""
SWEPT: Mapping[str, tuple[type, tuple[float, ...]]] = {
    "global-batch-size": (int, (16, 32, 64, 128)),
    "learning-rate": (float, (1e-5, 2e-5, 3e-5, 5e-5)),
}
"""What is swept, with the values that are tried where none are named: within those of the paper's appendix."""


def grid_of(words: Sequence[str], config: Config) -> list[dict[str, Any]]:
    """The settings of each run.

    Args:
      words: NAME=VALUE,VALUE... for some of `SWEPT`, of which the others stay as they are; none for all of them with
        their own values, of batch sizes so many questions.
      config: of all.

    Raises:
      UserError: a name or a value is wrong.
    """
    values: dict[str, list[Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in SWEPT or not equals:
            known = " and ".join(f"{name}=VALUE,VALUE" for name in SWEPT)
            raise UserError(f"--sweep {word!r} is not one of {known}{nearest(name, SWEPT)}")
        if name in values:
            raise UserError(f"--sweep names {name} twice")
        values[name] = [_number(item, name) for item in text.split(",")]
        if len(set(values[name])) < len(values[name]):
            raise UserError(f"--sweep {word!r} has a value twice")
    if not words:
        values = {name: list(defaults) for name, (_, defaults) in SWEPT.items()}
        values["global-batch-size"] = [size * rows_of_question(config.model) for size in values["global-batch-size"]]
    names = [name.replace("-", "_") for name in values]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*values.values())]


def run_sweep(
    config: Config,
    name: str,
    grid: Sequence[Mapping[str, Any]],
    seeds: int,
    goal: Goal,
    run: Callable[[Config], bool],
) -> None:
    """Runs each of a grid's settings into a folder of its own, and says each one's median over seeds and the best.

    With `--resume` those that are done with the same settings are not done again.

    Args:
      config: of all, with the first seed.
      name: what their folder is called where `--out` does not say.
      grid: settings of each.
      seeds: runs of each, with a seed of its own.
      goal: by what a run is judged.
      run: runs one, and returns whether it was not stopped.

    Raises:
      UserError: the folder can't be used, a run in it was begun with other settings, or the runs would have several
        processes.
    """
    out = choose_folder(config.output, name)
    found: list[dict[str, Any]] = []
    for number, point in enumerate(grid, start=1):
        folder = out / folder_of(point)
        if seeds == 1:  # of several, each run is recorded with its seed
            record_settings(configs.replace(config, **point), folder)
        print(f"\n{folder.name}, {number} of {len(grid)}", flush=True)
        values = run_seeds(configs.replace(config, **point, out=folder), name, seeds, goal, run)
        if values is None:
            print(f"stopped within {folder.name}: the same command with --resume --out {out} goes on", flush=True)
            return
        found.append({**point, **spread(values), "folder": str(folder)})
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / RESULTS).write_text(json.dumps(facts_of(found, goal), indent=2) + "\n")
    print(table(found, goal, out), flush=True)


def folder_of(point: Mapping[str, Any]) -> str:
    """The name of a run's folder: its settings."""
    return "-".join(f"{name.replace('_', '-')}-{value:g}" for name, value in point.items())


def facts_of(found: Sequence[Mapping[str, Any]], goal: Goal) -> dict[str, Any]:
    """What the file says: the results of each, and the best."""
    best = max(found, key=lambda one: one["median"] if goal.higher_is_better else -one["median"])
    return {"metric": goal.metric.removeprefix("valid_"), "runs": list(found), "best": best}


def table(found: Sequence[Mapping[str, Any]], goal: Goal, out: Path) -> str:
    """What is said in the end: a row for each, and the best."""
    facts = facts_of(found, goal)
    settings = [name for name in found[0] if name not in {*spread({0: 0.0}), "folder"}]
    head = [name.replace("_", " ") for name in settings] + [f"median {facts['metric']}", "lowest", "highest"]
    rows = [
        [*(f"{one[name]:g}" for name in settings), *(f"{one[n]:.4f}" for n in ("median", "lowest", "highest"))]
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    best = facts["best"]
    named = ", ".join(f"{name.replace('_', ' ')} {best[name]:g}" for name in settings)
    said = f"best    {named}: {best['median']:.4f}, in {best['folder']}; all are in {out / RESULTS}"
    return "\n".join(["", *lines, said])


def _number(text: str, name: str) -> float | int:
    kind = SWEPT[name][0]
    try:
        return kind(text)
    except ValueError:
        words = "a whole number" if kind is int else "a number"
        raise UserError(f"--sweep {name}: {text!r} is not {words}") from None
