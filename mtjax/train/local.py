"""A run with too many virtual CPU devices for one process, in several processes on this machine."""

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from mtjax.config import Config
from mtjax.sharding.mesh import MAX_CPU_DEVICES, has_gpu
from mtjax.sharding.processes import detect_launcher
from mtjax.theory.mesh import check_implemented, parse_mesh


def processes_needed(config: Config, environment: Mapping[str, str]) -> int:
    """How many processes this one has to start for the run's virtual CPU devices; 1 when it can hold them itself.

    Raises:
      UserError: the mesh can't be read, or mtjax can't train over one of its axes yet.
    """
    shape = parse_mesh(config.parallel.mesh)
    check_implemented(shape)
    size = shape.size
    started = config.parallel.num_processes is not None or detect_launcher(environment)[1] != 1
    if size <= MAX_CPU_DEVICES or started or has_gpu():
        return 1
    return next(count for count in range(2, size + 1) if size % count == 0 and size // count <= MAX_CPU_DEVICES)


def run_processes(arguments: Sequence[str], count: int) -> int:
    """Runs `mtjax train` with these arguments in `count` processes; returns the exit code of the first that failed.

    Only the first process prints. Ctrl-C reaches every process through the terminal, and SIGTERM is passed on.
    """
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        coordinator = f"localhost:{probe.getsockname()[1]}"

    def start(number: int) -> subprocess.Popen[str]:
        place = ["--coordinator", coordinator, "--num-processes", str(count), "--process-id", str(number)]
        return subprocess.Popen(
            [sys.executable, "-m", "mtjax.train", *arguments, *place],
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=None if number == 0 else subprocess.DEVNULL,
            text=True,
        )

    processes = [start(number) for number in range(count)]
    with _signals_passed_on(processes):
        for line in processes[0].stdout or ():
            if "peer ranks" not in line:  # Gloo's, one per pair of devices, and torn where two are written at once
                print(line, end="", flush=True)
        codes = [_end(process, processes[0].wait()) for process in processes]
    return next((code for code in codes if code), 0)


def _end(process: subprocess.Popen[str], first_code: int) -> int:
    """Waits for a process; ends it if the first process failed."""
    if first_code:
        process.terminate()
    return process.wait()


@contextlib.contextmanager
def _signals_passed_on(processes: Sequence[subprocess.Popen[str]]):
    handlers = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: processes[0].terminate()),
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
