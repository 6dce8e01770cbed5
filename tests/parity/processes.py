"""Starts a module of `tests.parity.megatron_core` in processes that communicate by gloo."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = 4
LIMIT = 900
"""Seconds after which ranks are killed."""


def run_ranks(module: str, mode: str, folder: Path, *flags: str) -> None:
    """Runs the module's `mode` in `RANKS` processes; raises with their outputs if one fails.

    Gloo was seen to wait forever, once in many runs: ranks give up after `PATIENCE` of `megatron_core.torch_dist`, and
    are started once more. What a mode writes, it writes anew.
    """
    codes, texts = _run(module, mode, folder, *flags)
    if any(codes) and any("timed out" in text.lower() for text in texts):
        print("\n".join(texts))
        codes, texts = _run(module, mode, folder, *flags)
    assert codes == [0] * RANKS, "\n".join(texts)


def _run(module: str, mode: str, folder: Path, *flags: str) -> tuple[list[int | None], list[str]]:
    # Ranks find each other through a file: a port that was free may be another process's when the first rank opens it.
    store = folder / f"{mode}-ranks"
    store.unlink(missing_ok=True)
    given = {"WORLD_SIZE": str(RANKS), "RANKS_STORE": f"file://{store}", "OMP_NUM_THREADS": "1"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, *flags, "-W", "ignore", "-m", module, mode, str(folder)]
    outputs = [(folder / f"{mode}-{rank}.log").open("w+") for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | given | {"RANK": str(rank)}, stdout=output, stderr=subprocess.STDOUT
        )
        for rank, output in enumerate(outputs)
    ]
    end = time.monotonic() + LIMIT
    try:
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            if time.monotonic() > end:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        texts = [output.seek(0) or output.read()[-2000:] for output in outputs]
        for output in outputs:
            output.close()
    return codes, texts
