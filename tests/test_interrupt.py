"""Ctrl-C ends a program that does its best to miss it."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mtjax.interrupt import CODE, CtrlC

PROGRAM = """
import hashlib, signal, time
from mtjax.interrupt import CtrlC

def swallow():
    while True:
        try:
            time.sleep(0.01)
        except BaseException:
            pass

def compute():  # in C, without the interpreter's lock, for minutes
    hashlib.pbkdf2_hmac("sha512", b"", b"", 10**9)

def polite(then):
    signal.signal(signal.SIGINT, lambda *_: print("in a moment", flush=True))
    then()

with CtrlC():
    print("ready", flush=True)
    {what}
"""


@pytest.mark.parametrize(
    ("what", "times"), [("swallow()", 1), ("compute()", 1), ("polite(swallow)", 2), ("polite(compute)", 2)]
)
def test_it_ends_long_before_the_program_would(what: str, times: int) -> None:
    """The first of two signals is for a handler that has something to save first."""
    command = [sys.executable, "-c", PROGRAM.format(what=what)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    if times == 2:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=60)  # the program would take minutes, or forever
    finally:
        process.kill()
    assert (process.returncode, stderr) == (CODE, "interrupted\n")


def test_everything_is_as_before_afterwards() -> None:
    files = Path("/proc/self/fd")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    before = signal.getsignal(signal.SIGINT), len(list(files.iterdir()))
    with CtrlC():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert (signal.getsignal(signal.SIGINT), len(list(files.iterdir()))) == before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
