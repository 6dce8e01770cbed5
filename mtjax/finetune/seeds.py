"""Finetuning with several seeds: a run for each, and their median and range."""

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.finetune.settings_record import record_settings
from mtjax.sharding.processes import several_expected
from mtjax.train.folder.run_folder import choose_folder, writing
from mtjax.train.observability.best import Best, Goal
from mtjax.train.observability.metrics import read_metrics

RESULTS = "seeds.json"
"""Name of the file with the results."""


def run_seeds(
    config: Config, name: str, count: int, goal: Goal, run: Callable[[Config], bool]
) -> dict[int, float] | None:
    """Runs seeds `seed`, `seed + 1` ... in OUT/seed-SEED, and prints the best value of each, their median and range.

    A single seed is run in OUT itself, and nothing is printed.

    With `--resume`, finished runs with the same settings are not repeated.

    Args:
      config: the config of all runs, with the first seed.
      name: name of their folder without `--out`.
      count: number of seeds.
      goal: the metric.
      run: trains one run; returns False if it was stopped.

    Returns:
      The best validation result of each seed; None if a run was stopped.

    Raises:
      UserError: the folder can't be used, a run in it was started with other settings, or several processes would run.
    """
    if several_expected(config.parallel):
        raise UserError("--seeds and --sweep are not supported with several processes: start each run separately")
    out = choose_folder(config.output, name)
    if count == 1:
        done = run(configs.replace(config, out=out))
        return {config.training.seed: best_of(out, goal).value} if done else None
    first, resume = config.training.seed, config.output.resume
    results: dict[int, float] = {}
    for seed in range(first, first + count):
        folder = out / f"seed-{seed}"
        if folder.exists() and not resume:
            raise UserError(f"--out {out} already has a run with seed {seed}: add --resume, or name another folder")
        # Before the run, so that --resume does not take a folder with other settings for a result.
        record_settings(configs.replace(config, seed=seed), folder)
        print(f"\nseed {seed}, {len(results) + 1} of {count}", flush=True)
        if not run(configs.replace(config, seed=seed, out=folder)):
            print(f"stopped during seed {seed}: continue with the same command and --resume --out {out}", flush=True)
            return None
        results[seed] = best_of(folder, goal).value
    print(write_summary(results, goal, out), flush=True)
    return results


def best_of(folder: Path, goal: Goal) -> Best:
    """Returns the best validation of a finished run."""
    return Best(goal, read_metrics(folder / "metrics.jsonl"))


def spread(results: Mapping[int, float]) -> dict[str, Any]:
    """Returns the results of seeds with their median and range."""
    values = list(results.values())
    each = {str(seed): value for seed, value in results.items()}
    return {"seeds": each, "median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def write_summary(results: dict[int, float], goal: Goal, out: Path) -> str:
    """Writes the results of seeds to a file, and returns a summary of them to print.

    Raises:
      UserError: the file can't be written.
    """
    metric = goal.metric.removeprefix("valid_")
    facts = {"metric": metric, **spread(results)}
    with writing(out):
        (out / RESULTS).write_text(json.dumps(facts, indent=2) + "\n")
    rows = "\n".join(f"seed {seed}  best {metric} {value:.4f}" for seed, value in results.items())
    median = f"median {facts['median']:.4f}, from {facts['lowest']:.4f} to {facts['highest']:.4f}; in {out / RESULTS}"
    ensemble = f"\nnext    mtjax ensemble {out}/seed-* --data FILE" if goal.higher_is_better else ""
    return f"\n{rows}\n{median}{ensemble}"
