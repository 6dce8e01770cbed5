"""Grids of settings: their values, folders, results, and going on after a stop. Runs are stood in for."""

import json
from pathlib import Path

import pytest

from mtjax.config import Config, replace
from mtjax.errors import UserError
from mtjax.finetune.seeds import run_seeds
from mtjax.finetune.sweep import grid_of, run_sweep
from mtjax.train.observability.best import Goal

GOAL = Goal("valid_accuracy")
WORDS = ("global-batch-size=16,32", "learning-rate=1e-5,3e-5")


class Runs:
    """Writes what a run would, and notes which were begun; the one numbered `stops_at` is stopped."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.stops_at, self.begun = stops_at, []

    def __call__(self, config: Config) -> bool:
        out, training = config.output.out, config.training
        assert out is not None
        self.begun.append((training.global_batch_size, config.optimizer.learning_rate, training.seed))
        if len(self.begun) == self.stops_at:
            return False
        out.mkdir(parents=True, exist_ok=True)
        value = training.global_batch_size / 100 + config.optimizer.learning_rate * 1e4 + (training.seed - 7) / 1000
        entries = [{"step": 1, "valid_accuracy": value}, {"step": 2, "valid_accuracy": value - 0.1}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return True


def test_a_grid_is_of_the_values_that_are_named_or_the_paper_s():
    assert grid_of(WORDS[1:], Config()) == [{"learning_rate": 1e-5}, {"learning_rate": 3e-5}]
    assert len(grid_of((), Config())) == 16
    race = replace(Config(), family="bert", head="choices", num_labels=4)
    assert {point["global_batch_size"] for point in grid_of((), race)} == {64, 128, 256, 512}
    wrong = {
        "batch=4": "'batch=4' is not one of global-batch-size=VALUE,VALUE and learning-rate",
        "learning-rate": "is not one of",
        "global-batch-size=1.5": "'1.5' is not an integer",
        "learning-rate=1,,2": "'' is not a number",
        "learning-rate=1,1.0": "contains a value twice",
    }
    for word, message in wrong.items():
        with pytest.raises(UserError, match=message):
            grid_of((word,), Config())


def test_results_are_listed_the_best_is_named_and_a_stopped_grid_goes_on(tmp_path, capsys):
    out = tmp_path / "grid"
    config = replace(Config(), seed=7, out=out)
    grid = grid_of(WORDS, config)
    run_sweep(config, "x", grid, 2, GOAL, Runs(stops_at=4))
    said = capsys.readouterr().out
    assert (
        "stopped during global-batch-size-16-learning-rate-3e-05: continue with the same command and --resume" in said
    )
    assert len(json.loads((out / "sweep.json").read_text())["runs"]) == 1
    with pytest.raises(UserError, match="already has a run with seed 7: add --resume"):
        run_sweep(config, "x", grid, 2, GOAL, Runs())
    runs = Runs()
    run_sweep(replace(config, resume=True), "x", grid, 2, GOAL, runs)
    expected = [(size, rate, seed) for size in (16, 32) for rate in (1e-5, 3e-5) for seed in (7, 8)]
    assert runs.begun == expected
    facts = json.loads((out / "sweep.json").read_text())
    assert facts["best"] == facts["runs"][3]
    assert facts["best"]["median"] == pytest.approx(0.32 + 0.3 + 0.0005)
    assert facts["best"]["folder"] == str(out / "global-batch-size-32-learning-rate-3e-05")
    said = capsys.readouterr().out
    assert "best    global batch size 32, learning rate 3e-05: 0.6205, in" in said
    assert ["16", "1e-05", "0.2605", "0.2600", "0.2610"] in [line.split() for line in said.splitlines()]


def test_one_seed_is_run_into_the_folder_of_its_settings(tmp_path):
    config = replace(Config(), out=tmp_path / "grid")
    run_sweep(config, "x", grid_of(WORDS[1:], config), 1, GOAL, Runs())
    assert (tmp_path / "grid" / "learning-rate-1e-05" / "metrics.jsonl").is_file()


def test_results_of_other_settings_are_not_taken_over(tmp_path):
    config = replace(Config(), seed=7, out=tmp_path / "grid", resume=True)
    for seeds, grid, run in ((1, [{"learning_rate": 1e-5}], "learning-rate-1e-05"), (2, [{}, {}], "seed-7")):
        out = tmp_path / str(seeds)

        def sweep(runs: Runs, out: Path = out, grid=grid, seeds: int = seeds, **changed) -> None:
            one = replace(config, out=out, **changed)
            if seeds == 1:
                run_sweep(one, "x", grid, 1, GOAL, runs)
            else:
                run_seeds(one, "x", seeds, GOAL, runs)

        sweep(Runs())
        results, runs = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}, Runs()
        sweep(Runs(), mesh="2x1", log_every=3)  # where it runs and what it says may change
        with pytest.raises(UserError) as refused:
            sweep(runs, weight_decay=0.5, init_from=Path("other"))
        assert str(refused.value) == (
            f"{out / run} was started with weight_decay 0.01, init_from not given, but this command has weight_decay "
            '0.5, init_from "other": name another --out, or resume only that run with mtjax finetune --config '
            f"{out / run}/config.toml --resume"
        )
        assert not runs.begun and results == {path: path.read_bytes() for path in results}
        (out / "settings.json").unlink()
        with pytest.raises(UserError, match="settings are not recorded in"):
            sweep(runs)
