"""What tests of processes and signals share, and what the products of layouts do."""

import signal

import jax
import pytest

from tests.tiny import forget_programs


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's programs have it, also where the suite runs under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _forget_programs(request):
    """Programs of an exhaustive product, or Linux' limit of 65,530 memory maps ends the process after 64 of them."""
    yield
    if request.node.get_closest_marker("exhaustive"):
        forget_programs()
        jax.clear_caches()
