"""Compiled steps that several tests look at; each costs seconds, so each is made once."""

import pytest

from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from tests.inspect.steps import tiny


@pytest.fixture(scope="session")
def cpu_report() -> Report:
    """2x4 on virtual CPUs, two microbatches, full recompute."""
    return inspect(tiny(), find_target("cpu"))


@pytest.fixture(scope="session")
def gpu_report() -> Report:
    """2x4 in one server of H100s, two microbatches, full recompute, flash attention where cuDNN is installed."""
    return inspect(tiny(), find_target("h100x8"))


@pytest.fixture(scope="session")
def two_servers_report() -> Report:
    """2x4 in two servers of four H100s, one microbatch, no recompute, attention written out."""
    config = tiny(recompute="none", microbatch_size=None, attention="xla")
    return inspect(config, find_target("h100x4"))


@pytest.fixture(scope="session")
def data_parallel_report() -> Report:
    """4x1 over two servers of two H100s."""
    return inspect(tiny(mesh="4x1", microbatch_size=1), find_target("h100x2"))
