"""Eight virtual CPU devices, compiled programs shared between tests and runs, and what needs an extra."""

import os
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "xla"
# Compiling is what tests spend their time on. LLVM's optimisations cost more than they save here, and kernels written
# by XLA's older emitters compile in half the time.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", QUICK)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
hypothesis.settings.register_profile("suite", deadline=None)  # of a busy machine nothing can be said
hypothesis.settings.load_profile("suite")

GROUPS = (
    ("end_to_end",),
    ("train", "sharding/test_zero.py", "models/test_gpt.py", "models/test_recompute.py", "convert/test_init_from.py"),
    ("inspect", "plan/test_verify.py"),
    ("models",),
)
"""Folders and files whose tests share compiled programs; a file that none names is a group of its own.

One worker runs a group, the longest begin first. Long tests share little and go to any worker, but for those that fill
the machine with processes.
"""


def group_of(path: str) -> int:
    """The number of a file's group: the first that names it, else the first that names its folder."""
    for wanted in (path, path.partition("/")[0]):
        for number, members in enumerate(GROUPS):
            if wanted in members:
                return number
    return len(GROUPS)


@pytest.hookimpl(wrapper=True)  # before -m chooses, and before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Marks what needs an extra, skips it where that is not installed, and puts tests that share programs together."""
    has_aot = find_spec("jax_cuda13_plugin") is not None
    order = {}
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith("parity/") or hasattr(getattr(item, "module", None), "torch"):
            item.add_marker("torch")
        if item.get_closest_marker("aot") and not has_aot:
            item.add_marker(pytest.mark.skip(reason="compiling for GPUs that are not there needs the extra aot"))
        order[item] = group_of(path)
        if order[item] == 0 or not item.get_closest_marker("long"):
            item.add_marker(pytest.mark.xdist_group(str(order[item]) if order[item] < len(GROUPS) else path))
    items.sort(key=order.__getitem__)
    yield
