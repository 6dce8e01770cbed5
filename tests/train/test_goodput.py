"""Where the time of a run went, over its starts: every second once, and what a crash cost as lost."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from mtjax.train.observability.goodput import (
    AGAIN,
    BINS,
    DOWN,
    FILE,
    TimeLog,
    goodput,
    in_columns,
    plot,
    read_lines,
    spans,
    totals,
)
from mtjax.train.observability.start_timer import (
    ACTIVITIES,
    COMPILATION,
    DATA,
    IMPORTS,
    SAVE,
    START,
    STEPS,
    SUMMARY,
    TEXT,
    VALIDATION,
    StartTimer,
    by_activity,
)


class Clock:
    """Of a test's own; `time` is also the time of day."""

    def __init__(self, time: float = 0.0) -> None:
        self.time = time

    def __call__(self) -> float:
        return self.time


class Result:
    """What a step gives, which is ready at some time."""

    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self._at = clock, at

    def is_ready(self) -> bool:
        return self._clock.time >= self._at


def test_every_second_belongs_to_one_activity() -> None:
    clock = Clock()
    times = StartTimer(clock)
    for activity, until in ((TEXT, 2.0), (STEPS, 3.0), (SAVE, 10.0), (STEPS, 12.0)):
        clock.time = until
        times.begin(activity)
    clock.time = 15.0
    assert times.seconds() == {IMPORTS: 2.0, TEXT: 1.0, STEPS: 10.0, SAVE: 2.0}
    assert {name: s for name, s in by_activity(times.seconds()).items() if s} == {START: 3.0, STEPS: 10.0, SAVE: 2.0}


def test_compiling_is_taken_from_what_goes_on_and_never_counted_twice() -> None:
    clock = Clock()
    times = StartTimer(clock)
    times.begin(STEPS)
    trace = "/jax/core/compile/jaxpr_trace_duration"
    for end, seconds in ((3.0, 1.0), (5.0, 1.5), (8.0, 7.0), (9.0, 0.5)):  # the third one holds the first two
        clock.time = end
        times._compiled(trace, seconds)
    times._compiled("/jax/other", 5.0)
    clock.time = 10.0
    assert times.seconds() == {IMPORTS: 0.0, STEPS: 2.5, COMPILATION: 7.5}


@pytest.mark.parametrize(("ready", "counted"), [(None, 4.0), (9.0, 4.0), (12.0, 2.0), (20.0, 0.0)])
def test_a_wait_for_data_counts_when_the_devices_wait_too(ready: float | None, counted: float) -> None:
    clock = Clock(10.0)
    times = StartTimer(clock)
    times.begin(STEPS)
    with times.waiting(None if ready is None else {"loss": Result(clock, ready)}):
        clock.time = 14.0
    assert times.seconds().get(DATA, 0.0) == counted
    assert sum(times.seconds().values()) == 4.0


def start(folder: Path, clock: Clock, from_step: int) -> tuple[StartTimer, TimeLog]:
    """A start that takes 5 seconds until its first step."""
    times = StartTimer(clock)
    clock.time += 5.0
    times.begin(STEPS)
    return times, TimeLog(folder, from_step, times, clock)


def do_steps(log: TimeLog, clock: Clock, steps: range, seconds: float = 1.0) -> None:
    for step in steps:
        clock.time += seconds
        log.write(step)


def test_a_crash_costs_the_steps_behind_the_checkpoint_and_the_time_until_the_next_start(tmp_path: Path) -> None:
    clock = Clock(1000.0)
    times, log = start(tmp_path, clock, 0)
    do_steps(log, clock, range(1, 6))
    times.begin(SAVE)
    clock.time += 2.0
    times.begin(STEPS)
    log.write(5)
    do_steps(log, clock, range(6, 9))
    clock.time += 0.5  # of a step that is never finished: killed
    with (tmp_path / FILE).open("a") as file:
        file.write('{"start": 1000.0, "from_st')
    clock.time += 60.0

    times, log = start(tmp_path, clock, 5)
    do_steps(log, clock, range(6, 11))
    times.begin(SUMMARY)
    clock.time += 1.0
    whole = log.totals()
    assert {name: s for name, s in whole.items() if s} == pytest.approx(
        {START: 10.0, STEPS: 10.0, SAVE: 2.0, AGAIN: 3.0, DOWN: 60.5, SUMMARY: 1.0}
    )
    assert sum(whole.values()) == pytest.approx(clock.time - 1000.0)
    assert log.metrics()["goodput"] == goodput(whole) == pytest.approx(10.0 / 86.5)
    assert log.metrics()["time/done_again"] == 3.0
    words = log.describe()
    assert words.startswith("86 s in 2 starts: down 70%, start-up 12%, steps 12%, done again 3%")
    assert words.endswith("(start-up: imports 5.0 s)")


def test_time_between_an_end_and_a_later_start_is_nobodys(tmp_path: Path) -> None:
    clock = Clock(50.0)
    _, log = start(tmp_path, clock, 0)
    do_steps(log, clock, range(1, 4))
    log.write(3, ended=True)
    clock.time += 86_400.0
    _, log = start(tmp_path, clock, 3)
    do_steps(log, clock, range(4, 6))
    assert {name: s for name, s in log.totals().items() if s} == {START: 10.0, STEPS: 5.0}


def test_a_start_that_falls_back_further_loses_what_two_had_done(tmp_path: Path) -> None:
    clock = Clock()
    for from_step, steps in ((0, range(1, 5)), (4, range(5, 8)), (2, range(3, 9))):
        _, log = start(tmp_path, clock, from_step)
        do_steps(log, clock, steps)
    assert {name: s for name, s in log.totals().items() if s} == {START: 15.0, STEPS: 8.0, AGAIN: 5.0}


def test_lines_that_are_none_are_left_out(tmp_path: Path) -> None:
    good = {"start": 1.0, "from_step": 0, "step": 2, "at": 9.0, "seconds": {STEPS: 3.0}}
    odd = ["", "[1]", "7", "{}", '{"start": 1', json.dumps(good | {"seconds": 3}), json.dumps(good | {"at": "x"})]
    odd += [json.dumps(good | {"seconds": {STEPS: float("nan")}}), json.dumps(good | {"more": 1}), "[" * 9999]
    (tmp_path / FILE).write_text("\n".join([*odd, json.dumps(good), *odd]))
    assert [line.step for line in read_lines(tmp_path / FILE)] == [2]
    assert read_lines(tmp_path / "none") == []


def test_the_picture_shows_every_second_in_its_place(tmp_path: Path) -> None:
    clock = Clock()
    for from_step, steps in ((0, range(1, 5)), (2, range(3, 9))):
        times, log = start(tmp_path, clock, from_step)
        do_steps(log, clock, steps)
        times.begin(VALIDATION)
        clock.time += 3.0
        times.begin(STEPS)
        log.write(steps[-1])
    of = spans(read_lines(tmp_path / FILE))
    whole = totals(of)
    columns = in_columns(of, sum(whole.values()))
    assert np.sum(list(columns.values()), axis=0) == pytest.approx(np.ones(BINS))
    assert all(columns[name].mean() * sum(whole.values()) == pytest.approx(whole[name]) for name in columns)
    assert columns[START][0] == pytest.approx(1.0)
    assert columns[VALIDATION][-1] == pytest.approx(1.0)
    assert set(columns) == {*ACTIVITIES, AGAIN, DOWN}
    plot(of, tmp_path / "goodput.png")
    assert imread(tmp_path / "goodput.png").std() > 0.05  # not blank
