"""Starts the ranks of another module of this folder: `python -m tests.parity.megatron_core.ranks MODULE MODE FOLDER`.

One process imports torch and megatron-core, which takes seconds, and forks `WORLD_SIZE` ranks. What a rank prints is in
`FOLDER/MODE-RANK.log`. The exit code is 1, and the other ranks are killed, if one fails.
"""

import os
import signal
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType


def run_rank(module: ModuleType, mode: str, folder: Path, rank: int) -> None:
    """Runs `main` of the module as a rank, and ends the process."""
    os.environ["RANK"] = str(rank)
    log = os.open(folder / f"{mode}-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        module.main(mode, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(name: str, mode: str, folder: Path) -> int:
    """Starts the ranks and waits for them."""
    module, left = import_module(name), set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        child = os.fork()
        if not child:
            run_rank(module, mode, folder, rank)
        left.add(child)
    failed = False
    while left:
        child, status = os.wait()
        left.discard(child)
        if status and not failed:
            failed = True
            for other in left:
                os.kill(other, signal.SIGKILL)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
