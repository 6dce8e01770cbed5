"""TensorBoard's event files, byte for byte those of tensorboardX."""

import sys

import pytest

from mtjax.train.folder.events import FIRST, START, record, scalar


def test_events_are_those_of_another_writer(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # tensorboardX imports it where it is installed: seconds
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar as summary

    time = 1234567890.123
    monkeypatch.setattr("time.time", lambda: time)
    theirs = EventsWriter(str(tmp_path / "events"))
    theirs.write_event(Event(wall_time=time, step=1, session_log=SessionLog(status=SessionLog.START)))
    numbers = [("loss", 1, 0.1), ("time/lost_steps", 300, float("nan")), ("x" * 200, 2**40, -1e30)]
    for name, step, value in numbers:
        theirs.write_event(Event(wall_time=time, step=step, summary=summary(name, value)))
    theirs.close()
    (path,) = tmp_path.iterdir()
    contents = [(0, FIRST), (1, START), *((step, scalar(name, value)) for name, step, value in numbers)]
    assert b"".join(record(time, *content) for content in contents) == path.read_bytes()


@pytest.mark.parametrize("value", [1e39, -1e39])
def test_a_number_beyond_32_bits_is_infinite(value):
    assert scalar("loss", value) == scalar("loss", value * float("inf"))
