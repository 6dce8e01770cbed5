"""A run's folder in an object store: small files are written on this machine and uploaded when they change.

Object stores have no append, so files like `metrics.jsonl` are in the cache folder while the run goes on. The lock is
an object that only one start can create; its holder rewrites it regularly, which is the heartbeat.
"""

import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtjax.errors import UserError, first_line
from mtjax.runtime.checkpoints.weights import BEST, CHECKPOINTS
from mtjax.storage import attempt, blocks_of, files_below, filesystem, names_in, read_bytes, write_bytes
from mtjax.train.folder.lock import LEASE, NAME, claimed, end, in_use, taken_over

HEARTBEAT = 10.0
"""Seconds between heartbeats, and between uploads of changed files."""
LEFT_OUT = (CHECKPOINTS, BEST, NAME)
"""Entries of the store that are not downloaded: each process reads its shards from there."""


class RemoteFolder:
    """The folder at `url`, and its files on this machine in `work`. Only the first process of a run locks it.

    Args:
      url: of the run.
      cache: folder on this machine for the files of runs in object stores.
      lease: seconds, the same in all starts.
      heartbeat: seconds.
    """

    def __init__(self, url: str, cache: Path, *, lease: float = LEASE, heartbeat: float = HEARTBEAT) -> None:
        self.url = url
        self.work = cache / "runs" / hashlib.sha256(url.encode()).hexdigest()[:20]
        self._lock, self._lease, self._heartbeat = f"{url}/{NAME}", lease, heartbeat
        self._token, self._beat = uuid.uuid4().hex, 0
        self._uploaded: dict[Path, tuple[int, int]] = {}
        self._uploading, self._closed = threading.Lock(), threading.Event()
        # A daemon: a run that fails elsewhere is not kept alive by it, and its lock expires.
        self._thread = threading.Thread(target=self._live, name="remote folder", daemon=True)

    def claim(self, say: Callable[[str], object]) -> None:
        """Locks the folder, and downloads its small files.

        Raises:
          UserError: a process that is alive holds the lock, or the store can't be reached.
        """
        holder = self._acquire(say)
        if holder is not None:
            say(taken_over(self.url, holder))
        # Files that an earlier start of this machine left here may be older than those of the store.
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        for name in names_in(self.url):
            for source, size in files_below(f"{self.url}/{name}").items() if name not in LEFT_OUT else ():
                target = self.work / source.removeprefix(f"{self.url}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    file.writelines(blocks_of(source, size))
        self._uploaded = {path: _mark(path) for path in self._files()}
        self._thread.start()

    def release(self) -> None:
        """Uploads changed files, and releases the lock.

        Raises:
          UserError: the store can't be reached; the files stay here.
        """
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join()
        try:
            self.upload()
        except UserError as e:
            raise UserError(f"{e}; what was not copied is in {self.work}") from e
        # Removes only its own lock: another start may have taken it over.
        if self._owner().get("token") == self._token:
            fs = filesystem(self.url)
            attempt(f"removing {self._lock}", lambda: fs.rm_file(self._lock))

    def upload(self) -> None:
        """Uploads files that have changed.

        Raises:
          UserError: the store can't be reached, or refuses.
        """
        with self._uploading:
            for path in self._files():
                # Taken before the file is read: a change while it is read is uploaded the next time.
                mark = _mark(path)
                if self._uploaded.get(path) != mark:
                    write_bytes(f"{self.url}/{path.relative_to(self.work)}", path.read_bytes())
                    self._uploaded[path] = mark

    def _files(self) -> list[Path]:
        paths = (path for path in self.work.rglob("*") if path.is_file())
        return sorted(path for path in paths if path.suffix != ".tmp" and path.relative_to(self.work).parts[0] != NAME)

    # --- The lock

    def _acquire(self, say: Callable[[str], object]) -> str | None:
        """Waits until the lock is acquired; returns the holder from whom it was taken over."""
        fs = filesystem(self.url)
        taken_from, seen, since = None, None, time.monotonic()
        while True:
            try:
                # The store creates the object or refuses: of two starts at the same time one succeeds.
                attempt(f"writing {self._lock}", lambda: fs.pipe_file(self._lock, self._word(), mode="create"))
                return taken_from
            except FileExistsError:
                owner = self._owner()
            if owner.get("token") == self._token:  # the earlier request succeeded, but its response was lost
                return taken_from
            name = f"process {owner.get('pid')} on {owner.get('host')}"
            # The holder wrote another beat since: it is alive.
            if seen is not None and owner != seen and owner.get("token") == seen.get("token"):
                raise in_use(self.url, name)
            if owner != seen:
                # A holder whose word has not changed for a lease, by this machine's clock, is dead.
                seen, since = owner, time.monotonic()
                if not _is_gone(owner):
                    say(claimed(self.url, name, self._lease))
            if _is_gone(owner) or time.monotonic() - since > self._lease:
                taken_from = name
                attempt(f"removing {self._lock}", lambda: _remove(fs, self._lock))
                continue
            time.sleep(min(1.0, self._heartbeat / 4))

    def _word(self) -> bytes:
        self._beat += 1
        claim = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token, "beat": self._beat}
        return json.dumps(claim).encode()

    def _owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(read_bytes(self._lock))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _live(self) -> None:
        """Renews the lock and uploads files, until the folder is released."""
        renewed, is_reported = time.monotonic(), False
        while not self._closed.wait(self._heartbeat):
            try:
                if self._owner().get("token") != self._token:
                    end(f"{self._lock} is no longer held by this run: another start took it over, or removed it")
                write_bytes(self._lock, self._word())
                # Before the upload, which may take longer than the lease.
                renewed = time.monotonic()
                self.upload()
                is_reported = False
            except Exception as e:
                if time.monotonic() - renewed > self._lease:
                    end(f"{self._lock} could not be renewed for {self._lease:.0f} s: {first_line(e)}")
                if not is_reported:
                    print(f"note    {first_line(e)}; trying again", file=sys.stderr)
                is_reported = True


def _mark(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _remove(fs: Any, path: str) -> None:
    try:
        fs.rm_file(path)
    except FileNotFoundError:
        return


def _is_gone(owner: dict[str, Any]) -> bool:
    """Returns whether the holder ran on this machine and no longer exists."""
    pid = owner.get("pid")
    return owner.get("host") == socket.gethostname() and isinstance(pid, int) and not Path(f"/proc/{pid}").exists()
