"""A run saved by mtjax of November 2026, whose config and checkpoint have settings by the names of that time."""

import tarfile
from pathlib import Path

import pytest

from mtjax import config
from mtjax.runtime.checkpoints.corruption import read_metadata
from mtjax.runtime.checkpoints.past import Past
from tests.end_to_end.runs import Launcher

SAVED = Path(__file__).parent / "run_of_2026_11.tar.gz"
"""Two of four steps, on two expert-parallel ranks: see its config.toml."""
LOSS_OF_STEP_4 = 5.78337287902832
"""What mtjax of that time computed."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with tarfile.open(SAVED) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run"


def test_config_and_checkpoint_are_read_by_their_old_names(run: Path) -> None:
    page = read_metadata(run / "checkpoints" / "2")
    for read in (config.load(run / "config.toml"), Past.from_metadata(2, page).config):
        assert read.parallel.expert_dispatch == "all-to-all"
        assert read.parallel.grad_reduce_dtype == "bfloat16"
        assert read.model.router_aux_loss == 0.02
        assert read.training.max_nonfinite_steps == 3


@pytest.mark.long
def test_the_run_is_resumed(run: Path) -> None:
    launcher = Launcher(run.parent)
    finished = launcher.run_here("run", "--config", "run/config.toml", "--resume", is_told=False)
    assert finished.code == 0, finished.stderr
    assert "resumed from step 2" in finished.stdout and "changed since" not in finished.stdout
    assert "expert_method = exchange is now expert_dispatch = all-to-all (in run/config.toml)" in finished.stderr
    assert finished.losses[4] == pytest.approx(LOSS_OF_STEP_4, rel=1e-5)
