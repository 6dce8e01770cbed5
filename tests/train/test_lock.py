"""Two starts never share a folder, whatever becomes of the first."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from mtjax.errors import LOST, UserError
from mtjax.train.folder.lock import NAME, lock_folder

LEASE, HEARTBEAT = 2.0, 0.2
LONG = 60.0
"""A lease in which a holder on a busy machine surely beats; nobody waits for its end."""
HOLD = f"""
import sys, time
from pathlib import Path
from mtjax.train.folder.lock import lock_folder
lock = lock_folder(Path(sys.argv[1]), print, lease=float(sys.argv[2]), heartbeat={HEARTBEAT})
print("held", flush=True)
time.sleep(60)
"""


@contextmanager
def holder_of(folder, lease):
    """Another process that holds a folder."""
    command = [sys.executable, "-c", HOLD, str(folder), str(lease)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def claim(folder, said, lease=LEASE):
    return lock_folder(folder, said.append, lease=lease, heartbeat=HEARTBEAT)


def test_a_folder_that_was_given_back_is_free(tmp_path):
    said = []
    for _ in range(2):
        claim(tmp_path / "run", said).release()
    assert said == []
    assert list((tmp_path / "run").iterdir()) == []


def test_a_second_start_says_who_holds_it(tmp_path):
    with holder_of(tmp_path, LONG) as holder:
        with pytest.raises(
            UserError, match=rf"{tmp_path} is in use: process {holder.pid} on \S+ is training there; wait"
        ):
            claim(tmp_path, [], LONG)
        holder.kill()
        holder.wait()
        said = []
        claim(tmp_path, said, LONG).release()
        (word,) = said  # and not that it waits: a process of this machine that is gone need not be waited for
        assert f"took over {tmp_path} from process {holder.pid} on" in word


def test_who_was_stopped_for_too_long_does_not_go_on(tmp_path):
    """A laptop that slept, or a machine that hung: another start has the folder by then."""
    with holder_of(tmp_path, LEASE) as holder:
        holder.send_signal(signal.SIGSTOP)
        said = []
        lock = claim(tmp_path, said)
        assert "waiting up to 2 s" in said[0]
        assert f"took over {tmp_path} from process {holder.pid}" in said[1]
        holder.send_signal(signal.SIGCONT)
        assert holder.wait(300) == LOST
        assert (
            f"error: {tmp_path / NAME} is no longer held by this run: another start took it over"
            in holder.stderr.read()
        )
        lock.release()


def on_another_machine(folder, lease):
    lines = ["filelock/2", "pid=4711", "host=gpu-3", "mode=lease", "token=0", f"duration={lease}", ""]
    (folder / NAME).write_text("\n".join(lines))


def test_a_holder_on_another_machine_is_known_by_its_heartbeat(tmp_path):
    on_another_machine(tmp_path, LONG)
    stop = threading.Event()

    def beat():
        while not stop.wait(HEARTBEAT):
            os.utime(tmp_path / NAME)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(UserError, match="is in use: process 4711 on gpu-3 is training there"):
        claim(tmp_path, [], LONG)
    stop.set()
    thread.join()
    on_another_machine(tmp_path, LEASE)
    said = []
    claim(tmp_path, said).release()
    assert "from process 4711 on gpu-3, which ended without releasing it" in said[-1]


def test_a_claim_that_names_nobody_does_not_hold_for_ever(tmp_path):
    """What a full disk leaves behind."""
    (tmp_path / NAME).touch()
    with pytest.raises(UserError, match=r"\.lock can't be acquired: remove it if no run is using its folder"):
        claim(tmp_path, [])


def test_a_folder_that_can_not_be_written_to_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"--out {tmp_path}/file/run can't be used: .*Not a directory"):
        claim(tmp_path / "file" / "run", [])
