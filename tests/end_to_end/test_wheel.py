"""The wheel works where no checkout is: the shipped configs are inside."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet", "--wheel-dir", str(folder)]
    subprocess.run(build, check=True)
    (built,) = folder.glob("mtjax-*.whl")
    return built


def test_it_holds_the_package_and_the_configs_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "configs").glob("*.toml"):
        assert f"mtjax/configs/{path.name}" in names
    assert "mtjax/train/loop.py" in names
    assert all(name.startswith("mtjax/") or ".dist-info/" in name for name in names)


def test_an_installed_wheel_trains_a_shipped_config(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which borrows the dependencies of this one."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    target = ["--no-deps", "--quiet", "--prefix", str(tmp_path / "venv"), "--ignore-installed"]
    subprocess.run([sys.executable, "-m", "pip", "install", *target, str(wheel)], check=True)
    borrowed = next(p for p in sys.path if p.endswith("site-packages"))
    # As a path, the borrowed folder's .pth file, which leads to the checkout, is not followed.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), borrowed])}
    (tmp_path / "text.txt").write_text("Some words that say little. " * 2000)
    where = "import mtjax; print(mtjax.__file__)"
    found = subprocess.run([python, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.stdout.startswith(str(site)), found.stdout + found.stderr

    options = ["--config", "gpt2-tiny", "--steps", "2", "--vocab-size", "1024", "--data", "text.txt"]
    command = [tmp_path / "venv" / "bin" / "mtjax", "train", *options, "--cache-dir", "cache", "--out", "run"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "loss.png").exists()
