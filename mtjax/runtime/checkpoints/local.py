"""The tier of frequent checkpoints: each process writes what its devices hold to its machine's own disk.

A restart takes the newest step of which the processes have all parts between them: who lost its disk gets its parts
over the network from processes that hold the same ones. No process reads the disk of another machine.
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
from mtjax.layout.stages import layer_orders
from mtjax.runtime.checkpoints.arrays import open_array, place_array
from mtjax.runtime.checkpoints.checkpoint import (
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
from mtjax.runtime.checkpoints.corruption import (
    CORRUPTED,
    REFUSED,
    failure_of,
    metadata_checksum,
    read_metadata,
    read_on_all_processes,
)
from mtjax.runtime.checkpoints.past import Past, RunRecord
from mtjax.runtime.checkpoints.pieces import copy_pieces, covers, verify, write_pieces
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.runtime.train_state import State
from mtjax.sharding.param_specs import dotted
from mtjax.sharding.restore_missing import have_all, restore_missing

IDENTITY = "run_id"
"""File in a run's folder. Its first line names the run's folder on local disks, so that another run in the same --out
uses another one. Its second line is the run's folder, which distinguishes a copy from the original."""
LACKING = "lacking"

T = TypeVar("T")

log = logging.getLogger(__name__)


def open_local(output: Output, folder: Path) -> "LocalCheckpoints | None":
    """Opens the local tier of the run in `folder`; returns None without --local-checkpoints. All processes call it.

    Raises:
      UserError: in all processes, if one can't write to its disk.
    """
    if output.local_checkpoints is None:
        return None
    # Read by the first process alone: others may see the run's folder before the file is in it.
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
    """Returns the id of the run in `folder` for its local folder; creates it for a new or copied run."""
    path = folder / IDENTITY
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        identity, recorded_folder = [*lines, *[None] * 2][:2]
        if identity is None or was_copied(
            folder, recorded_folder
        ):  # a copied run must not write into the original's local folder
            identity = uuid.uuid4().hex[:12]
        path.write_text(f"{identity}\n{folder.resolve()}\n")
        return identity
    except OSError as e:
        raise UserError(f"{path} can't be used: {first_line(e)}") from e


class LocalCheckpoints:
    """The local checkpoint tier of one run, as seen by one process.

    Args:
      folder: of this run, on this machine.
      every: steps between checkpoints.
      keep: number of newest checkpoints to keep.
    """

    def __init__(self, folder: Path, *, every: int, keep: int) -> None:
        self.folder, self._every, self._keep = folder, every, keep
        self._me = f"process-{jax.process_index()}"
        self._writer: threading.Thread | None = None
        self._corrupted: dict[Path, str] = {}
        self._tried: set[int] = set()
        self.record: RunRecord | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether a checkpoint is due after this step."""
        return step % self._every == 0

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns. A failure is only logged."""
        # One save at a time: host memory holds one copy of the shards.
        self.close()
        step = int(state.step)
        # Copied before the next step, to which these arrays are donated.
        pieces = copy_pieces(state_arrays(state))
        pending = fingerprints_later(state, layer_orders(config.model, config.parallel))
        metadata = checkpoint_metadata(step, config, consumed_samples, self.record)

        def write() -> None:
            try:
                write_pieces(pieces, metadata | {"fingerprints": pending()}, self.folder / str(step) / self._me)
                self._remove_old(step)
            except Exception as e:  # any error of the disk: the shared tier is still there
                reason = first_line(e)
                log.warning("the local checkpoint of step %d was not saved (%s); the run goes on", step, reason)

        self._writer = threading.Thread(target=write, name="local checkpoint")
        self._writer.start()

    def close(self) -> None:
        """Waits until the last save is written."""
        if self._writer is not None:
            self._writer.join()

    def _remove_old(self, newest: int) -> None:
        """Removes all but the newest checkpoints up to `newest`, and later ones that are left from before a resume."""
        # Any process may do this for its machine: when it has saved a step, all processes have finished the one before.
        # Steps above `newest` belong to a course of the run that a resume has left.
        steps = sorted(step for step in self._steps() if step <= newest)
        keep = set(steps[-self._keep :])
        for step in set(self._steps()) - keep:
            shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]

    # --- Restoring

    def newest(self, at_least: int, abstract: State, config: Config, say: Callable[[str], object]) -> Restored | None:
        """Restores the newest step not yet tried of which the processes together have all shards; returns None if there
        is none.

        All processes call it.

        Args:
          at_least: the minimum step.
          abstract: shapes and shardings of the state.
          config: of this run.
          say: called with the reason why a newer step is not used, and which processes receive shards from others.

        Raises:
          UserError: in all processes, if one can't read its copy, or has one of another model.
        """
        seen = read_on_all_processes("the list of local checkpoints", self.folder, self._steps)
        steps_of_processes = [json.loads(text) for text in all_gather_text("the local checkpoints", json.dumps(seen))]
        # All processes try the same steps in the same order, as each of them is a collective decision.
        for step in sorted({step for steps in steps_of_processes for step in steps} - self._tried, reverse=True):
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
        """Returns the state of a step, or the reason why it can't be restored; the note also reports which processes
        receive their shards from others."""
        found = self._find_copies(step, abstract, config)
        # A step may have been saved twice, before and after a resume: copies of both may be on different machines.
        identity = metadata_checksum(found.metadata) if found.metadata else ""
        report = {"host": socket.gethostname(), "failure": found.failure, "identity": identity}
        reports = [
            json.loads(report) for report in all_gather_text(f"the local checkpoint of step {step}", json.dumps(report))
        ]
        for report in reports:
            if report["failure"] and report["failure"]["kind"] != LACKING:
                _refuse(self.folder / str(step), report)
        holders = {process for process, report in enumerate(reports) if not report["failure"]}
        without = ", ".join(
            f"process {process} ({report['host']}) {report['failure']['reason']}"
            for process, report in enumerate(reports)
            if report["failure"]
        )
        name = f"step {step} in {self.folder}"
        if len({reports[process]["identity"] for process in holders}) > 1:
            return None, f"{name} is not used: the processes have different states of it"
        # Replicas on other machines may have what this one has lost.
        if not have_all(jax.tree.leaves(state_arrays(abstract)), holders):
            return None, f"{name} is not used: {without}"
        # A process without its copy has no metadata either: take those of the first holder.
        first = min(holders)
        text = json.dumps(found.metadata) if jax.process_index() == first else ""
        metadata = json.loads(all_gather_text(f"the metadata of step {step}", text)[first])
        state = State(**_place(found, state_arrays(abstract), holders))
        now = fingerprints(state, layer_orders(config.model, config.parallel))
        if wrong := [key for key, number in metadata["fingerprints"].items() if now.get(key) != number]:
            self._corrupted[self.folder / str(step) / self._me] = reason = f"{wrong[0]} is not what was saved"
            return None, f"{name} is not used: {reason}"
        note = (
            f"{name} is used although {without}: its shards are copied from processes that have replicas"
            if without
            else ""
        )
        past = Past.from_metadata(step, metadata)
        return Restored(step, state, past.consumed_samples, folder=self.folder, past=past), note

    def _find_copies(self, step: int, abstract: State, config: Config) -> "_Found":
        """Finds the shards of a step on this machine that this process needs, or the reason why they are missing."""
        tree, folder = state_arrays(abstract), self.folder / str(step)
        copies: list[_Copy] = []
        try:
            # Its own copy first; others on this machine may be of processes that have moved.
            paths = list(folder.glob("process-*"))
            for path in sorted(paths, key=lambda path: (path.name != self._me, path.name)):
                metadata = self._unless_corrupted(path, lambda path=path: read_metadata(path))
                if metadata is not None:
                    check_same_model(metadata["config"], config, str(path))
                    check_same_names(metadata["fingerprints"], tree, str(path))
                    copies.append(_Copy(path, metadata.pop("pieces"), metadata))
            return self._choose(folder, copies, tree, config)
        except _Failed as e:
            return _Found(failure=e.failure)
        except (UserError, OSError) as e:
            return _Found(failure=failure_of(e, folder))

    def _choose(self, folder: Path, copies: "list[_Copy]", tree: Any, config: Config) -> "_Found":
        """Chooses a complete copy of each array's shards."""
        here = [
            copy for copy in copies if copy.metadata == copies[0].metadata
        ]  # copies with other metadata were saved before an earlier resume
        orders = layer_orders(config.model, config.parallel)
        if here and saved_orders(here[0].metadata["config"]) != orders:
            return _Found(failure={"kind": LACKING, "reason": "has its layers in another order"})
        folders = {}
        for name, leaf in _named(tree):
            for copy in here:
                state = copy.path / "state"
                # Another process's copy may have this one's shards, where the mesh or the placement of processes
                # differs.
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
        """Returns the failure of a step of which this machine lacks shards."""
        corruption = next((reason for path, reason in self._corrupted.items() if path.parent == folder), None)
        reason = (
            f"has a corrupted one ({corruption})"
            if corruption
            else "has shards of other devices"
            if copies
            else "lacks it"
        )
        return {"kind": LACKING, "reason": reason}

    def _unless_corrupted(self, path: Path, read: Callable[[], T]) -> T | None:
        """Returns the result of `read`, or None if the copy at `path` is corrupted, which two reads must confirm.

        Raises:
          _Failed: for any other failure.
        """
        for attempt in (1, 2):
            try:
                return read()
            except Exception as e:
                failure = failure_of(e, path)
            if failure["kind"] != CORRUPTED:
                raise _Failed(failure)
            if attempt == 2:
                self._corrupted[path] = failure["reason"]
        return None

    def quarantine(self) -> None:
        """Renames corrupted copies; called after a state was restored, from whichever tier."""
        for path, reason in self._corrupted.items():
            log.warning("the local checkpoint %s is corrupted and skipped (%s)", path, reason)
            new = quarantine_name(f"{path.parent.name}-{path.name}", [other.name for other in self.folder.iterdir()])
            with contextlib.suppress(FileNotFoundError):  # another process on this machine may have renamed it
                path.rename(self.folder / new)
        self._corrupted.clear()


class _Failed(Exception):
    """A failure other than corruption."""

    def __init__(self, failure: dict[str, str]) -> None:
        super().__init__(failure["reason"])
        self.failure = failure


@dataclass(frozen=True)
class _Copy:
    """The copy of a step that one process saved on this machine."""

    path: Path
    pieces: dict[str, Any]
    metadata: dict[str, Any]
    """The metadata that all processes wrote identically."""


@dataclass(frozen=True)
class _Found:
    """The copies of a step on this machine."""

    metadata: dict[str, Any] | None = None
    folders: Mapping[str, Path] = field(default_factory=dict)
    """By array name, the folder with all shards that this process needs."""
    failure: dict[str, str] | None = None
    """Why the copies are incomplete."""


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def _place(found: _Found, tree: Any, holders: Collection[int]) -> Any:
    """Builds the arrays of a state on their devices; processes that are not holders receive their shards from those
    that are."""

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = dotted(path)
        if len(holders) == jax.process_count():
            return place_array(open_array(found.folders[name], name), leaf)

        def read_shard(index: Any) -> np.ndarray:
            return np.asarray(open_array(found.folders[name], name)[index].read().result(), leaf.dtype)

        return restore_missing(leaf, read_shard, holders)

    try:
        return jax.tree_util.tree_map_with_path(one, tree)
    except (OSError, ValueError) as e:  # it could be read a moment ago; `Peers` reports it to the other processes
        raise UserError(f"a local checkpoint can't be read: {first_line(e)}; start again with --resume") from e


def _refuse(folder: Path, report: dict[str, Any]) -> None:
    """Raises, in all processes, a failure that must not be ignored."""
    reason = report["failure"]["reason"]
    if report["failure"]["kind"] == REFUSED:
        raise UserError(reason)
    raise UserError(
        f"local checkpoint {folder} on {report['host']} can't be read: {reason}; nothing was changed: make it "
        "readable, or remove --local-checkpoints to resume from --out"
    )
