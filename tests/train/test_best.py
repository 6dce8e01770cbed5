"""The best checkpoint of a run that is resumed before it, and one that can't be saved."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtjax import storage
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.saves import Saves
from mtjax.storage import names_in, write_bytes
from mtjax.train.loop import keep_best
from mtjax.train.observability.best import Best, Goal
from mtjax.train.setup import BestCheckpoint, open_best


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
    open_best(environment, 85)
    kept = names_in("s3://bucket/run/best") if is_remote else [path.name for path in (tmp_path / "best").iterdir()]
    assert kept == ["80"]


def test_a_best_checkpoint_that_cannot_be_saved_counts_as_a_failed_save(tmp_path: Path) -> None:
    """`max_failed_saves` applies to it as to every save that is not the run's final one."""
    (tmp_path / "best").mkdir()
    said = list[str]()
    checkpoints: Any = SimpleNamespace(folder=tmp_path / "best", newest_on_disk=lambda: None)
    saves = Saves(checkpoints, 1, lambda: "mtjax train --resume", said.append)
    best = BestCheckpoint(Best(Goal("valid_loss", higher_is_better=False)), saves)
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
