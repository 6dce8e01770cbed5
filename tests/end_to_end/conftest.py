import pytest

from tests.end_to_end.runs import MASKS, Finished, Launcher


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """One folder for all runs: they differ by --out."""
    return Launcher.prepare(tmp_path_factory.mktemp("end_to_end"))


@pytest.fixture(scope="session")
def uninterrupted(launcher: Launcher) -> Finished:
    """20 steps on 2x4 with dropout, start to end: what interrupted runs must equal."""
    return launcher.train_here("uninterrupted", "--steps", "20", *MASKS)
