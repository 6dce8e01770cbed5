"""Prepared data, kept by content: a folder per (kind, what it was made from), made once even when many processes start.

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
from pathlib import Path
from typing import Any

from mtjax.config import Config
from mtjax.errors import UserError


def cache_root(config: Config) -> Path:
    """`cache_dir` of the config, else `$XDG_CACHE_HOME/mtjax`, else `~/.cache/mtjax`."""
    if config.data.cache_dir is not None:
        return config.data.cache_dir.expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "mtjax"


def digest(parts: Mapping[str, Any]) -> str:
    """20 hex digits of what `parts` (JSON values) say; equal for equal parts on any machine."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def cached_folder(root: Path, kind: str, parts: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """The folder `root/kind-DIGEST`, made by `build(empty folder)` when it isn't there yet.

    Args:
      root: the cache.
      kind: a word that a person sees in a listing of the cache.
      parts: everything that the contents depend on, as JSON values; kept beside the contents as `made_from.json`.
      build: fills the folder; if it raises, nothing remains.

    Raises:
      UserError: the cache can't be written.
    """
    final = root / f"{kind}-{digest(parts)}"
    if final.is_dir():
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{final.name}.lock"):
            if not final.is_dir():
                _build(final, parts, build)
    except PermissionError as e:
        raise UserError(f"the cache {root} can't be written ({e.strerror}); give another with --cache-dir") from e
    except OSError as e:
        if e.errno is None or e.filename is None:
            raise
        raise UserError(f"{e.strerror}: {e.filename}, while preparing data in the cache {root}") from e
    return final


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
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").is_dir():
            shutil.rmtree(leftover, ignore_errors=True)


def _host() -> str:
    """This host's name: on a shared file system, a process number means nothing without it."""
    return socket.gethostname()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock of this host on `path`; goes on without where the file system has no locks."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def file_digest(path: Path, root: Path) -> str:
    """The content hash of a file; remembered in the cache by path, size and time of change, so that it is read once."""
    status = path.stat()
    known = [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino]

    def build(folder: Path) -> None:
        with path.open("rb") as file:
            (folder / "sha256").write_text(hashlib.file_digest(file, "sha256").hexdigest())

    return (cached_folder(root, "file", {"file": known}, build) / "sha256").read_text()
