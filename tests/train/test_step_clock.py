"""What counts as a step that takes too long, and what is written then."""

import time

from mtjax.config import Parallel
from mtjax.runtime.processes.peers import Peers
from mtjax.train.observability import step_clock
from mtjax.train.observability.step_clock import StepClock


def clock_of(folder, said, limit=None):
    return StepClock(4, folder, limit, Peers(Parallel()), said.append)


def test_the_first_lap_compiles_and_sets_no_median(tmp_path):
    clock = clock_of(tmp_path, [])
    clock.begin(5)
    assert clock.lap(5) > 0
    clock.begin(6)
    assert clock.allowed() is None
    assert clock_of(tmp_path, [], limit=7.0).allowed() == 7.0


def test_ten_times_the_median_is_allowed_besides_the_steps_that_were_given_before(tmp_path, monkeypatch):
    """The host is ahead of the devices by up to a lap: their time is not the last step's."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = clock_of(tmp_path, [])
    clock.begin(5)
    clock.lap(5)
    for step, seconds in ((6, 20), (7, 30), (8, 400)):
        clock.begin(step)
        now[0] += seconds
        assert clock.lap(step) == seconds
    for step in (9, 10, 11):
        clock.begin(step)
    assert clock.allowed() == 2 * 30 + 10 * 30
    clock.pause("validation")
    clock.restart(11)
    clock.begin(12)
    assert clock.allowed() == 10 * 30


def test_stacks_are_written_once(tmp_path, monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr(step_clock, "LOOK", 0.01)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])  # else a busy machine would be late for step 6, too
    with clock_of(tmp_path, said, limit=1.0) as clock:
        clock.begin(5)
        wait_for_a_word(said, now)
        time.sleep(0.1)
        clock.lap(5)
        clock.begin(6)
        clock.pause("save")
        now[0] = 100.0
        time.sleep(0.1)
    (word,) = said
    assert "step 5 takes far longer than earlier steps: Python stacks are in" in word
    stacks = (tmp_path / "stacks" / "step-5-process-0.txt").read_text()
    assert "in wait_for_a_word" in stacks


def wait_for_a_word(said, now):
    now[0] = 2.0
    for _ in range(6000):
        if said:
            return
        time.sleep(0.01)


def test_who_is_late_is_named(tmp_path):
    said = []
    clock_of(tmp_path, said).write_stacks(5, "process 3 (gpu-1, pid 7)")
    assert "earlier steps; process 3 (gpu-1, pid 7) did not reach it: Python" in said[0]
