"""How the processes of a run hear that one of them could not write its part of a checkpoint.

Orbax's processes meet when each has written its part, when the first has made a checkpoint of them, and, whatever
happened, at the end of a save. One that fails goes straight to the last of these meetings, while the others wait for
it at the first. Here it goes to all of them, and says that it failed; then all go on together.
"""

import itertools

from mtjax.train.processes.coordination import gather_text_at, num_processes

WRITTEN, COMMITTED = "async_write_complete", "async_commit_complete"
FAILED = "failed"
_places = itertools.count()
"""Numbers the meetings of saves, which every process holds in the same order."""


class PeerFailed(Exception):
    """Another process could not write its part, and says why where the save is waited for."""


class SaveBarriers:
    """Where the processes of a run meet during the saves of one manager: Orbax's `AsyncOptions.barrier_sync_fn`."""

    def __init__(self) -> None:
        self._left: list[str] | None = None
        """Meetings that the save under way still has before its end; None between saves."""

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Meets the others.

        Raises:
          PeerFailed: one of them could not write its part.
          UserError: one of them did not come in time.
        """
        if num_processes() == 1:
            return
        phase = next((phase for phase in (WRITTEN, COMMITTED) if phase in key), None)
        if phase is not None and self._left:
            self._left.remove(phase)
            words = _meet("", timeout_ms)
            if FAILED in words:
                raise PeerFailed(f"process {words.index(FAILED)} could not write its part")
            return
        for _ in self._left or ():  # the end of a save that failed
            _meet(FAILED, timeout_ms)
        if self._left:
            self._left = []
        _meet("", timeout_ms)
        if key.endswith("set_value_end"):
            self._left = [WRITTEN, COMMITTED] if self._left is None else None


def _meet(word: str, timeout_ms: int) -> list[str]:
    return gather_text_at(f"saves/{next(_places)}", "a save", word, timeout_ms / 1000)
