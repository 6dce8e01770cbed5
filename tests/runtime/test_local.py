"""Processes of one run on this machine. Shell scripts stand for the processes, as far as they only speak and end."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from mtjax.errors import UserError
from mtjax.runtime.devices import MAX_CPU_DEVICES
from mtjax.runtime.processes import local
from mtjax.runtime.processes.local import Ended, Member, member_arguments, processes_needed, run_members
from tests.tiny import tiny_config


@pytest.mark.parametrize(("mesh", "count"), [("2x4", 1), ("32x8", 1), ("64x8", 2), ("96x8", 3), ("1x300", 2)])
def test_no_process_has_more_cpu_devices_than_xla_runs(mesh, count):
    assert processes_needed(tiny_config(mesh=mesh), {}) == count
    data, model = map(int, mesh.split("x"))
    assert data * model // count <= MAX_CPU_DEVICES


@pytest.mark.parametrize("hidden", [{"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": "-1"}])
def test_cpus_of_a_machine_whose_gpus_are_not_used_need_as_many_processes(hidden, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    assert processes_needed(tiny_config(mesh="64x8"), hidden) == 2
    assert processes_needed(tiny_config(mesh="64x8"), {}) == 1


@pytest.mark.parametrize("mesh", ["257x1", "1024x1024"])
def test_a_machine_is_not_asked_for_thousands_of_processes(mesh):
    with pytest.raises(UserError, match=rf"mesh {mesh} has \d+ devices, which up to 64 processes .* can't provide"):
        processes_needed(tiny_config(mesh=mesh), {})


def test_a_process_that_was_started_starts_none():
    assert processes_needed(tiny_config(mesh="64x8", coordinator="h:1", num_processes=2, process_id=0), {}) == 1
    assert (
        processes_needed(
            tiny_config(mesh="64x8"), {"WORLD_SIZE": "8", "RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
        )
        == 1
    )


def test_processes_get_one_place_to_meet_and_numbers():
    first, second = member_arguments(["--steps", "3"], 2)
    assert first[:3] == ["--steps", "3", "--coordinator"]
    assert first[3] == second[3]
    assert first[4:] == ["--num-processes", "2", "--process-id", "0"]
    assert second[-1] == "1"


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Members that run a shell script instead of `mtjax train`."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\neval "$3"\n')  # after -m mtjax.train
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(local, "GRACE", 0.2)

    def members(*texts):
        return [Member([text], f"[{i}] ", {"WHO": str(i)}) for i, text in enumerate(texts)]

    return members


def test_every_line_says_whose_it_is(scripts, capfd):
    ended = run_members(scripts('echo "I am $WHO"; echo oops >&2', "echo connected to 3 peer ranks; echo bye"), 1)
    assert ended == Ended([0, 0], requested=False)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] I am 0", "[1] bye"]
    assert err == "[0] oops\n"


def test_who_does_not_follow_a_failure_is_killed(scripts):
    begun = time.monotonic()
    ended = run_members(scripts("exit 75", "sleep 60", "trap '' TERM; sleep 60"), 0.3)
    assert ended.codes == [75, -signal.SIGKILL, -signal.SIGKILL]
    assert ended.code == 75
    assert 0.5 < time.monotonic() - begun < 59


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 75], 75), ([75, 2], 2), ([-9, 75], 137), ([0, -15], 143)]
)
def test_one_exit_code_stands_for_all(codes, code):
    assert Ended(codes, requested=False).code == code


def test_a_request_to_stop_reaches_every_process(scripts, hangup):
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGHUP])
    timer.start()
    ended = run_members(scripts(*["trap 'exit 7' HUP; while :; do sleep 0.05; done"] * 2), 5)
    assert ended == Ended([7, 7], requested=True)


def test_nohup_keeps_a_run_from_the_end_of_its_terminal(scripts, hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGHUP])
    timer.start()
    assert run_members(scripts("sleep 0.5"), 5) == Ended([0], requested=False)
