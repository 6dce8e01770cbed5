"""What is said while a command is silent: what takes long is named, what is over is not, and one process speaks."""

import threading

import pytest

from mtjax import waiting
from mtjax.waiting import Waiting, is_first


def test_an_activity_is_named_again_while_it_lasts_and_not_after_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waiting.QUIET, "0")
    monkeypatch.setattr(waiting, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "SECONDS_BETWEEN_LINES", 0.0)
    said, twice = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            twice.set()
            threading.Event().wait()  # this thread says nothing more

    current = Waiting(say)
    current.begin("compiling")
    assert twice.wait(300)
    current.begin(None)
    assert [line.startswith("compiling ...") for line in said] == [True, True]


def test_an_activity_that_is_over_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(waiting.QUIET, "0")
    said = list[str]()
    current = Waiting(said.append)
    current.begin("restoring")
    timer = current._timer
    assert timer is not None
    current.begin(None)
    timer.function()  # as if it had been too late to cancel it
    assert not said and timer.finished.is_set()


@pytest.mark.parametrize(
    ("environ", "argv", "first"),
    [
        ({}, ["mtjax", "train"], True),
        ({"SLURM_PROCID": "0", "RANK": "0"}, ["mtjax"], True),
        ({"SLURM_PROCID": "3"}, ["mtjax"], False),
        ({}, ["mtjax", "train", "--process-id", "1"], False),
    ],
)
def test_one_process_speaks(environ: dict[str, str], argv: list[str], first: bool) -> None:
    assert is_first(environ, argv) is first
