"""Eight virtual CPU devices, compiled programs shared between tests and runs, and what needs an extra."""

import ctypes
import gc
import json
import os
import resource
import sys
from collections.abc import Generator, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
# Compiling is what tests spend their time on. LLVM's optimisations cost more than they save here, and kernels written
# by XLA's older emitters compile in half the time. A program is not cut up to be compiled in parallel: the workers are.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jax").startswith("0.10."):  # a flag that XLA does not know ends the process
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    QUICK += " --xla_gpu_force_compilation_parallelism=1 --xla_gpu_disable_gpuasm_optimizations=true"
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MTJAX_QUIET", "1")  # what a test reads must not depend on how long a command takes
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Where in Python an operation was written goes with it through all of XLA's passes, and takes a tenth of their time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import hypothesis
import jax
import numpy as np
import pytest
from orbax.checkpoint._src.serialization import replica_slices

from mtjax.cli import GARBAGE
from mtjax.runtime.devices import THREADS_PER_DEVICE
from tests import assembler

gc.set_threshold(*GARBAGE)
os.environ.setdefault("NPROC", str(8 * THREADS_PER_DEVICE))
jax.config.update("jax_num_cpu_devices", 8)
if os.environ["JAX_PLATFORMS"] == "cpu":
    assembler.leave_out(CACHE.parent)
# Of a busy machine nothing can be said; and a test that fails once in a while tells of no change.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")

GROUPS = (
    ("parity/test_resumed.py", "parity/test_torch_dist.py"),  # minutes in four processes
    (
        "train",
        "runtime",
        "sharding/test_zero.py",
        "models/test_gpt.py",
        "models/test_recompute.py",
        "convert/test_init_from.py",
    ),
    ("end_to_end",),
    ("models",),
    ("inspect", "plan/test_verify.py"),
    ("data/test_datasets.py", "data/tokens/test_word_cache.py"),
    ("serve",),
)
"""Folders and files whose tests share programs or a corpus: one worker runs a group, and the longest begin first."""


def group_of(path: str) -> int:
    """The number of a file's group: the first that names it, else the first that names its folder."""
    for wanted in (path, path.partition("/")[0]):
        for number, members in enumerate(GROUPS):
            if wanted in members:
                return number
    return len(GROUPS)


@pytest.fixture(autouse=True, scope="session")
def eight_devices() -> None:
    """Uses them, which fixes their number: a command on one device would else leave one to all tests behind it."""
    assert os.environ["JAX_PLATFORMS"] != "cpu" or len(jax.devices()) == 8


@pytest.fixture(autouse=True, scope="session")
def sliced_by_numpy() -> Iterator[None]:
    """Orbax cuts what several devices hold, so that each writes a part: on CPUs a copy, for which it compiles a program
    of each shape, place and device, a hundred for a tiny run's first checkpoint."""

    def data(part: Any) -> Any:
        whole, cut = part.unsliced_data, part.slice_args
        if cut is None:
            return whole
        place = (*[slice(None)] * cut.axis, slice(cut.start_index, cut.limit_index))
        return jax.device_put(np.asarray(whole)[place], whole.sharding)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_slices.ReplicaSlice, "data", data)
        yield


@pytest.fixture(scope="module")
def bare_end() -> Iterator[None]:
    """Ends runs in this process without pictures and a text, which take two fifths of a short run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mtjax.train.loop.plot_losses", lambda *_: None)
        patch.setattr("mtjax.train.observability.goodput.plot", lambda *_: None)
        patch.setattr("mtjax.generate.training_sample.continue_text", lambda *_: "")
        yield


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles for GPUs with the real ptxas."""
    monkeypatch.setattr(assembler.lib, "cuda_path", assembler.REAL)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs an extra, skips it where that is not installed, and begins with the first group."""
    has_aot = find_spec("jax_cuda13_plugin") is not None
    order = {}
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith("parity/") or hasattr(getattr(item, "module", None), "torch"):
            item.add_marker("torch")
        if item.get_closest_marker("aot") and not has_aot:
            item.add_marker(pytest.mark.skip(reason="compiling for GPUs that are not there needs the extra aot"))
        order[item] = group_of(path)
    items.sort(key=order.__getitem__)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--same-numbers", help="note in this JSON file what tests compared with one device, and passed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Notes what a test has compared with one device (tests/same_numbers.py), and how often it runs."""
    noted = sys.modules.get("tests.same_numbers")
    if noted is not None:
        noted.compared.clear()
    yield
    if noted is not None and noted.compared:
        level = next((mark for mark in ("exhaustive", "long") if item.get_closest_marker(mark)), "suite")
        item.user_properties.append(("same_numbers", {"level": level, "programs": list(noted.compared)}))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees compiled programs between files where they fill the memory: a worker had 11 GiB of them at the end."""
    if nextitem is not None and nextitem.path != item.path and _resident() > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)  # of glibc


MOST_RESIDENT = 5 * 2**30


def _resident() -> int:
    """Bytes of this process in memory, as Linux tells; 0 elsewhere."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        for note in (value for name, value in report.user_properties if name == "same_numbers"):
            _passed[report.nodeid] = note


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Adds to the file what passed in this run, of the process that has all reports."""
    if (name := session.config.getoption("--same-numbers")) and not hasattr(session.config, "workerinput"):
        path = Path(name)
        known = json.loads(path.read_text())["tests"] if path.exists() else {}
        from tests.same_numbers import FEATURES, MESHES

        tests = dict(sorted((known | _passed).items()))
        path.write_text(json.dumps({"features": [*FEATURES], "meshes": [*MESHES], "tests": tests}, indent=0) + "\n")


_passed: dict[str, Any] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` each group, and each file without one, goes to one worker as a whole.

    xdist's own groups are written into the tests' ids, which pytest 9.2 does not let it do.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0].removeprefix("tests/")
            number = group_of(path)
            return GROUPS[number][0] if number < len(GROUPS) else path

    return ByGroup(config, log)
