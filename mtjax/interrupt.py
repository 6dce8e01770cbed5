"""Ends the program on Ctrl-C at any moment, also while C++ code runs, and when a library swallows exceptions.

Python runs a signal handler only between two of its bytecode instructions, and the `KeyboardInterrupt` that it raises
there may occur inside any `except`. So a thread waits for the signal, too, and whichever is first ends the process.
"""

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

CODE = 128 + signal.SIGINT
"""Exit code of a program that Ctrl-C ended, as in shells."""


class CtrlC:
    """Ends the process on Ctrl-C while it is entered; use as a context manager, in the main thread.

    If other code has installed a handler, the first Ctrl-C is handled by it, and the second one ends the process.
    """

    def __enter__(self) -> "CtrlC":
        self._ending = threading.Lock()
        self._before = signal.signal(signal.SIGINT, self._end)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        # Python's C handler writes to this pipe at once, also while the main thread is in C++ and runs no Python
        # handler.
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="Ctrl-C", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._write)  # the listener reads end of file
        self._thread.join()
        os.close(self._read)
        signal.signal(signal.SIGINT, self._before)

    def _listen(self) -> None:
        """Reads the signal numbers that Python's C handler writes to the wakeup pipe."""
        count = 0
        while numbers := os.read(self._read, 64):
            count += numbers.count(signal.SIGINT)
            # Another handler, such as that of training, may end the process in an orderly way; a second Ctrl-C means
            # now.
            if count >= 2 or (count and signal.getsignal(signal.SIGINT) == self._end):
                self._end(signal.SIGINT, None)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if not self._ending.acquire(blocking=False):
            return  # the other thread is already ending the process
        show_cursor = "\x1b[?25h" if sys.stdout.isatty() else ""
        for stream, text in ((sys.stdout, show_cursor), (sys.stderr, "interrupted\n")):
            with contextlib.suppress(Exception):
                stream.write(text)
                stream.flush()
        # No cleanup: it would wait for threads and C++ code, which is what hangs.
        os._exit(CODE)
