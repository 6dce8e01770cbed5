"""Runs parts in separate processes, so that a crash or leftover state of one does not affect the others."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_kit.parts import THEIRS, Part

ENTRY = Path(__file__).resolve().parents[1] / "gpu.py"
CHILD, REHEARSE = "--child", "--rehearse"
"""Internal options of a process of a part."""
SLOW = 600.0
"""Time limit in seconds of a rehearsed part: generous, as the machine may be busy."""
LEAST = 15.0
"""No part starts with less than this many seconds left."""
DONE, FAILED, LATE, LEFT_OUT = "done", "failed", "cut short", "left out"


@dataclass
class Worker:
    """A process of a part, and its files in the part's folder."""

    name: str
    folder: Path
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, name: str, folder: Path, *, rehearse: bool) -> "Worker":
        """Starts a process, with its output in a log file."""
        command = [sys.executable, str(ENTRY), CHILD, name, str(folder)]
        with (folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command + ([REHEARSE] if rehearse else []),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(rehearse=rehearse),
                start_new_session=True,
            )
        return cls(name, folder, process)

    @property
    def is_ready(self) -> bool:
        """Whether the process waits for the GPU, or has ended."""
        return (self.folder / f"{self.name}.ready").exists() or self.process.poll() is not None

    def go(self) -> None:
        """Lets the process use the GPU."""
        (self.folder / f"{self.name}.go").touch()

    def stop(self) -> None:
        """Kills the process and its children."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def found(self) -> dict[str, Any]:
        """Returns the results with the state, and the last line of the log if the process failed."""
        path = self.folder / f"{self.name}.json"
        answer = json.loads(path.read_text()) if path.exists() else {}
        code = self.process.poll()
        if code == 0:
            return {"state": DONE, **answer}
        if code == -signal.SIGKILL:
            return {"state": LATE, **answer}
        return {"state": FAILED, "error": self.last_line(), **answer}

    def last_line(self) -> str:
        """Returns the last line of the log."""
        log = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
        lines = [line.strip() for line in log if line.strip()]
        return lines[-1][:400] if lines else "no output"


def environment(*, rehearse: bool) -> dict[str, str]:
    """Returns the environment of the processes, without GPU preallocation, as two share the GPU while they compile."""
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return variables | dict(os.environ)


def run_part(part: Part, folder: Path, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """Runs all processes of a part within its time limit; returns their results and the part's state.

    They compile at the same time, and then use the GPU exclusively one after the other.
    """
    folder.mkdir()
    start = time.monotonic()
    end = start + seconds
    workers = [Worker.start(name, folder, rehearse=rehearse) for name in part.children]
    try:
        wait_until(lambda: all(w.is_ready for w in workers), end)
        for worker in workers:
            worker.go()
            wait_until(lambda w=worker: w.process.poll() is not None, end)
    finally:
        for worker in workers:
            worker.stop()
    answers = {worker.name.partition(" ")[0]: worker.found() for worker in workers}
    needed = [answer for name, answer in answers.items() if name != THEIRS]
    state = next((a["state"] for a in needed if a["state"] != DONE), DONE)
    answer = needed[0] | ({THEIRS: answers[THEIRS]} if THEIRS in answers else {})
    return answer | {"state": state, "took": time.monotonic() - start}


def wait_until(done: Callable[[], bool], end: float) -> None:
    """Waits until a condition holds, at most until `end` on the monotonic clock."""
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def run_parts(
    parts: list[Part],
    folder: Path,
    seconds: float,
    save: Callable[[Mapping[str, dict[str, Any]]], None],
    say: Callable[[str], None],
    *,
    rehearse: bool,
) -> dict[str, dict[str, Any]]:
    """Runs one part after the other, and saves the results after each.

    Args:
      parts: parts in order of importance, `machine` first.
      folder: folder for their files.
      seconds: time limit of all parts; those that do not fit are skipped.
      save: called after every part with all results so far.
      say: prints a progress line.
      rehearse: whether to use tiny shapes on CPUs.
    """
    end = time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        gpus = found.get("machine", {}).get("devices", 1)
        if part.least_gpus > gpus:
            found[part.name] = {"state": LEFT_OUT, "error": f"needs {part.least_gpus} GPUs, and the machine has {gpus}"}
        elif left < LEAST and not rehearse:
            found[part.name] = {"state": LEFT_OUT, "error": "no time was left: run it with --only"}
        else:
            say(f"{part.name} ...")
            budget = SLOW if rehearse else min(left, part.budget)
            found[part.name] = run_part(part, folder / f"{number}", budget, rehearse=rehearse)
        say(summary(part.name, found[part.name]))
        save(found)
        if part.name == "machine":
            if found["machine"]["state"] != DONE:
                break
            (folder / "machine.json").write_text(json.dumps(found["machine"]))
    return found


def summary(name: str, answer: Mapping[str, Any]) -> str:
    """Formats a line about a finished part."""
    words = [f"{name}: {answer['state']}"]
    if "took" in answer:
        words.append(f"after {answer['took']:.0f} s")
    if answer.get("ok") is False:
        words.append("- WRONG")
    if "error" in answer:
        words.append(f"- {answer['error']}")
    return " ".join(words)
