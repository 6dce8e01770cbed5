"""Compiled programs, kept from one start of a run to the next: jax's persistent cache, in a folder of the user's.

jax finds a program by a key of the program itself, its compiler options, the versions of jaxlib and of the platform,
and the devices: their number and, of CPUs, the machine features that XLA compiles for. So CPUs of different kinds share
a folder, and never a program. What this module adds: a folder by default, one note where it can't be used, a bound on
its size, and that a damaged entry is removed and made again.
"""

import contextlib
import os
import re
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

OFF = "off"
DIR = "jax_compilation_cache_dir"
LIMIT = 4 << 30
"""Bytes that the folder may hold when a run starts; what was used least recently goes."""
MESSAGE = r"Error (reading|writing) persistent compilation cache entry for '(.+?)': (.*)"
"""What jax warns of, once for each program."""
CUT_OFF = ("ZstdError", "error: ")
"""What zstandard and zlib say of an entry that a start was killed over; jax would never write it again."""
EVENTS = {
    "/jax/compilation_cache/compile_requests_use_cache": "requested",
    "/jax/compilation_cache/cache_hits": "found",
}


class CompileCache:
    """jax's persistent cache while a run lasts; use as a context manager before the first program is compiled.

    Args:
      choice: a folder, or "off"; when None, what `JAX_COMPILATION_CACHE_DIR` says, else the user's own.
      environment: of the process.
      limit: bytes that a folder of mtjax may hold. A folder that the environment names is never cleared.

    Attributes:
      folder: where the programs are; None when they are not kept.
      note: why they are not kept, in words; None when all is well.
      asked: programs that were looked up so far.
      found: those of them that were there.
    """

    def __init__(self, choice: str | None, environment: Mapping[str, str] = os.environ, limit: int = LIMIT) -> None:
        self.requested = self.found = 0
        self.note: str | None = None
        given: str | None = getattr(jax.config, DIR)
        self.folder = None if choice == OFF else choice or given or str(user_folder(environment))
        self._is_ours = self.folder is not None and self.folder != given
        self._failed: dict[str, str] = {}
        self._limit, self._environment = limit, environment

    def __enter__(self) -> "CompileCache":
        self._before = {name: getattr(jax.config, name) for name in (*_SMALL, DIR)}
        if self.folder is not None and "://" not in self.folder:
            self._prepare(Path(os.path.expanduser(self.folder)).absolute())  # noqa: PTH111 - it never fails
        if str(self.folder) != str(self._before[DIR]):
            _use_folder(self.folder)
        for name in (name for name in _SMALL if name.upper() not in self._environment):
            jax.config.update(name, 0)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("always", MESSAGE.partition("'")[0], UserWarning)
        self._show, warnings.showwarning = warnings.showwarning, self._warned
        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        warnings.showwarning = self._show
        self._stack.close()
        for name in _SMALL:
            jax.config.update(name, self._before[name])
        if str(self.folder) != str(self._before[DIR]):
            _use_folder(self._before[DIR])

    @property
    def failures(self) -> str:
        """Programs that could not be read or written, and why the first could not; empty when there are none."""
        if not self._failed:
            return ""
        name, why = next(iter(self._failed.items()))
        more = f" and {len(self._failed) - 1} more" if len(self._failed) > 1 else ""
        return f"{name}{more} could not be read from or written to {self.folder}: {why}"

    def _prepare(self, folder: Path) -> None:
        """Makes the folder and removes what is too much; without a folder, nothing is kept."""
        self.folder = str(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # who writes there runs code in this process
            if not os.access(folder, os.W_OK | os.X_OK):
                self.note = f"new compiled programs are not kept: {folder} can't be written to"
            elif self._is_ours:
                remove_least_recent(folder, self._limit)
        except OSError as e:
            self.note = f"compiled programs are not kept: {e.strerror}: {folder}"
            self.folder = None

    def _warned(self, message: Any, *rest: Any, **named: Any) -> None:
        """Takes note of jax's warnings about its cache, and removes an entry that can't be read."""
        match = re.match(MESSAGE, str(message), re.DOTALL)
        if match is None:
            self._show(message, *rest, **named)
            return
        action, program, why = match.groups()
        self._failed.setdefault(program, why.splitlines()[0])
        if action == "reading" and why.startswith(CUT_OFF) and self.folder is not None and jax.process_index() == 0:
            for entry in Path(self.folder).glob(f"{program}-*-cache"):
                with contextlib.suppress(OSError):
                    entry.unlink()

    def _count(self, event: str, **_: Any) -> None:
        name = EVENTS.get(event)
        if name and threading.current_thread() is threading.main_thread():
            setattr(self, name, getattr(self, name) + 1)


_SMALL = ("jax_persistent_cache_min_compile_time_secs",)
"""By default jax keeps programs that took a second to compile; those of a checkpoint are dozens of quick ones."""


def _use_folder(folder: str | None) -> None:
    """Points jax to a folder; it looks at the setting once, unless it is told to look again."""
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update(DIR, folder)
    compilation_cache.reset_cache()


def user_folder(environment: Mapping[str, str]) -> Path:
    """`$XDG_CACHE_HOME/mtjax/programs`, else `~/.cache/mtjax/programs`."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "mtjax" / "programs"


def programs_in_words(cache: CompileCache) -> str:
    """How many programs a start needed, and how many of them earlier ones had compiled."""
    if cache.folder is None:
        return "compiled programs were not kept"
    failures = f"; {cache.failures}" if cache.failures else ""
    return f"{cache.found} of {cache.requested} programs were compiled before and kept in {cache.folder}{failures}"


def remove_least_recent(folder: Path, limit: int) -> None:
    """Removes the entries of a folder that were used least recently, until the rest takes at most `limit` bytes."""
    entries = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
