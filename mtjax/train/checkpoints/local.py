"""The tier of frequent checkpoints: each process writes what its devices hold to its machine's own disk.

A restart takes the newest step of which the processes have all parts between them: who lost its disk gets its parts
over the network from processes that hold the same ones. Nobody reads another machine's disk; they tell each other.
"""

import contextlib
import json
import logging
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from mtjax.config import Config, Output
from mtjax.config.place import was_copied
from mtjax.errors import UserError, first_line
from mtjax.sharding.param_specs import dotted
from mtjax.sharding.restore_missing import have_all, restore_missing
from mtjax.theory.stages import layer_orders
from mtjax.train.checkpoints.arrays import open_array, place_array
from mtjax.train.checkpoints.checkpoint import (
    Restored,
    check_same_model,
    check_same_names,
    checkpoint_metadata,
    fingerprints,
    fingerprints_later,
    quarantine_name,
    saved_orders,
    state_arrays,
)
from mtjax.train.checkpoints.corruption import (
    DAMAGED,
    REFUSED,
    failure_of,
    metadata_checksum,
    read_metadata,
    read_on_all_processes,
)
from mtjax.train.checkpoints.past import Past, RunRecord
from mtjax.train.checkpoints.pieces import copy_pieces, covers, verify, write_pieces
from mtjax.train.processes.coordination import all_gather_text
from mtjax.train.step import State

IDENTITY = "run_id"
"""The file in a run's folder whose first line names its folder on local disks: another run in the same --out has
another. The second line is the run's folder, by which a copy is told from the original."""
LACKING = "lacking"

T = TypeVar("T")

log = logging.getLogger(__name__)


def open_local(output: Output, folder: Path) -> "LocalCheckpoints | None":
    """The local tier of the run in `folder`; None where --local-checkpoints is not given. All processes call it.

    Raises:
      UserError: in all processes, when one can't write to its disk.
    """
    if output.local_checkpoints is None:
        return None
    identity = all_gather_text(
        "the name of the local checkpoints", _identity(folder) if jax.process_index() == 0 else ""
    )[0]
    local = output.local_checkpoints / f"mtjax-{identity}"

    def make() -> None:
        try:
            local.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--local-checkpoints {output.local_checkpoints} can't be used: {first_line(e)}") from e

    read_on_all_processes("the folder of local checkpoints", output.local_checkpoints, make)
    return LocalCheckpoints(local, every=output.local_every, keep=output.local_keep)


def _identity(folder: Path) -> str:
    path = folder / IDENTITY
    try:
        words = path.read_text().splitlines() if path.exists() else []
        identity, place = [*words, *[None] * 2][:2]
        if identity is None or was_copied(folder, place):  # a copy must not write into the original's
            identity = uuid.uuid4().hex[:12]
        path.write_text(f"{identity}\n{folder.resolve()}\n")
        return identity
    except OSError as e:
        raise UserError(f"{path} can't be used: {first_line(e)}") from e


class LocalCheckpoints:
    """The local tier of one run, as one process sees it.

    Args:
      folder: of this run, on this machine.
      every: steps between checkpoints.
      keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, *, every: int, keep: int) -> None:
        self.folder, self._every, self._keep = folder, every, keep
        self._me = f"process-{jax.process_index()}"
        self._writer: threading.Thread | None = None
        self._corrupted: dict[Path, str] = {}
        self._tried: set[int] = set()
        self.record: RunRecord | None = None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint belongs after this step."""
        return step % self._every == 0

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns. A disk that fails is said, and no more."""
        self.close()
        step = int(state.step)
        pieces = copy_pieces(state_arrays(state))
        prints = fingerprints_later(state, layer_orders(config.model, config.parallel))
        page = checkpoint_metadata(step, config, consumed_samples, self.record)

        def write() -> None:
            try:
                write_pieces(pieces, page | {"fingerprints": prints()}, self.folder / str(step) / self._me)
                self._remove_old(step)
            except Exception as e:  # whatever a disk may cause: the other tier stays
                said = first_line(e)
                log.warning("the local checkpoint of step %d was not saved (%s); the run goes on", step, said)

        self._writer = threading.Thread(target=write, name="local checkpoint")
        self._writer.start()

    def close(self) -> None:
        """Waits until what was saved is written."""
        if self._writer is not None:
            self._writer.join()

    def _remove_old(self, newest: int) -> None:
        """Removes what is older than the last ones, and what an abandoned course of the run left beyond the newest.

        Any process may do it for its machine: who has saved a step knows that all have finished the one before.
        """
        steps = sorted(step for step in self._steps() if step <= newest)
        keep = set(steps[-self._keep :])
        for step in set(self._steps()) - keep:
            shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]

    # --- restoring

    def newest(self, at_least: int, abstract: State, config: Config, say: Callable[[str], object]) -> Restored | None:
        """The newest step not yet tried that the processes have between them; None where there is none.

        All processes call it.

        Args:
          at_least: the oldest step that is wanted.
          abstract: where the state shall be.
          config: of this run.
          say: called with why a newer step is not taken, and with who gets its parts from others.

        Raises:
          UserError: in all processes, when one has what it can't read, or what is of another model.
        """
        seen = read_on_all_processes("the list of local checkpoints", self.folder, self._steps)
        everybody = [json.loads(word) for word in all_gather_text("the local checkpoints", json.dumps(seen))]
        for step in sorted({step for steps in everybody for step in steps} - self._tried, reverse=True):
            if step < at_least:
                break
            self._tried.add(step)
            restored, note = self._restore(step, abstract, config)
            if note:
                say(f"note    {note}")
            if restored is not None:
                return restored
        return None

    def _restore(self, step: int, abstract: State, config: Config) -> tuple[Restored | None, str]:
        """The state of a step, or why it can't be had; or who gets its parts from others."""
        found = self._find_copies(step, abstract, config)
        identity = metadata_checksum(found.metadata) if found.metadata else ""
        word = {"host": socket.gethostname(), "failure": found.failure, "identity": identity}
        words = [json.loads(word) for word in all_gather_text(f"the local checkpoint of step {step}", json.dumps(word))]
        for word in words:
            if word["failure"] and word["failure"]["kind"] != LACKING:
                _refuse(self.folder / str(step), word)
        holders = {process for process, word in enumerate(words) if not word["failure"]}
        without = ", ".join(
            f"process {process} ({word['host']}) {word['failure']['reason']}"
            for process, word in enumerate(words)
            if word["failure"]
        )
        name = f"step {step} in {self.folder}"
        if len({words[process]["identity"] for process in holders}) > 1:
            return None, f"{name} is not taken: the processes hold different states of it"
        if not have_all(jax.tree.leaves(state_arrays(abstract)), holders):
            return None, f"{name} is not taken: {without}"
        first = min(holders)
        own = json.dumps(found.metadata) if jax.process_index() == first else ""
        page = json.loads(all_gather_text(f"the page of step {step}", own)[first])
        state = State(**_place(found, state_arrays(abstract), holders))
        now = fingerprints(state, layer_orders(config.model, config.parallel))
        if wrong := [key for key, number in page["fingerprints"].items() if now.get(key) != number]:
            self._corrupted[self.folder / str(step) / self._me] = reason = f"{wrong[0]} is not what was saved"
            return None, f"{name} is not taken: {reason}"
        note = f"{name} is taken though {without}: its parts come from processes that hold the same" if without else ""
        past = Past.from_metadata(step, page)
        return Restored(step, state, past.consumed_samples, folder=self.folder, past=past), note

    def _find_copies(self, step: int, abstract: State, config: Config) -> "_Found":
        """Where on this machine the parts are that this process needs of a step, or what is wrong."""
        tree, folder = state_arrays(abstract), self.folder / str(step)
        copies: list[_Copy] = []
        try:
            paths = list(folder.glob("process-*"))
            for path in sorted(paths, key=lambda path: (path.name != self._me, path.name)):
                page = self._unless_corrupted(path, lambda path=path: read_metadata(path))
                if page is not None:
                    check_same_model(page["config"], config, str(path))
                    check_same_names(page["fingerprints"], tree, str(path))
                    copies.append(_Copy(path, page.pop("pieces"), page))
            return self._choose(folder, copies, tree, config)
        except _Failed as e:
            return _Found(failure=e.failure)
        except (UserError, OSError) as e:
            return _Found(failure=failure_of(e, folder))

    def _choose(self, folder: Path, copies: "list[_Copy]", tree: Any, config: Config) -> "_Found":
        """A whole copy of each array's parts."""
        here = [
            copy for copy in copies if copy.metadata == copies[0].metadata
        ]  # others are of an abandoned course of the run
        orders = layer_orders(config.model, config.parallel)
        if here and saved_orders(here[0].metadata["config"]) != orders:
            return _Found(failure={"kind": LACKING, "reason": "has its layers in another order"})
        folders = {}
        for name, leaf in _named(tree):
            for copy in here:
                state = copy.path / "state"
                if copy.path in self._corrupted or not covers(copy.pieces[name], leaf):
                    continue
                read = partial(verify, state, name, copy.pieces[name], leaf)
                if self._unless_corrupted(copy.path, lambda read=read: read() or True):
                    folders[name] = state
                    break
            if name not in folders:
                return _Found(failure=self._missing(folder, copies))
        return _Found(here[0].metadata, folders)

    def _missing(self, folder: Path, copies: "list[_Copy]") -> dict[str, str]:
        damage = next((reason for path, reason in self._corrupted.items() if path.parent == folder), None)
        reason = f"has a damaged one ({damage})" if damage else "has parts of other devices" if copies else "lacks it"
        return {"kind": LACKING, "reason": reason}

    def _unless_corrupted(self, path: Path, read: Callable[[], T]) -> T | None:
        """What `read` returns; None when the copy at `path` is damaged, which it is only if it is so twice.

        Raises:
          _Failed: whatever else is wrong.
        """
        for attempt in (1, 2):
            try:
                return read()
            except Exception as e:
                failure = failure_of(e, path)
            if failure["kind"] != DAMAGED:
                raise _Failed(failure)
            if attempt == 2:
                self._corrupted[path] = failure["reason"]
        return None

    def quarantine(self) -> None:
        """Renames copies that are damaged: to be called once a state was restored, from whichever tier."""
        for path, reason in self._corrupted.items():
            log.warning("the local checkpoint %s is damaged and skipped (%s)", path, reason)
            new = quarantine_name(f"{path.parent.name}-{path.name}", [other.name for other in self.folder.iterdir()])
            with contextlib.suppress(FileNotFoundError):  # another process of this machine may have done it
                path.rename(self.folder / new)
        self._corrupted.clear()


class _Failed(Exception):
    """Something is wrong that is not damage."""

    def __init__(self, failure: dict[str, str]) -> None:
        super().__init__(failure["reason"])
        self.failure = failure


@dataclass(frozen=True)
class _Copy:
    """What one process saved of a step, on this machine."""

    path: Path
    pieces: dict[str, Any]
    metadata: dict[str, Any]
    """What all processes wrote alike."""


@dataclass(frozen=True)
class _Found:
    """What this machine has of a step."""

    metadata: dict[str, Any] | None = None
    folders: Mapping[str, Path] = field(default_factory=dict)
    """By name of an array, where all parts are that this process needs."""
    failure: dict[str, str] | None = None
    """Why it is not enough."""


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _place(found: _Found, tree: Any, holders: Collection[int]) -> Any:
    """The arrays of a state on their devices; processes that are not holders get theirs from those that are."""

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = dotted(path)
        if len(holders) == jax.process_count():
            return place_array(open_array(found.folders[name], name), leaf)

        def part(index: Any) -> np.ndarray:
            return np.asarray(open_array(found.folders[name], name)[index].read().result(), leaf.dtype)

        return restore_missing(leaf, part, holders)

    try:
        return jax.tree_util.tree_map_with_path(one, tree)
    except (OSError, ValueError) as e:  # it could be read a moment ago; the others are told by `Peers`
        raise UserError(f"a local checkpoint can't be read: {first_line(e)}; start again with --resume") from e


def _refuse(folder: Path, word: dict[str, Any]) -> None:
    """Raises what one process must not ignore, in all of them."""
    reason = word["failure"]["reason"]
    if word["failure"]["kind"] == REFUSED:
        raise UserError(reason)
    raise UserError(
        f"local checkpoint {folder} on {word['host']} can't be read: {reason}; nothing was changed: make it readable, "
        "or leave out --local-checkpoints to go on from those in --out"
    )
