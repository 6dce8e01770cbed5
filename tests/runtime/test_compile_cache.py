"""Compiled programs are kept in a folder of the user's, and a folder that can't be used is not an error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.runtime.compile_cache import OFF, CompileCache, describe_programs, remove_least_recent


@pytest.fixture
def no_folder_given() -> Iterator[None]:
    """As on a machine where JAX_COMPILATION_CACHE_DIR is not set."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def compute() -> float:
    """A program that no other test has; traced and looked up anew at each call."""
    return float(jax.jit(lambda x: jnp.sin(x) * 0.6180339 + 0.1620)(np.float32(1.0)))


RIGHT = pytest.approx(0.84147098 * 0.6180339 + 0.1620)


def test_a_second_start_finds_what_the_first_compiled(tmp_path: Path, no_folder_given: None) -> None:
    for found in (0, 1):
        with CompileCache(None, {"XDG_CACHE_HOME": str(tmp_path)}) as cache:
            assert compute() == RIGHT
        assert (cache.requested, cache.found) == (1, found)
        assert cache.folder == str(tmp_path / "mtjax" / "programs")
        assert f"{found} of 1 programs" in describe_programs(cache)
    assert len(list((tmp_path / "mtjax" / "programs").glob("*-cache"))) == 1
    assert (tmp_path / "mtjax" / "programs").stat().st_mode & 0o077 == 0  # who writes there runs code here
    assert jax.config.jax_compilation_cache_dir is None


def test_the_option_comes_before_the_variable_and_that_before_the_users_folder(
    tmp_path: Path, no_folder_given: None
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "user")}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "variable"))  # as jax reads the variable
    with CompileCache(str(tmp_path / "option"), environment) as cache:
        assert cache.folder == jax.config.jax_compilation_cache_dir == str(tmp_path / "option")
    with CompileCache(None, environment) as cache:
        assert cache.folder == jax.config.jax_compilation_cache_dir == str(tmp_path / "variable")
    with CompileCache(OFF, environment) as cache:
        assert cache.folder is jax.config.jax_compilation_cache_dir is None
        assert compute() == RIGHT
    assert not (tmp_path / "user").exists()


def test_a_folder_that_cant_be_made_is_one_note(tmp_path: Path, no_folder_given: None) -> None:
    (tmp_path / "file").write_text("")
    with CompileCache(str(tmp_path / "file" / "programs")) as cache:
        assert compute() == RIGHT
    assert cache.note == f"compiled programs are not cached: Not a directory: {tmp_path / 'file' / 'programs'}"


def test_a_damaged_program_is_compiled_again_and_replaced(tmp_path: Path, no_folder_given: None) -> None:
    with CompileCache(str(tmp_path)):
        compute()
    (entry,) = tmp_path.glob("*-cache")
    whole = entry.read_bytes()
    entry.write_bytes(whole[: len(whole) // 2])  # a start was killed while it wrote
    with CompileCache(str(tmp_path)) as cache:
        assert compute() == RIGHT  # and jax's warning would be an error here
    assert cache.found == 0
    assert f"could not be read from or written to {tmp_path}" in describe_programs(cache)
    with CompileCache(str(tmp_path)) as cache:
        assert compute() == RIGHT
    assert (cache.found, cache.failures) == (1, "")


def test_what_was_used_least_recently_goes_first(tmp_path: Path, no_folder_given: None) -> None:
    for number, name in enumerate("abcd"):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1000 + number, 1000 + number))
    os.utime(tmp_path / "a-cache", (2000, 1000))  # read since
    (tmp_path / "other").write_bytes(bytes(1000))
    remove_least_recent(tmp_path, 250)
    assert {path.name for path in tmp_path.iterdir()} == {"a-cache", "d-cache", "other"}
    with CompileCache(str(tmp_path), limit=100):
        assert {path.name for path in tmp_path.glob("*-cache")} == {"a-cache"}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    with CompileCache(None, {}, limit=0):
        assert list(tmp_path.glob("*-cache"))  # a folder that the environment names is not ours to clear


@pytest.mark.long
def test_programs_are_never_shared_between_cpus_of_different_features(tmp_path: Path) -> None:
    """jax's keys hold a fingerprint of the devices, and that of CPUs holds the features XLA compiles for."""
    ask = "import jax; from jax._src.lib import xla_client as x\n"
    ask += "print(x.get_topology_for_devices(jax.devices()).fingerprint())"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    seen = [
        subprocess.run(
            [sys.executable, "-c", ask], env=environment | flags, capture_output=True, text=True, check=True
        ).stdout
        for flags in ({}, {}, {"XLA_FLAGS": "--xla_cpu_max_isa=SSE4_2"})
    ]
    assert seen[0] == seen[1] != seen[2]
