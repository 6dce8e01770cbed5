"""Starts a module of `tests.parity.megatron_core` in processes that communicate by gloo."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTER = "tests.parity.megatron_core.ranks"
RANKS = 4
LIMIT = 900
"""Seconds after which ranks are killed."""


def run_ranks(module: str, mode: str, folder: Path, *flags: str) -> None:
    """Runs the module's `mode` in `RANKS` processes; raises with their outputs if one fails.

    Gloo was seen to wait forever, once in many runs: ranks give up after `PATIENCE` of `megatron_core.torch_dist`, and
    are started once more. What a mode writes, it writes anew.
    """
    code, text = _run(module, mode, folder, *flags)
    if code and "timed out" in text.lower():
        print(text)
        code, text = _run(module, mode, folder, *flags)
    assert code == 0, text


def _run(module: str, mode: str, folder: Path, *flags: str) -> tuple[int, str]:
    """Returns the exit code, and the ends of what the ranks and the process that starts them have printed."""
    # Ranks find each other through a file: a port that was free may be another process's when the first rank opens it.
    store = folder / f"{mode}-ranks"
    store.unlink(missing_ok=True)
    given = {"WORLD_SIZE": str(RANKS), "RANKS_STORE": f"file://{store}", "OMP_NUM_THREADS": "1"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, *flags, "-W", "ignore", "-m", STARTER, module, mode, str(folder)]
    starter = folder / f"{mode}-starter.log"
    with starter.open("w") as output:
        # A session of its own: the ranks are killed with it.
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | given, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            print(f"{module} {mode} took longer than {LIMIT} s")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    logs = [starter, *sorted(folder.glob(f"{mode}-[0-9]*.log"))]
    return code, "\n".join(log.read_text()[-2000:] for log in logs)
