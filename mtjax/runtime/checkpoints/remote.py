"""Checkpoints in an object store: each process writes its shards directly, without a shared file system.

An object store has no atomic rename, so a checkpoint is complete once its metadata exist: the first process writes them
last, after all processes have reported that their shards are written. `state/` holds zarr arrays.
"""

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mtjax.config import Config
from mtjax.errors import UserError, first_line
from mtjax.layout.stages import layer_orders
from mtjax.runtime.checkpoints.arrays import read_reordered
from mtjax.runtime.checkpoints.barriers import PeerFailed
from mtjax.runtime.checkpoints.checkpoint import (
    QUARANTINED,
    TIMEOUT,
    Checkpoints,
    checkpoint_metadata,
    fingerprints_later,
    quarantine_name,
    state_arrays,
)
from mtjax.runtime.checkpoints.corruption import read_on_all_processes, with_checksum
from mtjax.runtime.checkpoints.pieces import copy_pieces, write_arrays
from mtjax.runtime.processes.coordination import all_gather_text, num_processes, service
from mtjax.runtime.train_state import State
from mtjax.storage import attempt, is_file, names_in, remove, rename, shown, write_bytes

METADATA = "page/metadata"
DONE = "written"
_save_numbers = itertools.count()
"""Numbers the saves of this process; every process starts them in the same order."""


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run, below an address in an object store.

    Args:
      folder: `s3:/bucket/run/checkpoints`.
      keep_last: number of newest checkpoints to keep.
      keep_every: also keep checkpoints whose step is a multiple of this.
      before_metadata: called before the metadata are written, which completes a checkpoint: the run's other files must
        be in the store by then.
    """

    def __init__(
        self, folder: Path, *, keep_last: int, keep_every: int | None, before_metadata: Callable[[], object]
    ) -> None:
        # Without the base class's `__init__`: there is no Orbax manager.
        self._before_metadata = before_metadata
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._latest: int | None = None
        self._previous: int | None = None
        self.record = None

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns.

        Raises:
          UserError: the previous save failed.
        """
        self._finish()
        # Before anything that may fail: every process must count this save.
        number = next(_save_numbers)
        step, self._previous = int(state.step), self._latest
        pieces = copy_pieces(state_arrays(state), first_copies=True)
        prints = fingerprints_later(state, layer_orders(config.model, config.parallel))
        metadata = checkpoint_metadata(step, config, consumed_samples, self.record)

        def write() -> None:
            try:
                self._write(step, number, pieces)
                if jax.process_index() == 0:
                    complete = with_checksum(metadata | {"fingerprints": prints()})
                    self._before_metadata()
                    content = json.dumps(complete)
                    write_bytes(f"{shown(self.folder)}/{step}/{METADATA}", content.encode())
                    self._remove_old()
                self._latest = step
            except Exception as e:  # raised at the next save, or when it is waited for
                self._failure = e

        self._writer = threading.Thread(target=write, name="remote checkpoint")
        self._writer.start()

    def _write(self, step: int, number: int, pieces: Any) -> None:
        """Writes this process's shards; the first process then waits for the others."""
        # By number: a step may be saved twice, as the newest checkpoint and as the best, and a key is set once.
        state_folder, key = self.folder / str(step) / "state", f"mtjax/remote/{number}"
        status = DONE
        try:
            attempt(f"writing {shown(state_folder)}", lambda: write_arrays(pieces, state_folder))
        except Exception as e:
            status = first_line(e)
            raise
        finally:
            if num_processes() > 1:
                # Also after an error, or the first process would wait for this one until the timeout.
                service().key_value_set(f"{key}/{jax.process_index()}", status)
        if jax.process_index() == 0 and num_processes() > 1:
            statuses = [service().blocking_key_value_get(f"{key}/{i}", TIMEOUT * 1000) for i in range(num_processes())]
            if failed := [status for status in statuses if status != DONE]:
                raise PeerFailed(failed[0])

    def _remove_old(self) -> None:
        """Removes all but the newest checkpoints and every `keep_every`-th."""
        steps = self._complete()
        retained = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        for step in set(steps[self._keep_last :]) - retained:
            _remove_step(self.folder, step)

    def _complete(self) -> list[int]:
        """Returns the steps with metadata, newest first."""
        steps = (int(name) for name in names_in(shown(self.folder)) if name.isdigit())
        return sorted((step for step in steps if is_file(self.folder / str(step) / METADATA)), reverse=True)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, PeerFailed):
                raise failure
            reason = str(failure) if isinstance(failure, UserError) else first_line(failure)
            raise UserError(f"a checkpoint could not be saved in {shown(self.folder)}: {reason}") from failure

    def latest(self) -> int | None:
        """Returns the newest step saved."""
        return self._latest

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
          UserError: the save failed.
        """
        self._finish()

    def reopen(self) -> None:
        """Forgets a save that failed; without metadata it is not a checkpoint."""
        self._latest = self._previous

    def newest_on_disk(self) -> Path | None:
        """Returns the newest checkpoint known, without a request to the store, which may be unreachable."""
        return self.folder / str(self._latest) if self._latest else None

    close = wait

    def _list(self) -> tuple[list[int], list[str]]:
        def look() -> tuple[list[int], list[str]]:
            if jax.process_index() != 0:
                return [], []
            steps, names = self._complete(), names_in(shown(self.folder))
            for name in names:
                if name.isdigit() and int(name) not in steps:
                    remove(f"{shown(self.folder)}/{name}")  # a save that was killed: its shards may be of another mesh
            return steps, [name for name in names if name.startswith(QUARANTINED)]

        seen = read_on_all_processes(shown(self.folder), self.folder, look)
        steps, quarantined = json.loads(all_gather_text("the list of checkpoints", json.dumps(seen))[0])
        self._latest = max(steps, default=None)
        return steps, quarantined

    def _read_state(self, step: int, tree: Any, saved: Any, orders: Any) -> State:
        return State(**read_reordered(self.folder / str(step) / "state", tree, saved, orders))

    def _quarantine(self, step: int) -> None:
        def move() -> None:
            if jax.process_index() == 0:
                url = shown(self.folder)
                rename(f"{url}/{step}", f"{url}/{quarantine_name(str(step), names_in(url))}")

        read_on_all_processes(f"{shown(self.folder)}/{step}, which is corrupted,", self.folder, move)


def remove_later(folder: Path, step: int) -> None:
    """Removes the checkpoints below an address whose steps are after `step`."""
    for name in names_in(shown(folder)):
        if name.isdigit() and int(name) > step:
            _remove_step(folder, int(name))


def _remove_step(folder: Path, step: int) -> None:
    # The metadata first, as a store removes objects one by one: without it a half-removed step is not a checkpoint.
    remove(f"{shown(folder)}/{step}/page")
    remove(f"{shown(folder)}/{step}")
