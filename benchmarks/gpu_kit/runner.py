"""Runs parts in processes of their own: what one of them breaks or forgets, no other notices."""

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
"""Words of the command line: of a process of a part, which says what it does and where it answers."""
SLOW = 600.0
"""Seconds of a rehearsed part, however busy the machine is."""
LEAST = 15.0
"""Seconds below which nothing is begun."""
DONE, FAILED, LATE, LEFT_OUT = "done", "failed", "cut short", "left out"


@dataclass
class Worker:
    """A process and what it leaves in the part's folder."""

    name: str
    folder: Path
    process: "subprocess.Popen[bytes]"

    @classmethod
    def start(cls, name: str, folder: Path, *, rehearse: bool) -> "Worker":
        """Starts one; its output goes to a file."""
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
        """Whether it waits for its turn, or has ended."""
        return (self.folder / f"{self.name}.ready").exists() or self.process.poll() is not None

    def go(self) -> None:
        """Gives it its turn."""
        (self.folder / f"{self.name}.go").touch()

    def stop(self) -> None:
        """Ends it and what it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def found(self) -> dict[str, Any]:
        """Its answer with its state; of one that failed the last line."""
        path = self.folder / f"{self.name}.json"
        answer = json.loads(path.read_text()) if path.exists() else {}
        code = self.process.poll()
        if code == 0:
            return {"state": DONE, **answer}
        if code == -signal.SIGKILL:
            return {"state": LATE, **answer}
        return {"state": FAILED, "error": self.last_line(), **answer}

    def last_line(self) -> str:
        """What it said last."""
        said = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
        lines = [line.strip() for line in said if line.strip()]
        return lines[-1][:400] if lines else "it said nothing"


def environment(*, rehearse: bool) -> dict[str, str]:
    """Of every process: memory is taken as it is needed, for two share the GPU while they compile."""
    given = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1"}
    if rehearse:
        given |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    return given | dict(os.environ)


def run_part(part: Part, folder: Path, seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """All processes of a part, within its time; the answer of each, and the state of the part.

    They compile at the same time and use the GPU one after the other: what is timed has it to itself.
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
    """Waits for something until a time of the monotonic clock."""
    while not done() and time.monotonic() < end:
        time.sleep(0.05)


def run_parts(
    parts: list[Part],
    folder: Path,
    seconds: float,
    keep: Callable[[Mapping[str, dict[str, Any]]], None],
    say: Callable[[str], None],
    *,
    rehearse: bool,
) -> dict[str, dict[str, Any]]:
    """Runs one part after the other, and hands on what is known after each.

    Args:
      parts: the most important first; `machine` is one of them and leads.
      folder: for what they leave.
      seconds: of all together; what does not fit is left out.
      keep: called after every part with all answers so far.
      say: told what goes on.
      rehearse: tiny, on CPUs.
    """
    end = time.monotonic() + seconds
    found: dict[str, dict[str, Any]] = {}
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        gpus = found.get("machine", {}).get("devices", 1)
        if part.least_gpus > gpus:
            found[part.name] = {"state": LEFT_OUT, "error": f"{part.least_gpus} GPUs are needed, and there is {gpus}"}
        elif left < LEAST and not rehearse:
            found[part.name] = {"state": LEFT_OUT, "error": "there was no time left: run it with --only"}
        else:
            say(f"{part.name} ...")
            budget = SLOW if rehearse else min(left, part.budget)
            found[part.name] = run_part(part, folder / f"{number}", budget, rehearse=rehearse)
        say(summary(part.name, found[part.name]))
        keep(found)
        if part.name == "machine":
            if found["machine"]["state"] != DONE:
                break
            (folder / "machine.json").write_text(json.dumps(found["machine"]))
    return found


def summary(name: str, answer: Mapping[str, Any]) -> str:
    """A line on a part that has ended."""
    words = [f"{name}: {answer['state']}"]
    if "took" in answer:
        words.append(f"after {answer['took']:.0f} s")
    if answer.get("ok") is False:
        words.append("- WRONG")
    if "error" in answer:
        words.append(f"- {answer['error']}")
    return " ".join(words)
