"""The mesh of a cluster on one CPU: hundreds of virtual devices train with the numbers of one."""

import pytest

from tests.end_to_end.runs import MASKS, Launcher, relative_difference

pytestmark = pytest.mark.usefixtures("bare_end")
SMALL = ["--global-batch-size", "64", "--sequence-length", "16", *MASKS]


@pytest.mark.parametrize(
    ("mesh", "steps"),
    [
        pytest.param("8x8", 3, marks=pytest.mark.long),
        pytest.param("32x8", 5, marks=pytest.mark.exhaustive),
        pytest.param("64x8", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_losses_equal_those_of_one_device(mesh: str, steps: int, launcher: Launcher) -> None:
    """Dropout is on: the masks don't depend on the mesh. 512 devices are two processes, and a step takes a minute."""
    alone = launcher.train_here(f"alone-of-{mesh}", "--mesh", "1x1", "--steps", str(steps), *SMALL)
    cluster = launcher.train(f"cluster-{mesh}", "--mesh", mesh, "--steps", str(steps), *SMALL, timeout=900)
    assert "virtual CPU devices" in cluster.stdout
    assert len(cluster.losses) == steps
    assert relative_difference(cluster.losses, alone.losses) < 1e-5


@pytest.mark.exhaustive
def test_three_steps_on_16_devices_equal_those_of_one(launcher: Launcher) -> None:
    """More than the 8 of other tests, and both axes at once."""
    alone = launcher.train_here("alone-of-4x4", "--mesh", "1x1", "--steps", "3")
    cluster = launcher.train("cluster-4x4", "--mesh", "4x4", "--steps", "3")
    assert relative_difference(cluster.losses, alone.losses) < 1e-5


@pytest.mark.long
def test_a_mesh_of_the_planners_choice_takes_the_devices_of_all_processes(launcher: Launcher) -> None:
    """One CPU device each; the run's config says which mesh it was."""
    chosen = launcher.train_together("auto", "--mesh", "auto", "--steps", "1", "--global-batch-size", "8")[0]
    assert "mesh    2x1 (data x model): 2 virtual CPU devices in 2 processes" in chosen.stdout
    assert 'mesh = "2x1"' in (chosen.out / "config.toml").read_text()
