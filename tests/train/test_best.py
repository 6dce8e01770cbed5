"""The best checkpoint of a run that is resumed before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtjax import storage
from mtjax.storage import names_in, write_bytes
from mtjax.train.setup import open_best


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
