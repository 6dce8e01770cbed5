"""One run, one folder: a claim on --out that every other start respects, also over network file systems.

The claim is a file with this process' host, pid and start, whose time of change is the heartbeat. Who finds one watches
it: when it is renewed, its holder lives; when it is not for `LEASE` seconds of the watcher's own clock, or the process
is gone from this machine, the folder is taken over.
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
"""Seconds between heartbeats: how long a second start takes to see that the first one lives."""


def lock_folder(
    folder: Path, say: Callable[[str], object], *, lease: float = LEASE, heartbeat: float = HEARTBEAT
) -> SoftFileLease:
    """Claims a run's folder, which is made where there is none; `release` gives it back.

    A holder that loses its claim - it was stopped for so long that another start took over - ends at once.

    Args:
      folder: of the run.
      say: called with what the user should know: whom it waits for, and from whom it took over.
      lease: seconds, the same in all starts.
      heartbeat: seconds.

    Raises:
      UserError: a process that lives holds it, or the folder can't be written to.
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
    """Waits until the claim is ours; returns from whom it was taken over."""
    begun, told = time.monotonic(), False
    holder, renewed = _holder(lock), _renewed(path)
    while not _acquired(lock):
        if (new := _holder(lock)) != holder:  # it changed hands, or was given back
            holder, renewed = new, _renewed(path)
        elif _renewed(path) != renewed:
            raise in_use(path.parent, holder)
        waited = time.monotonic() - begun
        if waited > 1.5 * lock.lease_duration:
            raise UserError(f"{path} can't be claimed: remove it, if no run is going on in its folder")
        if waited > 0.1 * lock.lease_duration and not told:
            say(claimed(path.parent, holder, lock.lease_duration))
            told = True
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


def _renewed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _end(loss: LeaseCompromise) -> None:
    why = first_line(loss.error) if loss.error else "another start took it over, or removed it"
    end(f"{loss.lock_file} is no longer ours: {why}")


def in_use(place: object, holder: str | None) -> UserError:
    """What a second start says where a run goes on."""
    return UserError(f"{place} is in use: {holder} is training there; wait for it, stop it, or take another --out")


def claimed(place: object, holder: str | None, lease: float) -> str:
    """What it says while it waits for a heartbeat."""
    return f"note    {place} is claimed by {holder}: waiting up to {lease:.0f} s for its heartbeat"


def taken_over(place: object, holder: str) -> str:
    """What it says when there was none."""
    return f"note    took {place} over from {holder}, which ended without giving it back"


def end(why: str) -> NoReturn:
    """Ends the process, from the heartbeat's thread: whatever else it writes could spoil another run."""
    print(f"error: {why}; --resume goes on once nothing else runs there", file=sys.stderr)
    sys.stderr.flush()
    os._exit(LOST)
