"""Saves that may fail: a full, read-only or vanished disk costs a checkpoint, and the run only when it stays so.

Before Orbax begins, each process looks whether its part can be written, and all of them agree. What goes wrong after
that comes up where the save is waited for: in another thread's exception, which Orbax raises then.
"""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import jax

from mtjax.config import Config
from mtjax.errors import UserError, disk_reason, first_line
from mtjax.storage import shown, url_of
from mtjax.train.checkpoints.barriers import PeerFailed
from mtjax.train.checkpoints.checkpoint import Checkpoints, state_arrays
from mtjax.train.processes.coordination import all_gather_text, num_processes, this_process, whereabouts
from mtjax.train.step import State


class Saves:
    """The saves of a run.

    Args:
      checkpoints: of the run.
      tolerated: saves in a row that may fail.
      advice: what to type to go on.
      say: called with a note when one fails.
    """

    def __init__(
        self, checkpoints: Checkpoints, tolerated: int, advice: Callable[[], str], say: Callable[[str], object]
    ) -> None:
        self._checkpoints, self._tolerated, self._advice, self._say = checkpoints, tolerated, advice, say
        self._failed, self._under_way = 0, 0
        self._place = _place(checkpoints.folder)
        # What is raised here and said in a sentence, asyncio repeats for each array, and Orbax with its stack.
        logging.getLogger("asyncio").addFilter(_is_news)
        logging.getLogger("absl").addFilter(_is_news)

    def save(self, state: State, config: Config, consumed_samples: int, *, last: bool) -> None:
        """Starts a save, once the one before it is done; the last one of a run is waited for.

        Raises:
          UserError: more saves in a row failed than are tolerated, or the last one did.
        """
        step = int(state.step)
        self.finish()
        if why := _agreed("the room for a checkpoint", self._moved() or obstacle(self._checkpoints.folder, state)):
            self._count(step, why, last=last)
            return
        try:
            self._checkpoints.save(state, config, consumed_samples)
        except UserError:
            raise
        except Exception as e:
            self._checkpoints.reopen()
            # Other processes may have begun, and wait for this one: only all together could go on.
            self._count(step, self._reason(e), last=last or num_processes() > 1)
            return
        self._under_way = step
        if last:
            self.finish(last=True)

    def finish(self, *, last: bool = False) -> None:
        """Waits for the save under way.

        Raises:
          UserError: like `save`.
        """
        step, self._under_way = self._under_way, 0
        if not step:
            return
        why = None
        try:
            self._checkpoints.wait()
            why = self._moved()
        except PeerFailed:
            pass  # that process says why
        except Exception as e:
            why = self._reason(e)
        if why := _agreed("the end of a save", why):
            self._checkpoints.reopen()
            self._count(step, why, last=last)
        else:
            self._failed = 0

    def _moved(self) -> str | None:
        """What is wrong when the folder's name means another one now.

        Under a disk that is gone there is its mount point, where Orbax would make the folders that it misses.
        """
        folder = self._checkpoints.folder
        if _place(folder) in (None, self._place):
            return None
        return f"{folder} is not the folder that this run began with: its disk is gone, or it was moved"

    def _reason(self, error: Exception) -> str:
        if isinstance(error, UserError):
            return str(error)
        reason = disk_reason(error)
        return f"{shown(self._checkpoints.folder)}: {reason}" if reason else first_line(error)

    def _count(self, step: int, why: str, *, last: bool) -> None:
        self._failed += 1
        if not last and self._failed <= self._tolerated:
            self._say(
                f"note    step {step} could not be saved ({why}); the run ends if more than {self._tolerated} saves in "
                f"a row fail, and this was number {self._failed}"
            )
            return
        saved = None if self._moved() else self._checkpoints.newest_on_disk()
        kept = f"the last good checkpoint is {shown(saved)}" if saved else "no checkpoint can be seen there"
        raise UserError(f"step {step} could not be saved: {why}; {kept}; repair it, and go on with: {self._advice()}")


def _place(folder: Path) -> tuple[int, int] | None:
    """What tells a folder from another one of the same name; None if there is none here."""
    try:
        seen = folder.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a library's log record says what no exception does."""
    return record.exc_info is None


def obstacle(folder: Path, state: State) -> str | None:
    """What keeps this process' part of a checkpoint from being written to a folder; None if nothing is known to.

    Of an object store nothing is known before.
    """
    if url_of(folder):
        return None
    probe = folder / f".probe-{this_process()}"
    try:
        probe.write_bytes(b"1")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    except OSError as e:
        if not isinstance(e, FileNotFoundError) and os.path.lexists(probe):
            probe.unlink(missing_ok=True)
        return f"{folder}: {e.strerror}"
    needed = sum(
        shard.data.nbytes
        for array in jax.tree.leaves(state_arrays(state))
        for shard in array.addressable_shards
        if shard.replica_id == 0
    )
    if needed > free:
        return f"{folder}: a checkpoint takes {needed / 1e6:,.1f} MB here, and {free / 1e6:,.1f} are free"
    return None


def _agreed(name: str, why: str | None) -> str | None:
    """What the first process says that has something to say, in all processes; with several, it is named."""
    if why and num_processes() > 1:
        why = f"process {this_process()} ({whereabouts()}): {why}"
    return next((word for word in all_gather_text(name, why or "") if word), None)
