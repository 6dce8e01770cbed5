"""A lock on a run's folder (--out) that works across machines, also on network file systems.

The lock is a file with the host, pid and start of its holder, whose modification time is the heartbeat. A process that
finds a lock watches it: if it is renewed, its holder is alive; if it is not renewed for `LEASE` seconds of the
watcher's clock, or the process no longer exists on this machine, the lock is taken over.
"""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from filelock import LeaseCompromise, SoftFileLease, Timeout

from mtjax.errors import LOST, UserError, first_line

NAME = ".lock"
LEASE = 90.0
"""Seconds without a heartbeat after which a holder counts as dead."""
HEARTBEAT = 2.0
"""Seconds between heartbeats: the time that a second start needs to see that the first one is alive."""


def lock_folder(
    folder: Path, say: Callable[[str], object], *, lease: float = LEASE, heartbeat: float = HEARTBEAT
) -> SoftFileLease:
    """Locks a run's folder, and creates it if it does not exist; `release` unlocks it.

    A holder that loses its lock (it was stopped for so long that another start took over) ends at once.

    Args:
      folder: of the run.
      say: called with notes: for which holder it waits, and from which it took over.
      lease: seconds, the same in all starts.
      heartbeat: seconds.

    Raises:
      UserError: a process that is alive holds the lock, or the folder can't be written to.
    """
    path = folder / NAME
    lock = SoftFileLease(
        path, lease_duration=lease, heartbeat_interval=heartbeat, on_compromise=_end, thread_local=False
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = _wait(lock, path, say)
    except OSError as e:
        raise UserError(f"--out {folder} can't be used: {first_line(e)}") from e
    if holder is not None:
        say(taken_over(folder, holder))
    return lock


def _wait(lock: SoftFileLease, path: Path, say: Callable[[str], object]) -> str | None:
    """Waits until the lock is acquired; returns the holder from whom it was taken over."""
    begun, is_reported = time.monotonic(), False
    holder, renewed = _holder(lock), _last_heartbeat(path)
    # Whether the heartbeat changes, not how old it is: clocks of machines that share a folder may differ.
    while not _acquired(lock):
        if (new := _holder(lock)) != holder:  # another process has acquired or released it
            holder, renewed = new, _last_heartbeat(path)
        elif _last_heartbeat(path) != renewed:
            raise in_use(path.parent, holder)
        waited = time.monotonic() - begun
        # A dead holder's lock has been taken over by then: something else keeps it.
        if waited > 1.5 * lock.lease_duration:
            raise UserError(f"{path} can't be acquired: remove it if no run is using its folder")
        if waited > 0.1 * lock.lease_duration and not is_reported:
            say(claimed(path.parent, holder, lock.lease_duration))
            is_reported = True
        time.sleep(0.1)
    return holder


def _acquired(lock: SoftFileLease) -> bool:
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    return True


def _holder(lock: SoftFileLease) -> str | None:
    owner = lock.owner
    return f"process {owner.pid} on {owner.hostname.partition('?')[0]}" if owner else None


def _last_heartbeat(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _end(loss: LeaseCompromise) -> None:
    why = first_line(loss.error) if loss.error else "another start took it over, or removed it"
    end(f"{loss.lock_file} is no longer held by this run: {why}")


def in_use(folder: object, holder: str | None) -> UserError:
    """Returns the error of a second start while a run is alive."""
    return UserError(f"{folder} is in use: {holder} is training there; wait for it, stop it, or use another --out")


def claimed(folder: object, holder: str | None, lease: float) -> str:
    """Returns the note of a start that waits for a heartbeat."""
    return f"note    {folder} is locked by {holder}: waiting up to {lease:.0f} s for its heartbeat"


def taken_over(folder: object, holder: str) -> str:
    """Returns the note of a start that has taken over a lock."""
    return f"note    took over {folder} from {holder}, which ended without releasing it"


def end(why: str) -> NoReturn:
    """Ends the process from the heartbeat's thread: anything else that it writes could corrupt the other run."""
    print(f"error: {why}; resume with --resume when no other run uses this folder", file=sys.stderr)
    sys.stderr.flush()
    os._exit(LOST)
