"""What asks a run to stop; that it saves then is shown with real runs in end_to_end."""

import signal

import pytest

from mtjax.runtime.processes.signals import StopRequest


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")]
)
def test_a_signal_stops_the_run_after_its_step_and_is_then_as_before(number, name, hangup):
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.at(1) is None
        signal.raise_signal(number)
        assert stop.at(2) == name
    assert signal.getsignal(number) == before


def test_what_nohup_ignores_stays_ignored(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.at(1) is None
