"""Persistent cache of compiled programs between starts of a run: jax's compilation cache, in the user's cache folder.

jax looks up a program by a key of the program itself, its compiler options, the versions of jaxlib and of the platform,
and the devices: their number and, for CPUs, the machine features that XLA compiles for. So different kinds of CPUs can
share a folder without sharing programs. This module adds a default folder, one note if it can't be used, a limit on its
size, and the removal of corrupted entries, which are then compiled again.
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
"""Maximum size in bytes of the folder when a run starts; the least recently used entries are removed."""
MESSAGE = r"Error (reading|writing) persistent compilation cache entry for '(.+?)': (.*)"
"""jax's warning about a cache entry, issued once per program."""
CUT_OFF = ("ZstdError", "error: ")
"""Prefixes of the errors of zstandard and zlib for a truncated entry (the process was killed while writing); jax would
never overwrite it."""
EVENTS = {
    "/jax/compilation_cache/compile_requests_use_cache": "requested",
    "/jax/compilation_cache/cache_hits": "found",
}


class CompileCache:
    """Enables jax's persistent cache during a run; use as a context manager before the first program is compiled.

    Args:
      choice: a folder, or "off"; when None, `JAX_COMPILATION_CACHE_DIR`, else the user's cache folder.
      environment: of the process.
      limit: maximum bytes of the folder. A folder that the environment names is never cleared.

    Attributes:
      folder: where the programs are; None when they are not cached.
      note: why programs are not cached; None if they are.
      requested: programs that were looked up so far.
      found: programs that were found in the cache.
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
        # Settings of the environment are kept.
        for name in (name for name in _SMALL if name.upper() not in self._environment):
            jax.config.update(name, 0)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(warnings.catch_warnings())
        # Python would show each warning once per place, and hide the second program's.
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
        """Describes the programs that could not be read or written, and the first reason; "" if there are none."""
        if not self._failed:
            return ""
        name, why = next(iter(self._failed.items()))
        more = f" and {len(self._failed) - 1} more" if len(self._failed) > 1 else ""
        return f"{name}{more} could not be read from or written to {self.folder}: {why}"

    def _prepare(self, folder: Path) -> None:
        """Makes the folder and removes entries over the limit; without a folder, the cache is off."""
        self.folder = str(folder)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # cached programs run in this process
            if not os.access(folder, os.W_OK | os.X_OK):
                # Programs are still read from it.
                self.note = f"new compiled programs are not cached: {folder} can't be written to"
            elif self._is_ours:
                remove_least_recent(folder, self._limit)
        except OSError as e:
            self.note = f"compiled programs are not cached: {e.strerror}: {folder}"
            self.folder = None

    def _warned(self, message: Any, *rest: Any, **named: Any) -> None:
        """Records jax's warnings about its cache, and removes an entry that can't be read."""
        match = re.match(MESSAGE, str(message), re.DOTALL)
        if match is None:
            self._show(message, *rest, **named)
            return
        action, program, why = match.groups()
        self._failed.setdefault(program, why.splitlines()[0])
        # The first process alone: others may share the folder.
        if action == "reading" and why.startswith(CUT_OFF) and self.folder is not None and jax.process_index() == 0:
            for entry in Path(self.folder).glob(f"{program}-*-cache"):
                with contextlib.suppress(OSError):
                    entry.unlink()

    def _count(self, event: str, **_: Any) -> None:
        name = EVENTS.get(event)
        if name and threading.current_thread() is threading.main_thread():
            setattr(self, name, getattr(self, name) + 1)


_SMALL = ("jax_persistent_cache_min_compile_time_secs",)
"""By default jax caches programs that took a second to compile; a checkpoint has dozens of smaller ones."""


def _use_folder(folder: str | None) -> None:
    """Sets jax's cache folder; jax reads the setting only once unless the cache is reset."""
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update(DIR, folder)
    compilation_cache.reset_cache()


def user_folder(environment: Mapping[str, str]) -> Path:
    """Returns `$XDG_CACHE_HOME/mtjax/programs`, else `~/.cache/mtjax/programs`."""
    base = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "mtjax" / "programs"


def describe_programs(cache: CompileCache) -> str:
    """Describes how many programs a start needed, and how many of them were cached."""
    if cache.folder is None:
        return "compiled programs were not cached"
    failures = f"; {cache.failures}" if cache.failures else ""
    return f"{cache.found} of {cache.requested} programs were found in the compile cache {cache.folder}{failures}"


def remove_least_recent(folder: Path, limit: int) -> None:
    """Removes the least recently used entries of a folder until the others take at most `limit` bytes."""
    entries = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            # Many file systems update the time of access rarely, or never.
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
