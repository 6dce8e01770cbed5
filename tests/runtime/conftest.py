"""What tests of processes and signals share."""

import signal

import pytest


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's programs have it, also where the suite runs under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
