"""Buffers what C++ code prints on stderr, and handles the abort by jax's coordination client.

When jax's coordination service is lost, or does not start, its client logs the error with a stack and aborts the
process, without a Python exception. Here its log first goes through a file, and `Peers` reports the error before the
abort.
"""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

HOLD = 0.5
"""Seconds between looks at the buffered output."""
GIVEN_UP = b"JAX distributed service detected fatal errors"
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)


def _handle_abort(handler: Any) -> None:
    """Sets a C signal handler: Python's own handlers run in the interpreter loop, which an aborting process never
    reaches."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, _HANDLER], ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)


class NativeStderr:
    """Replaces file descriptor 2; Python's own `sys.stderr` still goes to the original one.

    Args:
      given_up: called when jax's client aborts the process, in that thread; the process ends when it returns.
    """

    def __init__(self, given_up: Callable[[], object]) -> None:
        self._given_up = given_up
        self._terminal = os.dup(2)
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (open as long as the process)
        self._read = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        # Before descriptor 2 is replaced: Python's messages need no delay.
        self._python, self._ours = sys.stderr, os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
        sys.stderr = self._ours
        os.dup2(self._file.fileno(), 2)
        self._handler = _HANDLER(self._aborted)  # keep a reference as long as C may call it
        _handle_abort(self._handler)
        self._passing = threading.Thread(target=self._pass_on, name="native stderr", daemon=True)
        self._passing.start()

    def close(self) -> None:
        """Forwards the buffered output, and restores stderr and the signal handler."""
        _handle_abort(_HANDLER(0))
        self._closed.set()
        self._passing.join()
        self.flush()
        os.dup2(self._terminal, 2)
        sys.stderr = self._python
        os.close(self._terminal)
        self._ours.close()
        self._file.close()

    def _pass_on(self) -> None:
        while not self._closed.wait(HOLD):
            self.flush()

    def flush(self) -> None:
        """Forwards the buffered output, unless it is jax's fatal error."""
        with self._lock, contextlib.suppress(OSError):
            held = os.pread(self._file.fileno(), 1 << 20, self._read)
            # That one is never forwarded: `_aborted` reports the error in a sentence.
            if GIVEN_UP not in held:
                os.write(self._terminal, held)
                self._read += len(held)

    def _aborted(self, number: int) -> None:
        if not self._closed.is_set() and GIVEN_UP in os.pread(self._file.fileno(), 1 << 20, self._read):
            self._given_up()
        self.flush()
