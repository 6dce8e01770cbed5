"""The same finetuning with several seeds: a run for each, and what they come to."""

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mtjax import config as configs
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.finetune.asked import record_settings
from mtjax.sharding.processes import several_expected
from mtjax.train.folder.run_folder import choose_folder, writing
from mtjax.train.observability.best import Best, Goal
from mtjax.train.observability.metrics import read_metrics

RESULTS = "seeds.json"
"""The file of the results."""


def run_seeds(
    config: Config, name: str, count: int, goal: Goal, run: Callable[[Config], bool]
) -> dict[int, float] | None:
    """Runs seeds `seed`, `seed + 1` ... into OUT/seed-SEED, and says each one's best, their median and their spread.

    A single one is run into OUT itself, and nothing is said.

    With `--resume` those that are done with the same settings are not done again.

    Args:
      config: of all, with the first seed.
      name: what their folder is called where `--out` does not say.
      count: of seeds.
      goal: by what a run is judged.
      run: runs one, and returns whether it was not stopped.

    Returns:
      The best validation of each seed; None where a run was stopped.

    Raises:
      UserError: the folder can't be used, a run in it was begun with other settings, or the runs would have several
        processes.
    """
    if several_expected(config.parallel):
        raise UserError("--seeds and --sweep start runs one by one: with several processes, start each by itself")
    out = choose_folder(config.output, name)
    if count == 1:
        done = run(configs.replace(config, out=out))
        return {config.training.seed: best_of(out, goal).value} if done else None
    first, resume = config.training.seed, config.output.resume
    results: dict[int, float] = {}
    for seed in range(first, first + count):
        folder = out / f"seed-{seed}"
        if folder.exists() and not resume:
            raise UserError(f"--out {out} has a run of seed {seed} already: add --resume, or name another folder")
        record_settings(configs.replace(config, seed=seed), folder)
        print(f"\nseed {seed}, {len(results) + 1} of {count}", flush=True)
        if not run(configs.replace(config, seed=seed, out=folder)):
            print(f"stopped within seed {seed}: the same command with --resume --out {out} goes on", flush=True)
            return None
        results[seed] = best_of(folder, goal).value
    print(summary(results, goal, out), flush=True)
    return results


def best_of(folder: Path, goal: Goal) -> Best:
    """The best validation of a run that has ended."""
    return Best(goal, read_metrics(folder / "metrics.jsonl"))


def spread(results: Mapping[int, float]) -> dict[str, Any]:
    """Results of seeds, and what they come to."""
    values = list(results.values())
    each = {str(seed): value for seed, value in results.items()}
    return {"seeds": each, "median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def summary(results: dict[int, float], goal: Goal, out: Path) -> str:
    """What is said in the end; writes the same numbers to a file.

    Raises:
      UserError: it can't be written.
    """
    metric = goal.metric.removeprefix("valid_")
    facts = {"metric": metric, **spread(results)}
    with writing(out):
        (out / RESULTS).write_text(json.dumps(facts, indent=2) + "\n")
    rows = "\n".join(f"seed {seed}  best {metric} {value:.4f}" for seed, value in results.items())
    median = f"median {facts['median']:.4f}, from {facts['lowest']:.4f} to {facts['highest']:.4f}; in {out / RESULTS}"
    ensemble = f"\nnext    mtjax ensemble {out}/seed-* --data FILE" if goal.higher_is_better else ""
    return f"\n{rows}\n{median}{ensemble}"
