"""Starts a module of `tests.parity.megatron_core` in processes that communicate by gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RANKS = 4


def run_ranks(module: str, mode: str, folder: Path, *flags: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    given = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    given |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [sys.executable, *flags, "-W", "ignore", "-m", module, mode, str(folder)]
    outputs = [(folder / f"{mode}-{rank}.log").open("w+") for rank in range(RANKS)]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | given | {"RANK": str(rank)}, stdout=output, stderr=subprocess.STDOUT
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [process.wait(timeout=500) for process in processes]
    finally:
        for process in processes:
            process.kill()
        texts = [output.seek(0) or output.read()[-2000:] for output in outputs]
        for output in outputs:
            output.close()
    assert codes == [0] * RANKS, "\n".join(texts)
