"""Prepared data, cached by content: a folder per (kind, inputs), built once even when many processes start.

A folder appears under its final name by one rename, complete or not at all. Processes of one host wait for whoever
builds first (a lock file); hosts without a shared file system, or with one that has no locks, each build the same
folder - the contents are deterministic - and the first rename wins.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Data
from mtjax.errors import UserError, disk_reason


def reserve(path: Path) -> None:
    """Takes the disk space of a file that is as long as it will be: a mapped one would end the process where it lacks.

    Raises:
      OSError: there is not as much.
    """
    with path.open("r+b") as file:
        if size := os.fstat(file.fileno()).st_size:
            # A sparse file would get its blocks when pages are written: a full disk is a SIGBUS then.
            os.posix_fallocate(file.fileno(), 0, size)


def digest(parts: Mapping[str, Any]) -> str:
    """Returns a hash of `parts` (JSON values) as 20 hex digits, equal for equal parts on any machine."""
    # A change of this text invalidates all caches.
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Cache:
    """A folder of prepared data.

    Attributes:
      root: the folder; created on first use.
    """

    root: Path

    @classmethod
    def of(cls, data: Data) -> "Cache":
        """Returns the cache of a run: its `cache_dir`, else `$XDG_CACHE_HOME/mtjax`, else `~/.cache/mtjax`."""
        if data.cache_dir is not None:
            return cls(data.cache_dir.expanduser().absolute())
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(base).absolute() / "mtjax")

    def folder(self, kind: str, parts: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
        """Returns the folder `root/kind-DIGEST`, which `build(empty folder)` fills when it does not exist yet.

        Args:
          kind: a word that a person sees in a listing of the cache.
          parts: everything that the contents depend on, as JSON values; saved with the contents as `made_from.json`.
          build: fills the folder; if it raises, nothing remains.

        Raises:
          UserError: the cache can't be written.
        """
        final = self.root / f"{kind}-{digest(parts)}"
        if final.is_dir():
            return final
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # The lock is not removed: another process may hold the same file open, and would then lock a file that is
            # gone.
            with _locked(self.root / f".{final.name}.lock"):
                if not final.is_dir():
                    _build(final, parts, build)
        except PermissionError as e:
            raise UserError(
                f"the cache {self.root} can't be written ({e.strerror}); give another with --cache-dir"
            ) from e
        except Exception as e:
            if (why := disk_reason(e)) is None:
                raise
            where = f": {e.filename}" if isinstance(e, OSError) and e.filename else ""
            raise UserError(f"{why}{where}, while preparing data in the cache {self.root}") from e
        return final

    def file_digest(self, path: Path) -> str:
        """Returns a file's SHA-256, cached by path, size and time of change, so that a file is read only once."""
        status = path.stat()
        # The inode too: `mv` keeps the time of change.
        known = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]

        def build(folder: Path) -> None:
            with path.open("rb") as file:
                (folder / "sha256").write_text(hashlib.file_digest(file, "sha256").hexdigest())

        return (self.folder("file", {"file": known}, build) / "sha256").read_text()


def machine_memory() -> int:
    """Returns the bytes of memory that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_room(cache: Cache | None, in_memory: int, on_disk: int, what: str) -> None:
    """Checks that this machine has the bytes that something needs, before it takes hours to find out.

    Raises:
      UserError: it has not.
    """
    memory = machine_memory()
    if in_memory > memory:
        raise UserError(f"{what} takes {in_memory / 1e9:,.0f} GB of memory, and this machine has {memory / 1e9:,.0f}")
    if cache is None:
        return
    with contextlib.suppress(OSError):  # the write itself reports what is wrong
        free = shutil.disk_usage(next(p for p in (cache.root, *cache.root.parents) if p.exists())).free
        if on_disk > free:
            raise UserError(
                f"{what} takes {on_disk / 1e9:,.1f} GB in the cache {cache.root}, where {free / 1e9:,.1f} are free: "
                "make room, or give another with --cache-dir"
            )


def cached_arrays(
    cache: Cache | None,
    kind: str,
    parts: Mapping[str, Any],
    build: Callable[[Path | None], Mapping[str, np.ndarray]],
) -> Mapping[str, np.ndarray]:
    """Returns the arrays that `build` computes: memory-mapped from the cache, or in memory without one.

    Args:
      cache: where they are cached; nowhere when None.
      kind: see `Cache.folder`.
      parts: see `Cache.folder`.
      build: makes the arrays. It gets a folder, or None without a cache; an array that it writes to `NAME.npy` there
        itself (because it is large) must come back as a `numpy.memmap`.
    """
    if cache is None:
        return build(None)

    def fill(folder: Path) -> None:
        for name, array in build(folder).items():
            if not isinstance(array, np.memmap):
                np.save(folder / f"{name}.npy", array)

    folder = cache.folder(kind, parts, fill)
    # Mapped, so that all processes of a machine share the pages.
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def _build(final: Path, parts: Mapping[str, Any], build: Callable[[Path], None]) -> None:
    _remove_leftovers(final)
    working = final.with_name(f".{final.name}.{_host()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")
    working.mkdir()
    try:
        build(working)
        (working / "made_from.json").write_text(json.dumps(parts, indent=1, sort_keys=True, default=str))
        # Renaming onto a folder that is not empty fails: another host was first, and made the same.
        with contextlib.suppress(FileExistsError):
            try:
                working.rename(final)
            except OSError:
                if not final.is_dir():
                    raise
    finally:
        shutil.rmtree(working, ignore_errors=True)


def _remove_leftovers(final: Path) -> None:
    """Deletes what builders that were killed on this host left of `final`."""
    for leftover in final.parent.glob(f".{final.name}.{_host()}.*.tmp"):
        pid = leftover.name.removeprefix(f".{final.name}.{_host()}.").split(".")[0]
        # Where there is no /proc, no process can be seen, and nothing is removed.
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def _host() -> str:
    """Returns this host's name: on a shared file system, a process number means nothing without it."""
    return socket.gethostname()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock of this host on `path`; does without where the file system has no locks."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
