"""Who is lost, and what is said about it: from made-up pulses. Real processes are killed in end_to_end."""

import os
from types import SimpleNamespace

import pytest

from mtjax.config import Parallel, validate
from mtjax.errors import LOST, UserError
from mtjax.runtime.processes.peers import HeartbeatMonitor, Peers, Pulse
from tests.tiny import tiny_config

WHO = ["a, pid 1", "b, pid 2", "c, pid 3"]


def heard(*steps, **of_last):
    """Pulses of processes at these steps, in the order of the processes."""
    pulses = {i: Pulse(step, f"step {step}", step) for i, step in enumerate(steps)}
    if of_last:
        pulses[len(steps) - 1] = Pulse(steps[-1], f"step {steps[-1]}", steps[-1], **of_last)
    return pulses


def test_a_process_whose_pulse_stands_still_is_lost():
    roll = HeartbeatMonitor(WHO, silence=10)
    assert roll.verdict(heard(1, 1, 1), now=100).lost == ()
    assert roll.verdict(heard(2, 2, 1), now=110).lost == ()
    assert roll.verdict(heard(3, 3, 1), now=111).lost == ((2, "stopped responding at step 1", LOST),)
    assert roll.verdict(heard(4, 4, 2), now=112).lost == ()  # a long pause of its machine


def test_a_process_that_never_left_a_pulse_is_lost_too():
    roll = HeartbeatMonitor(WHO, silence=10)
    roll.verdict(heard(1, 1), now=100)
    assert roll.verdict(heard(2, 2), now=111).lost == ((2, "stopped responding at the start", LOST),)


def test_a_process_that_ended_says_why_and_comes_before_those_that_it_silenced():
    roll = HeartbeatMonitor(WHO, silence=10)
    roll.verdict(heard(1, 1, 1), now=100)
    verdict = roll.verdict(heard(2, 1, 1, ended="no file matches 'x'", code=2), now=111)
    assert verdict.lost == ((2, "ended: no file matches 'x'", 2),)


def test_who_has_not_come_to_a_step_that_takes_too_long_is_late():
    roll = HeartbeatMonitor(WHO, silence=10)
    verdict = roll.verdict(heard(7, 6, 7, overdue=True), now=100)
    assert (verdict.overdue_step, verdict.late) == (7, (1,))


def test_one_process_has_no_peers_and_gives_its_folder_back():
    given_back = []
    with Peers(Parallel()) as peers:
        peers.at_end = lambda: given_back.append(True)
        assert peers.count == 1
    assert given_back == [True]
    with pytest.raises(UserError), Peers(Parallel()) as peers:
        peers.at_end = lambda: given_back.append(True)
        raise UserError("no")
    assert given_back == [True, True]


def test_a_long_error_is_said_in_full_here_and_in_short_to_the_others(monkeypatch, capsys):
    def ended(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    peers = Peers(Parallel(peer_timeout=1.0))
    peers._stderr = SimpleNamespace(flush=lambda: None)
    with pytest.raises(SystemExit, match="2"):
        peers._leave(UserError("weights of another model:\n  hidden_size is 64 there and 128 here"))
    assert capsys.readouterr().err == "error: weights of another model:\n  hidden_size is 64 there and 128 here\n"
    assert peers._pulse.ended == "weights of another model:"


@pytest.mark.parametrize("wrong", [{"peer_timeout": 0.5}, {"step_timeout": 1e300}])
def test_times_have_bounds(wrong):
    with pytest.raises(UserError, match=r"_timeout is \S+, and must be from 1 to 604800 seconds"):
        validate(tiny_config(**wrong))
