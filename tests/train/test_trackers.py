"""Metrics also go to Weights & Biases or MLflow: what these are told, and that neither ends a run."""

import json
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mtjax import config
from mtjax.errors import UserError
from mtjax.train.observability.metrics import MetricsLog
from mtjax.train.observability.trackers import Tracking, check_tracker


def fake(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed module of this name, without content."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A fake of Weights & Biases, as the calls that it has seen."""
    calls: list[Any] = []
    run = SimpleNamespace(
        id="abc",
        define_metric=lambda name, step_metric=None: calls.append(("define", name, step_metric)),
        log=lambda values: calls.append(("log", values)),
        finish=lambda: calls.append(("finish",)),
    )
    fake("wandb", monkeypatch).init = lambda **named: (calls.append(("init", named)), run)[1]
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return calls


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A fake of MLflow, as the calls that it has seen."""
    calls: list[Any] = []

    def start_run(**named: Any) -> Any:
        calls.append(("start", named))
        return SimpleNamespace(info=SimpleNamespace(run_id="1f2e"))

    module = fake("mlflow", monkeypatch)
    module.start_run = start_run
    module.log_params = lambda values: calls.append(("params", values))
    module.log_metrics = lambda values, step: calls.append(("metrics", values, step))
    module.end_run = lambda: calls.append(("end",))
    return calls


def log(folder: Path, name: str, from_step: int = 0) -> list[str]:
    """Metrics of one step, one of them not finite; returns what was said."""
    said: list[str] = []
    metrics = MetricsLog(folder, from_step, Tracking(name, folder, config.Config(), said.append))
    metrics.write({"step": from_step + 1, "loss": 2.5, "grad_norm": float("nan")})
    metrics.close()
    return said


def test_wandb_gets_settings_and_metrics_and_goes_on_in_the_same_run(tmp_path: Path, wandb: list[Any]) -> None:
    assert log(tmp_path, "wandb") == []
    (_, init), *rest = wandb
    assert (init["project"], init["name"], init["id"], init["resume"]) == ("mtjax", tmp_path.name, None, "allow")
    assert init["config"]["model"]["hidden_size"] == config.Model().hidden_size
    assert rest == [
        ("define", "step", None),
        ("define", "*", "step"),
        ("log", {"step": 1, "loss": 2.5}),
        ("finish",),
    ]
    wandb.clear()
    log(tmp_path, "wandb", from_step=1)
    assert wandb[0][1]["id"] == "abc"


def test_a_copied_run_is_a_run_of_its_own_and_a_moved_one_is_not(tmp_path: Path, wandb: list[Any]) -> None:
    (tmp_path / "run").mkdir()
    log(tmp_path / "run", "wandb")
    copied = shutil.copytree(tmp_path / "run", tmp_path / "copied")
    wandb.clear()
    log(copied, "wandb", from_step=1)
    assert wandb[0][1]["id"] is None
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    wandb.clear()
    log(moved, "wandb", from_step=1)
    assert wandb[0][1]["id"] == "abc"


def test_mlflow_gets_settings_once_and_metrics(tmp_path: Path, mlflow: list[Any]) -> None:
    assert log(tmp_path, "mlflow") == []
    assert mlflow[0] == ("start", {"run_id": None, "run_name": tmp_path.name})
    assert mlflow[1][0] == "params"
    assert mlflow[1][1]["optimizer.beta2"] == str(config.Config().optimizer.beta2)
    assert mlflow[2:] == [("metrics", {"loss": 2.5}, 1), ("end",)]
    mlflow.clear()
    log(tmp_path, "mlflow", from_step=1)
    assert mlflow == [("start", {"run_id": "1f2e", "run_name": None}), ("metrics", {"loss": 2.5}, 2), ("end",)]


def test_a_tracker_that_fails_is_one_note_and_the_metrics_stay(tmp_path: Path, wandb: list[Any]) -> None:
    def init(**_: Any) -> Any:
        raise ConnectionError("no network\nand a page more")

    sys.modules["wandb"].init = init  # pyright: ignore[reportAttributeAccessIssue]
    assert log(tmp_path, "wandb") == [
        "note    wandb failed, and the run continues without it: ConnectionError: no network"
    ]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.5, "grad_norm": None}


def test_a_tracker_that_is_not_installed_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="--track mlflow needs the package mlflow: pip install mlflow"):
        check_tracker("mlflow")
    check_tracker(None)
