"""Sweeps over batch sizes and learning rates: a finetuning run for each combination, and the best of them."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.sizes import rows_of_question
from mtjax.errors import UserError, nearest
from mtjax.finetune.seeds import run_seeds, spread
from mtjax.finetune.settings_record import record_settings
from mtjax.train.folder.run_folder import choose_folder, writing
from mtjax.train.observability.best import Goal

RESULTS = "sweep.json"
"""Name of the file with the results."""
SWEPT: Mapping[str, tuple[type, tuple[float, ...]]] = {
    "global-batch-size": (int, (16, 32, 64, 128)),
    "learning-rate": (float, (1e-5, 2e-5, 3e-5, 5e-5)),
}
"""Options that can be swept -> their type and default values, which are within those of the paper's appendix."""


def grid_of(words: Sequence[str], config: Config) -> list[dict[str, Any]]:
    """Returns the settings of each run.

    Args:
      words: NAME=VALUE,VALUE... for options in `SWEPT`; empty for all of them with their default values, where batch
        sizes count questions.
      config: the config of all runs.

    Raises:
      UserError: a name or a value is invalid.
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
            raise UserError(f"--sweep {word!r} contains a value twice")
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
    """Runs each of a grid's settings in a separate folder, and prints the median over seeds of each and the best.

    With `--resume`, finished runs with the same settings are not repeated.

    Args:
      config: the config of all runs, with the first seed.
      name: name of their folder without `--out`.
      grid: the settings of each run.
      seeds: number of seeds for each.
      goal: the metric.
      run: trains one run; returns False if it was stopped.

    Raises:
      UserError: the folder can't be used, a run in it was started with other settings, or several processes would run.
    """
    out = choose_folder(config.output, name)
    found: list[dict[str, Any]] = []
    for number, point in enumerate(grid, start=1):
        folder = out / folder_of(point)
        if seeds == 1:  # with several seeds, run_seeds records each run
            record_settings(configs.replace(config, **point), folder)
        print(f"\n{folder.name}, {number} of {len(grid)}", flush=True)
        values = run_seeds(configs.replace(config, **point, out=folder), name, seeds, goal, run)
        if values is None:
            print(f"stopped during {folder.name}: continue with the same command and --resume --out {out}", flush=True)
            return
        found.append({**point, **spread(values), "folder": str(folder)})
        with writing(out):
            # After every run, so that an interrupted sweep has the results so far.
            out.mkdir(parents=True, exist_ok=True)
            (out / RESULTS).write_text(json.dumps(facts_of(found, goal), indent=2) + "\n")
    print(table(found, goal, out), flush=True)


def folder_of(point: Mapping[str, Any]) -> str:
    """Returns the name of a run's folder, from its settings."""
    return "-".join(f"{name.replace('_', '-')}-{value:g}" for name, value in point.items())


def facts_of(found: Sequence[Mapping[str, Any]], goal: Goal) -> dict[str, Any]:
    """Returns the content of the file: the results of all runs, and the best."""
    best = max(found, key=lambda one: one["median"] if goal.higher_is_better else -one["median"])
    return {"metric": goal.metric.removeprefix("valid_"), "runs": list(found), "best": best}


def table(found: Sequence[Mapping[str, Any]], goal: Goal, out: Path) -> str:
    """Returns a table of the results, and the best."""
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
    summary = f"best    {named}: {best['median']:.4f}, in {best['folder']}; all results are in {out / RESULTS}"
    return "\n".join(["", *lines, summary])


def _number(text: str, name: str) -> float | int:
    kind = SWEPT[name][0]
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise UserError(f"--sweep {name}: {text!r} is not {expected}") from None
