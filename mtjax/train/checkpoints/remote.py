"""Checkpoints in an object store: each process writes its own parts there, without a file system that all share.

A store has no rename, so a checkpoint is one as soon as its page of metadata is there, which is written last, by the
first process, once all have said that their parts are. `state/` holds zarr arrays.
"""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from mtjax.config import Config
from mtjax.errors import UserError, first_line
from mtjax.storage import attempt, is_file, names_in, remove, rename, shown, write_bytes
from mtjax.theory.stages import layer_orders
from mtjax.train.checkpoints.arrays import read_reordered
from mtjax.train.checkpoints.barriers import PeerFailed
from mtjax.train.checkpoints.checkpoint import (
    QUARANTINED,
    TIMEOUT,
    Checkpoints,
    checkpoint_metadata,
    fingerprints_later,
    quarantine_name,
    state_arrays,
)
from mtjax.train.checkpoints.corruption import read_on_all_processes, with_checksum
from mtjax.train.checkpoints.pieces import copy_pieces, write_arrays
from mtjax.train.processes.coordination import all_gather_text, num_processes, service
from mtjax.train.step import State

METADATA = "page/metadata"
DONE = "written"


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run, below an address.

    Args:
      folder: `s3:/bucket/run/checkpoints`.
      keep_last: how many of the newest stay.
      keep_every: those whose step is a multiple of this stay, too.
      before_page: called before a checkpoint becomes one: what belongs to it must be in the store by then.
    """

    def __init__(
        self, folder: Path, *, keep_last: int, keep_every: int | None, before_metadata: Callable[[], object]
    ) -> None:
        self._before_page = before_metadata
        self.folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None
        self._latest: int | None = None
        self._before: int | None = None
        self.record = None

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns.

        Raises:
          UserError: the save before failed.
        """
        self._finish()
        step, self._before = int(state.step), self._latest
        pieces = copy_pieces(state_arrays(state), first_copies=True)
        prints = fingerprints_later(state, layer_orders(config.model, config.parallel))
        page = checkpoint_metadata(step, config, consumed_samples, self.record)

        def write() -> None:
            try:
                self._write(step, pieces)
                if jax.process_index() == 0:
                    proven = with_checksum(page | {"fingerprints": prints()})
                    self._before_page()
                    content = json.dumps(proven)
                    write_bytes(f"{shown(self.folder)}/{step}/{METADATA}", content.encode())
                    self._remove_old()
                self._latest = step
            except Exception as e:  # told at the next save
                self._failure = e

        self._writer = threading.Thread(target=write, name="remote checkpoint")
        self._writer.start()

    def _write(self, step: int, pieces: Any) -> None:
        """Writes this process' parts; the first process waits for those of the others."""
        place, key = self.folder / str(step) / "state", f"mtjax/remote/{step}"
        word = DONE
        try:
            attempt(f"writing {shown(place)}", lambda: write_arrays(pieces, place))
        except Exception as e:
            word = first_line(e)
            raise
        finally:
            if num_processes() > 1:
                service().key_value_set(f"{key}/{jax.process_index()}", word)
        if jax.process_index() == 0 and num_processes() > 1:
            words = [service().blocking_key_value_get(f"{key}/{i}", TIMEOUT * 1000) for i in range(num_processes())]
            if failed := [word for word in words if word != DONE]:
                raise PeerFailed(failed[0])

    def _remove_old(self) -> None:
        """Removes all but the last ones and every `keep_every`-th, the pages first."""
        steps = self._complete()
        kept = {step for step in steps if self._keep_every and step % self._keep_every == 0}
        for step in set(steps[self._keep_last :]) - kept:
            remove(f"{shown(self.folder)}/{step}/page")
            remove(f"{shown(self.folder)}/{step}")

    def _complete(self) -> list[int]:
        """Steps whose page is there, newest first."""
        steps = (int(name) for name in names_in(shown(self.folder)) if name.isdigit())
        return sorted((step for step in steps if is_file(self.folder / str(step) / METADATA)), reverse=True)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if isinstance(failure, PeerFailed):
                raise failure
            said = str(failure) if isinstance(failure, UserError) else first_line(failure)
            raise UserError(f"a checkpoint was not saved in {shown(self.folder)}: {said}") from failure

    def latest(self) -> int | None:
        """The newest step saved."""
        return self._latest

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
          UserError: something was not.
        """
        self._finish()

    def reopen(self) -> None:
        """Forgets a save that failed; without a page it is not a checkpoint."""
        self._latest = self._before

    def newest_on_disk(self) -> Path | None:
        """The newest checkpoint; the store, which may be out of reach, is not asked."""
        return self.folder / str(self._latest) if self._latest else None

    close = wait

    def _list(self) -> tuple[list[int], list[str]]:
        def look() -> tuple[list[int], list[str]]:
            if jax.process_index() != 0:
                return [], []
            steps, names = self._complete(), names_in(shown(self.folder))
            for name in names:
                if name.isdigit() and int(name) not in steps:
                    remove(f"{shown(self.folder)}/{name}")  # a save that was killed: its parts may be of another mesh
            return steps, [name for name in names if name.startswith(QUARANTINED)]

        seen = read_on_all_processes(shown(self.folder), self.folder, look)
        steps, aside = json.loads(all_gather_text("the list of checkpoints", json.dumps(seen))[0])
        self._latest = max(steps, default=None)
        return steps, aside

    def _read_state(self, step: int, tree: Any, saved: Any, orders: Any) -> State:
        return State(**read_reordered(self.folder / str(step) / "state", tree, saved, orders))

    def _quarantine(self, step: int) -> None:
        def move() -> None:
            if jax.process_index() == 0:
                url = shown(self.folder)
                rename(f"{url}/{step}", f"{url}/{quarantine_name(str(step), names_in(url))}")

        read_on_all_processes(f"{shown(self.folder)}/{step}, which is damaged,", self.folder, move)
