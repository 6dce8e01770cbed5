"""The best checkpoint of a run that is resumed before it, and one that can't be saved."""

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mtjax import storage
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.saves import Saves
from mtjax.storage import names_in, write_bytes
from mtjax.train.best_checkpoint import BestCheckpoint, open_best, open_best_checkpoint
from mtjax.train.loop import keep_best
from mtjax.train.observability.best import Best, Goal

LOSS = Goal("valid_loss", higher_is_better=False, patience=3)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_best_checkpoint_of_a_step_that_is_trained_again_is_removed(
    is_remote: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later one would outlive each better one that the resumed run saves before that step."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    monkeypatch.setattr(storage, "filesystem", lambda url: memory)
    out = Path("s3:/bucket/run") if is_remote else tmp_path
    for step in (80, 90):
        for name in ("page/metadata", "state/step/c/0"):
            if is_remote:
                write_bytes(f"s3://bucket/run/best/{step}/{name}", b"{}")
            else:
                (tmp_path / f"best/{step}/{name}").parent.mkdir(parents=True)
                (tmp_path / f"best/{step}/{name}").write_bytes(b"{}")
    remote = SimpleNamespace(upload=lambda: None) if is_remote else None
    environment: Any = SimpleNamespace(is_first_process=True, remote=remote, out=out, folder=tmp_path)
    assert open_best(environment, 85)[1] == 80  # what is left there
    kept = names_in("s3://bucket/run/best") if is_remote else [path.name for path in (tmp_path / "best").iterdir()]
    assert kept == ["80"]


def test_a_best_checkpoint_that_cannot_be_saved_counts_as_a_failed_save(tmp_path: Path) -> None:
    """`max_failed_saves` applies to it as to every save that is not the run's final one."""
    (tmp_path / "best").mkdir()
    said = list[str]()
    checkpoints: Any = SimpleNamespace(folder=tmp_path / "best", newest_on_disk=lambda: None)
    saves = Saves(checkpoints, 1, lambda: "mtjax train --resume", said.append)
    best = BestCheckpoint(Best(LOSS), Best(LOSS), saves)
    clock: Any = SimpleNamespace(pause=lambda part: None, restart=lambda step: None)
    run: Any = SimpleNamespace(best=best, config=None)
    (tmp_path / "best").rename(tmp_path / "moved")
    (tmp_path / "best").mkdir()
    state: Any = SimpleNamespace(step=10)
    assert not keep_best(run, {"step": 10, "valid_loss": 2.0}, state, 80, clock)
    (note,) = said
    assert "step 10 could not be saved" in note and "if more than 1 saves in a row fail" in note
    state.step = 20
    with pytest.raises(UserError, match="step 20 could not be saved"):
        keep_best(run, {"step": 20, "valid_loss": 1.0}, state, 160, clock)


def test_after_a_failed_save_the_next_better_one_than_the_kept_is_saved(tmp_path: Path) -> None:
    """Although it is worse than the one that could not be saved, which is the best and counts for patience."""
    works, saved = {10, 30, 40}, list[int]()

    def save(state: Any, *_: object, **__: object) -> bool:
        saved.append(state.step)
        return state.step in works

    best = BestCheckpoint(Best(LOSS), Best(LOSS), cast(Any, SimpleNamespace(save=save)))
    clock: Any = SimpleNamespace(pause=lambda part: None, restart=lambda step: None)
    run: Any = SimpleNamespace(best=best, config=None)

    def validate(step: int, loss: float) -> bool:
        return keep_best(run, {"step": step, "valid_loss": loss}, cast(Any, SimpleNamespace(step=step)), step, clock)

    assert not validate(10, 3.0)
    assert not validate(20, 1.0)
    kept = "of which there is no checkpoint (best/ holds that of step 10 with 3.0000)"
    assert best.describe() == f", best loss 1.0000 after step 20, {kept}"
    assert not validate(30, 2.0)
    assert not validate(40, 2.5)
    assert (saved, best.held.step, best.validation.step) == ([10, 20, 30], 30, 20)
    assert validate(50, 1.5)  # the third after the best
    assert saved == [10, 20, 30, 50]
    # A resumed run has the metrics, and finds in best/ what could be saved.
    history = [(10, 3.0), (20, 1.0), (30, 2.0), (40, 2.5)]
    lines = (json.dumps({"step": step, "valid_loss": loss}) + "\n" for step, loss in history)
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "best/30/page").mkdir(parents=True)
    environment: Any = SimpleNamespace(is_first_process=True, remote=None, out=tmp_path, folder=tmp_path)
    with contextlib.ExitStack() as stack:
        resumed = open_best_checkpoint(LOSS, Config(), environment, 40, stack, lambda _: None)
    assert resumed is not None
    assert (resumed.validation.step, resumed.validation.since, resumed.held.step) == (20, 2, 30)


def test_a_folder_without_a_best_checkpoint_gets_the_next(tmp_path: Path) -> None:
    """One of a later step was removed on resume: nothing may be there, and a better one may not come."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "valid_loss": 1.0}\n')
    environment: Any = SimpleNamespace(is_first_process=True, remote=None, out=tmp_path, folder=tmp_path)
    with contextlib.ExitStack() as stack:
        best = open_best_checkpoint(LOSS, Config(), environment, 10, stack, lambda _: None)
    assert best is not None and best.held.is_better({"step": 20, "valid_loss": 1.5})
    assert not best.held.is_better({"step": 20, "valid_loss": float("nan")})
    assert not best.held.is_better({"step": 20})
    assert best.describe().endswith("after step 10, of which there is no checkpoint (best/ is empty)")
