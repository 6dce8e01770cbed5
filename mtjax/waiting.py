"""Says what a command is doing when it prints nothing for seconds: a silent command looks as if it hangs."""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

QUIET_SECONDS = 2.0
"""Seconds after which an activity is named; shorter ones are not."""
SECONDS_BETWEEN_LINES = 30.0
"""Seconds after which an activity that continues is named again, with its duration."""
IMPORTS = "loading libraries"
"""Name of the import of jax and others, which takes seconds."""
QUIET = "MTJAX_QUIET"
"""Environment variable: 1 turns these lines off."""
_RANKS = ("JAX_PROCESS_ID", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")


def is_first(environ: Mapping[str, str] = os.environ, argv: Sequence[str] = sys.argv) -> bool:
    """Returns whether this is the first process of a run, as far as is known before the processes connect."""
    # jax is not imported yet, so only launchers know the rank.
    ranks = [environ.get(name, "0") for name in _RANKS]
    ranks += [after for word, after in itertools.pairwise(argv) if word == "--process-id"]
    return all(rank == "0" for rank in ranks)


class Waiting:
    """Names the current activity on stderr once it has taken `QUIET_SECONDS`, on a terminal or not.

    Args:
      say: prints a line; called in another thread.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._timer: threading.Timer | None = None

    def begin(self, what: str | None) -> None:
        """Ends the current activity, and begins another one; None is one that is not named."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None and os.environ.get(QUIET) != "1" and is_first():
            self._speak_after(QUIET_SECONDS, what, time.monotonic())

    def _speak_after(self, seconds: float, what: str, since: float) -> None:
        def speak() -> None:
            if self._timer is not timer:  # another activity has begun
                return
            passed = time.monotonic() - since
            self._say(f"{what} ..." if passed < SECONDS_BETWEEN_LINES else f"{what} ... {passed:.0f} s")
            self._speak_after(SECONDS_BETWEEN_LINES, what, since)

        self._timer = timer = threading.Timer(seconds, speak)
        timer.daemon = True
        timer.start()


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Waiting]:
    """Names `what` on stderr if this context takes longer than `QUIET_SECONDS`; `begin(None)` ends it earlier."""
    current = Waiting()
    current.begin(what)
    try:
        yield current
    finally:
        current.begin(None)
