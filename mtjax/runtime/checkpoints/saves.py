"""Saves that may fail: a full, read-only or unmounted disk costs a checkpoint, and ends the run only if it persists.

Before Orbax starts, each process checks whether the disk has room and can be written to, and the processes agree. Later
errors occur in Orbax's background thread, and are raised where the save is waited for.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from mtjax.config import Config
from mtjax.errors import UserError, disk_reason, first_line
from mtjax.runtime.checkpoints.barriers import PeerFailed
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, state_arrays
from mtjax.runtime.processes.coordination import all_gather_text, describe_process, num_processes, this_process
from mtjax.runtime.train_state import State
from mtjax.storage import shown, url_of


class Saves:
    """Saves checkpoints of a run, and tolerates some failures in a row.

    Args:
      checkpoints: of the run.
      tolerated: number of saves in a row that may fail.
      advice: returns the command that resumes the run.
      say: called with a note when one fails.
    """

    def __init__(
        self, checkpoints: Checkpoints, tolerated: int, advice: Callable[[], str], say: Callable[[str], object]
    ) -> None:
        self._checkpoints, self._tolerated, self._advice, self._say = checkpoints, tolerated, advice, say
        self._failed, self._pending_step = 0, 0
        self._identity = _folder_identity(checkpoints.folder)
        # Errors that are raised and reported here are also logged by asyncio for each array, and by Orbax with a stack.
        logging.getLogger("asyncio").addFilter(_has_no_exception)
        logging.getLogger("absl").addFilter(_has_no_exception)

    def save(
        self, state: State, config: Config, consumed_samples: int, *, wait: bool = False, must_succeed: bool = False
    ) -> bool:
        """Starts a save, after waiting for the previous one; returns whether it has not failed so far.

        Args:
          state: what is saved.
          config: of the run.
          consumed_samples: the position in the data.
          wait: whether to wait until it is written.
          must_succeed: whether its failure ends the run, as that of the final save does. It is waited for.

        Raises:
          UserError: more saves in a row failed than are tolerated, or one that must succeed did.
        """
        step = int(state.step)
        self.finish()
        # All processes agree before one of them starts: Orbax's barriers would wait for one that does not.
        if why := _first_reason(
            "the room for a checkpoint", self._why_moved() or obstacle(self._checkpoints.folder, state)
        ):
            self._count(step, why, must_succeed=must_succeed)
            return False
        try:
            self._checkpoints.save(state, config, consumed_samples)
        except UserError:
            raise
        except Exception as e:
            self._checkpoints.reopen()
            # Other processes may have started the save and wait for this one: the run can't continue.
            self._count(step, self._reason(e), must_succeed=must_succeed or num_processes() > 1)
            return False
        self._pending_step = step
        return self.finish(must_succeed=must_succeed) if wait or must_succeed else True

    def finish(self, *, must_succeed: bool = False) -> bool:
        """Waits for the save in flight; returns whether it succeeded, True if there is none.

        Raises:
          UserError: like `save`.
        """
        step, self._pending_step = self._pending_step, 0
        if not step:
            return True
        why = None
        try:
            self._checkpoints.wait()
            # Checked again: the disk may have been unmounted meanwhile, and its mount point may have taken the files.
            why = self._why_moved()
        except PeerFailed:
            pass  # that process reports the reason
        except Exception as e:
            why = self._reason(e)
        if why := _first_reason("the end of a save", why):
            self._checkpoints.reopen()
            self._count(step, why, must_succeed=must_succeed)
            return False
        self._failed = 0
        return True

    def _why_moved(self) -> str | None:
        """Returns an error message if the folder's path now refers to another folder.

        When a disk is unmounted, its mount point remains, and Orbax would create the missing folders there.
        """
        folder = self._checkpoints.folder
        if _folder_identity(folder) in (None, self._identity):
            return None
        return f"{folder} is not the folder in which this run started: its disk is gone, or it was moved"

    def _reason(self, error: Exception) -> str:
        if isinstance(error, UserError):
            return str(error)
        reason = disk_reason(error)
        return f"{shown(self._checkpoints.folder)}: {reason}" if reason else first_line(error)

    def _count(self, step: int, why: str, *, must_succeed: bool) -> None:
        """Counts a failed save; reports it, or ends the run if there were too many."""
        self._failed += 1
        if not must_succeed and self._failed <= self._tolerated:
            self._say(
                f"note    step {step} could not be saved ({why}); the run ends if more than {self._tolerated} saves in "
                f"a row fail, and this was number {self._failed}"
            )
            return
        saved = None if self._why_moved() else self._checkpoints.newest_on_disk()
        newest = f"the last good checkpoint is {shown(saved)}" if saved else "no checkpoint is visible there"
        raise UserError(f"step {step} could not be saved: {why}; {newest}; fix this, and resume with: {self._advice()}")


def _folder_identity(folder: Path) -> tuple[int, int] | None:
    """Returns device and inode of a folder; None if it does not exist."""
    try:
        seen = folder.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _has_no_exception(record: logging.LogRecord) -> bool:
    """Returns whether a library's log record is not about an exception."""
    return record.exc_info is None


def obstacle(folder: Path, state: State) -> str | None:
    """Returns why a checkpoint can't be written to a folder that all processes see; None if no obstacle is known.

    Object stores are not checked.
    """
    if url_of(folder):
        return None
    probe = folder / f".probe-{this_process()}"
    try:
        probe.write_bytes(b"1")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as e:
        # A full disk: the probe's file exists, but its content does not fit.
        if not isinstance(e, FileNotFoundError) and os.path.lexists(probe):
            probe.unlink(missing_ok=True)
        return f"{folder}: {e.strerror}"
    # The whole state, not this process's shards: the others write theirs to the same disk.
    needed = sum(array.nbytes for array in jax.tree.leaves(state_arrays(state)))
    if needed > free:
        return f"{folder}: a checkpoint needs {needed / 1e6:,.1f} MB here, and {free / 1e6:,.1f} MB are free"
    return None


def _first_reason(name: str, why: str | None) -> str | None:
    """Returns, in all processes, the first failure that a process reports; with several processes, it names the
    process."""
    if why and num_processes() > 1:
        why = f"process {this_process()} ({describe_process()}): {why}"
    return next((reason for reason in all_gather_text(name, why or "") if reason), None)
