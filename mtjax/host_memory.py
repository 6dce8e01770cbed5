"""How this process gives memory back to the kernel."""

import ctypes
import sys

_MALLOPT = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1)}
"""Numbers of glibc's malloc.h and what they are set to: one heap, for large pieces too, that is never trimmed."""


def keep_freed_memory() -> bool:
    """Makes the C library keep what is freed, for the next step to use; true where it can.

    XLA allocates a step's temporaries anew on a CPU, and glibc fetches a large piece from the kernel, which clears it
    page by page: 2 GB and a fifth of the time for a step of GPT-2 small (`benchmarks/train_step.py`). Its process grows
    from 4.4 to 5.0 GB for that. For a process with one device: threads of many would wait for each other at the one
    heap. Call it before devices are made, whose threads would have heaps of their own.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return all(library.mallopt(option, value) for option, value in _MALLOPT.values())
