"""The same finetuning with several seeds: a run for each, and what they come to."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path

from mtjax import config as configs
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.sharding.processes import several_expected
from mtjax.train.folder.run_folder import choose_folder, writing
from mtjax.train.watch.best import Best, Goal
from mtjax.train.watch.metrics import read_metrics

RESULTS = "seeds.json"
"""The file of the results."""


def run_seeds(config: Config, name: str, count: int, goal: Goal, run: Callable[[Config], bool]) -> None:
    """Runs seeds `seed`, `seed + 1` ... into OUT/seed-SEED, and says each one's best, their median and their spread.

    With `--resume` those that are done are not done again.

    Args:
      config: of all, with the first seed.
      name: what their folder is called where `--out` does not say.
      count: of seeds.
      goal: by what a run is judged.
      run: runs one, and returns whether it was not stopped.

    Raises:
      UserError: the folder can't be used, or the runs would have several processes.
    """
    if several_expected(config.parallel):
        raise UserError("--seeds runs one seed after the other here: with several processes, start each by itself")
    out = choose_folder(config.output, name)
    first, resume = config.training.seed, config.output.resume
    results: dict[int, float] = {}
    for seed in range(first, first + count):
        folder = out / f"seed-{seed}"
        if folder.exists() and not resume:
            raise UserError(f"--out {out} has a run of seed {seed} already: add --resume, or name another folder")
        print(f"\nseed {seed}, {len(results) + 1} of {count}", flush=True)
        if not run(configs.replace(config, seed=seed, out=folder)):
            print(f"stopped within seed {seed}: the same command with --resume --out {out} goes on", flush=True)
            return
        results[seed] = best_of(folder, goal).value
    print(summary(results, goal, out), flush=True)


def best_of(folder: Path, goal: Goal) -> Best:
    """The best validation of a run that has ended."""
    return Best(goal, read_metrics(folder / "metrics.jsonl"))


def summary(results: dict[int, float], goal: Goal, out: Path) -> str:
    """What is said in the end; writes the same numbers to a file.

    Raises:
      UserError: it can't be written.
    """
    metric, values = goal.metric.removeprefix("valid_"), list(results.values())
    facts = {
        "metric": metric,
        "seeds": {str(seed): value for seed, value in results.items()},
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
    }
    with writing(out):
        (out / RESULTS).write_text(json.dumps(facts, indent=2) + "\n")
    rows = "\n".join(f"seed {seed}  best {metric} {value:.4f}" for seed, value in results.items())
    spread = f"median {facts['median']:.4f}, from {facts['lowest']:.4f} to {facts['highest']:.4f}; in {out / RESULTS}"
    return f"\n{rows}\n{spread}\nnext    mtjax ensemble {out}/seed-* --data FILE"
