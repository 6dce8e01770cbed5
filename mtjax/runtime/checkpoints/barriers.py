"""Barriers of a save, with which the processes of a run learn that one of them could not write its shards.

Orbax has barriers when each process has written its shards, when the first has committed the checkpoint, and, whether
or not there was an error, at the end of a save. A process that fails goes straight to the last barrier, while the
others wait for it at the first. Here it goes to all of them and reports its failure; then all continue together.
"""

import itertools

from mtjax.runtime.processes.coordination import gather_text_at, num_processes

WRITTEN, COMMITTED = "async_write_complete", "async_commit_complete"
FAILED = "failed"
_barrier_numbers = itertools.count()
"""Numbers the barriers of saves; every process passes them in the same order."""


class PeerFailed(Exception):
    """Another process could not write its shards; that process reports the reason where the save is waited for."""


class SaveBarriers:
    """The barriers of the saves of one manager: Orbax's `AsyncOptions.barrier_sync_fn`."""

    def __init__(self) -> None:
        self._remaining: list[str] | None = None
        """Barriers that the current save has not yet passed; None between saves."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits at a barrier for the other processes.

        Raises:
          PeerFailed: a process could not write its shards.
          UserError: a process did not reach the barrier in time.
        """
        if num_processes() == 1:
            return
        phase = next((phase for phase in (WRITTEN, COMMITTED) if phase in key), None)
        if phase is not None and self._remaining:
            self._remaining.remove(phase)
            # Also after success: the others learn from it that this process has written its shards.
            reports = _barrier("", timeout_ms)
            if FAILED in reports:
                raise PeerFailed(f"process {reports.index(FAILED)} could not write its shards")
            return
        for _ in self._remaining or ():  # a save that failed before: skip to its last barrier
            _barrier(FAILED, timeout_ms)
        if self._remaining:
            self._remaining = []
        _barrier("", timeout_ms)
        # Orbax passes this one where a save begins, and again where it ends.
        if key.endswith("set_value_end"):
            self._remaining = [WRITTEN, COMMITTED] if self._remaining is None else None


def _barrier(report: str, timeout_ms: int) -> list[str]:
    return gather_text_at(f"saves/{next(_barrier_numbers)}", "a save", report, timeout_ms / 1000)
