"""Sharded, asynchronous checkpoints (Orbax) that can be restored on any mesh, with verification of their contents.

A checkpoint is one atomic folder: the state, and JSON metadata (`page/metadata`) with the config, the position in the
data and a fingerprint of every array. Fingerprints are computed on the devices and don't depend on the mesh, so a
restore verifies the arrays: a flipped bit or a missing chunk (which is read as zeros) is detected.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, auto_axes

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.model_identity import differences
from mtjax.errors import UserError, first_line
from mtjax.layout.dropout import DROPOUT_BITS
from mtjax.layout.stages import PLAIN, LayerOrder, Orders, layer_orders, order_of
from mtjax.runtime.checkpoints.arrays import array_handler, read_reordered
from mtjax.runtime.checkpoints.barriers import SaveBarriers
from mtjax.runtime.checkpoints.corruption import (
    VERSION,
    CorruptedCheckpoint,
    read_metadata,
    read_on_all_processes,
    with_checksum,
)
from mtjax.runtime.checkpoints.past import Past, RunRecord
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.runtime.train_state import State
from mtjax.sharding.axes import REPLICATED
from mtjax.sharding.host_memory import by_memory, on_device
from mtjax.sharding.param_specs import dotted
from mtjax.sharding.restore_missing import bits_of
from mtjax.storage import shown

TIMEOUT = 600
"""Seconds that a process waits for the others at a checkpoint before it reports which are missing."""

QUARANTINED = "damaged-"
"""Prefix of the name of a quarantined checkpoint."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """A checkpoint restored onto the devices."""

    step: int
    state: State
    consumed_samples: int
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that are corrupted, with the reasons."""
    folder: Path = Path()
    """The folder of the tier from which it was restored."""
    past: Past | None = None
    """The run that its metadata describe; None for a new run."""


OtherTier = Callable[[int], Restored | None]
"""Restores a checkpoint of at least this step from another tier; returns None if there is none."""


class Checkpoints:
    """The checkpoints of one run, in `folder`, which only this run writes to."""

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int | None = None) -> None:
        """Creates the folder if it does not exist.

        Raises:
          UserError: it can't be made or read.
        """
        self.folder = folder
        self._open_manager = lambda: ocp.CheckpointManager(
            folder.resolve(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep_last,
                keep_period=keep_every,
                async_options=ocp.AsyncOptions(
                    timeout_secs=TIMEOUT,
                    barrier_sync_fn=SaveBarriers(),
                    # Orbax: with asynchronous creation, a folder that can't be made blocks the writers for 5 minutes.
                    create_directories_asynchronously=False,
                ),
            ),
            item_handlers={"state": array_handler(), "page": _MetadataHandler()},
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._manager = self._open_manager()
        except OSError as e:
            raise UserError(f"{folder} can't be used for checkpoints: {first_line(e)}") from e
        self._is_lost = False
        self.record: RunRecord | None = None

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns."""
        step = int(state.step)
        metadata = checkpoint_metadata(step, config, consumed_samples, self.record)
        if self._is_lost:
            self._manager, self._is_lost = self._open_manager(), False
        # The metadata's writer thread waits for these, which the devices compute after the arrays are copied.
        pending: Future[Callable[[], dict[str, int]]] = Future()

        def complete() -> dict[str, Any]:
            return with_checksum(metadata | {"fingerprints": pending.result()()})

        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(state_arrays(state)), page=_MetadataSave(complete))
        try:
            self._manager.save(step, args=arguments, force=True)
        except BaseException as e:
            pending.set_exception(e)  # the thread that writes the metadata must not wait
            raise
        pending.set_result(fingerprints_later(state, layer_orders(config.model, config.parallel)))

    def restore(self, abstract: State, config: Config, other: OtherTier = lambda at_least: None) -> Restored | None:
        """Restores the newest valid checkpoint in the sharding of `abstract`; returns None if there never was one.

        `other` is tried before each step that is read. Newer checkpoints that are corrupted are reported in a
        warning and quarantined (renamed), so that the run can save their steps again.

        Raises:
          UserError: a checkpoint can't be read or is of another model, or all are corrupted. Nothing was renamed then.
        """
        steps, quarantined = self._list()
        corrupted: dict[int, str] = {}
        # 0 asks the other tier a last time, after the oldest checkpoint.
        for step in [*steps, 0]:
            found = other(step)
            if found is None and step == 0:
                break
            try:
                found = found or self._read(step, abstract, config)
            except CorruptedCheckpoint as e:
                corrupted[step] = str(e)
                continue
            # Renamed after one was restored: if none can be, all keep their names.
            for bad, reason in corrupted.items():
                log.warning("checkpoint %s is corrupted and skipped (%s)", self.folder / str(bad), reason)
                self._quarantine(bad)
            skipped = tuple(f"{self.folder / str(bad)}: {reason}" for bad, reason in corrupted.items())
            return dataclasses.replace(found, skipped=skipped)
        if corrupted or quarantined:
            listed = "; ".join(f"{step}: {reason}" for step, reason in corrupted.items()) or ", ".join(quarantined)
            raise UserError(
                f"all checkpoints in {self.folder} are corrupted ({listed}), and nothing was changed: "
                "restore a good copy, or start a new run in another --out"
            )
        return None

    def latest(self) -> int | None:
        """Returns the newest step saved."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Waits until everything is written; raises the error of a save that failed."""
        self._manager.wait_until_finished()

    def reopen(self) -> None:
        """Opens a new Orbax manager at the next save, after one that failed: a manager raises its error forever."""
        self._is_lost = True
        with contextlib.suppress(OSError):
            self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Removes what failed or killed saves have left; threads of a failed save may still write there."""
        if jax.process_index() == 0:
            for leftover in self.folder.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)

    def newest_on_disk(self) -> Path | None:
        """Returns the newest checkpoint, if its folder can be read."""
        with contextlib.suppress(OSError):
            steps = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
            return self.folder / str(max(steps)) if steps else None
        return None

    def close(self) -> None:
        """Waits until everything is written."""
        if not self._is_lost:
            self._manager.close()

    def _list(self) -> tuple[list[int], list[str]]:
        """Lists the saved steps, newest first, and the quarantined checkpoints, as seen by the first process."""

        def look() -> tuple[list[int], list[str]]:
            names = sorted(path.name for path in self.folder.iterdir())
            steps = sorted((int(name) for name in names if name.isdigit()), reverse=True)
            return steps, [name for name in names if name.startswith(QUARANTINED)]

        self._manager.wait_until_finished()
        seen = read_on_all_processes(str(self.folder), self.folder, look)
        return tuple(json.loads(all_gather_text("the list of checkpoints", json.dumps(seen))[0]))

    def _read(self, step: int, abstract: State, config: Config) -> Restored:
        """Reads a checkpoint's state and position in the data.

        It counts as corrupted only if two reads fail: an error of the network or of memory does not repeat.
        """
        try:
            return self._read_once(step, abstract, config)
        except CorruptedCheckpoint:
            pass  # frees the arrays that its traceback holds
        return self._read_once(step, abstract, config)

    def _read_once(self, step: int, abstract: State, config: Config) -> Restored:
        folder = self.folder / str(step)
        name = f"checkpoint {shown(folder)}"
        tree = state_arrays(abstract)
        metadata = read_on_all_processes(name, folder, lambda: read_metadata(folder))
        past = Past.from_metadata(step, metadata)
        check_same_model(metadata["config"], config, name)
        check_same_names(metadata["fingerprints"], tree, name)
        orders, saved = layer_orders(config.model, config.parallel), saved_orders(metadata["config"])
        state = read_on_all_processes(name, folder, lambda: self._read_state(step, tree, saved, orders))
        # Computed from the arrays on the devices, to detect errors of the disk, the network and the copy to a device.
        now = fingerprints(state, orders)
        wrong = [name for name, number in metadata["fingerprints"].items() if now.get(name) != number]
        if wrong:
            raise CorruptedCheckpoint(
                f"{wrong[0]} is not what was saved" + (f", nor are {len(wrong) - 1} more" if wrong[1:] else "")
            )
        return Restored(step, state, past.consumed_samples, folder=self.folder, past=past)

    def _read_state(self, step: int, tree: Any, saved: Orders, orders: Orders) -> State:
        state = self.folder / str(step) / "state"
        if not (state / "_METADATA").is_file():
            raise CorruptedCheckpoint("its state lacks _METADATA")
        # `mtjax convert` writes arrays in folders of their own, without Orbax's list of them.
        if saved != orders or not (state / "manifest.ocdbt").is_file():
            return State(**read_reordered(state, tree, saved, orders))
        restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
        arguments = ocp.args.Composite(state=ocp.args.PyTreeRestore(tree, restore_args=restore_args))
        items: Any = self._manager.restore(step, args=arguments)
        return State(**items["state"])

    def _quarantine(self, step: int) -> None:
        self._manager.wait_until_finished()

        def rename() -> None:
            if jax.process_index() == 0:
                taken = [path.name for path in self.folder.iterdir()]
                (self.folder / str(step)).rename(self.folder / quarantine_name(str(step), taken))

        read_on_all_processes(f"{self.folder / str(step)}, which is corrupted,", self.folder, rename)
        self._manager.reload()


def checkpoint_metadata(step: int, config: Config, consumed_samples: int, record: RunRecord | None) -> dict[str, Any]:
    """Builds a checkpoint's metadata, without fingerprints and checksum."""
    base = {"version": VERSION, "step": step, "consumed_samples": consumed_samples, "config": configs.to_dict(config)}
    base |= {"dropout_bits": DROPOUT_BITS}
    return base | {"run": record.to_dict()} if record is not None else base


def quarantine_name(name: str, taken: Iterable[str]) -> str:
    """Returns the new name of a corrupted checkpoint, distinct from those in `taken`."""
    new = f"{QUARANTINED}{name}"
    number = sum(other.startswith(new) for other in taken)
    return f"{new}-{number}" if number else new


class _MetadataHandler(ocp.JsonCheckpointHandler):
    """Writes the result of a function, which is called in the background thread."""

    async def _save_fn(self, x: Callable[[], dict[str, Any]], directory: Any) -> None:
        await super()._save_fn(x(), directory)


@ocp.args.register_with_handler(_MetadataHandler, for_save=True, for_restore=True)
@dataclass
class _MetadataSave(ocp.args.CheckpointArgs):
    item: Callable[[], dict[str, Any]]


def check_same_model(saved: Mapping[str, Any], config: Config, source: str) -> None:
    """Checks that a checkpoint's config describes this model.

    Raises:
      UserError: names each setting of the model that differs, with both values.
    """
    theirs = configs.from_dict({"model": saved["model"]}, source=source).model
    if differing := differences(theirs, config.model):
        raise UserError(
            f"{source} is of another model: {'; '.join(differing)}. Resume with the model of its config.toml, or start "
            "a new run in another --out"
        )


def check_same_names(saved: Collection[str], tree: Any, source: str) -> None:
    """Checks that a checkpoint has exactly the arrays of a state, by dotted name.

    Raises:
      UserError: names the first array that only one of them has.
    """
    wanted = set(names_of(tree))
    for names, there, here in ((wanted - set(saved), "lacks", "has"), (set(saved) - wanted, "has", "lacks")):
        if names:
            raise UserError(
                f"{source} {there} {min(names)}, which this run {here}: resume with the settings it was saved with"
            )


def names_of(tree: Any) -> list[str]:
    """Returns the dotted names of a tree's leaves, in order."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return [dotted(path) for path, _ in paths]


def state_arrays(state: State) -> dict[str, Any]:
    """Returns the fields of a state that exist: only float16 has a loss scale."""
    return {name: part for name, part in vars(state).items() if part is not None}


def saved_orders(saved: Mapping[str, Any]) -> Orders:
    """Returns the order of stacked layers in a checkpoint; older configs have neither chunks nor unequal stages."""
    known = [field.name for field in dataclasses.fields(configs.Parallel)]
    parallel = {name: value for name, value in saved.get("parallel", {}).items() if name in known}
    of = configs.from_dict({"model": saved["model"], "parallel": parallel})
    return layer_orders(of.model, of.parallel)


def fingerprints(state: State, orders: Orders = PLAIN) -> dict[str, int]:
    """Computes a number for every array that changes with any bit and any exchange of elements, on any mesh."""
    return fingerprints_of(state_arrays(state), state.step.sharding.mesh, orders)


def fingerprints_of(tree: Any, mesh: Mesh, orders: Orders = PLAIN) -> dict[str, int]:
    """Computes `fingerprints` of any tree of arrays, by dotted name; layers count in the model's order."""
    return _later(tree, mesh, orders)()


def fingerprints_later(state: State, orders: Orders = PLAIN) -> Callable[[], dict[str, int]]:
    """Starts to compute `fingerprints`: the arrays may be donated, and another thread may fetch the numbers."""
    return _later(state_arrays(state), state.step.sharding.mesh, orders)


def _later(tree: Any, mesh: Mesh, orders: Orders) -> Callable[[], dict[str, int]]:
    with jax.set_mesh(mesh):
        numbers = by_memory(_fingerprint, tree, tuple(order_of(name, orders) for name in names_of(tree)))
    return lambda: dict(zip(names_of(numbers), map(int, jax.device_get(jax.tree.leaves(numbers))), strict=True))


def lower_fingerprints(state: State, mesh: Mesh, orders: Orders = PLAIN) -> jax.stages.Lowered:
    """Lowers the program of `fingerprints` from abstract values."""
    tree = state_arrays(state)
    with jax.set_mesh(mesh):
        return _fingerprint.lower(tree, tuple(order_of(name, orders) for name in names_of(tree)))


@partial(jax.jit, static_argnums=1)
def _fingerprint(tree: Any, orders: tuple[LayerOrder | None, ...]) -> Any:
    def hash_all(tree: Any) -> Any:
        leaves, structure = jax.tree.flatten(tree)
        return jax.tree.unflatten(structure, map(hash_of, leaves, orders))

    return auto_axes(hash_all, out_sharding=REPLICATED)(on_device(tree))


def hash_of(a: jax.Array, order: LayerOrder | None = None) -> jax.Array:
    """Sums the bits of each element, 32 or 16, times an odd factor of its index, modulo 2^32; layers, which are stacked
    in this order, count in the model's."""
    # sum_i bits_i (2 h(i) + 1) mod 2^32, with h(i) = 2654435761 i (Knuth's multiplicative hash): an odd factor, so that
    # any flipped bit changes the sum. It does not depend on the order of additions, so it is the same on every mesh.
    bits = jax.lax.bitcast_convert_type(a, bits_of(a.dtype)).astype(jnp.uint32)
    index = jnp.zeros(a.shape, jnp.uint32)
    for dimension, size in enumerate(a.shape):
        position = jax.lax.broadcasted_iota(jnp.uint32, a.shape, dimension)
        if order is not None and dimension == 0:
            position = jnp.asarray(np.maximum(order.flat, 0), jnp.uint32)[position]
        index = index * jnp.uint32(size) + position
    return (bits * (index * jnp.uint32(2654435761) * jnp.uint32(2) + jnp.uint32(1))).sum(dtype=jnp.uint32)


def fingerprint_of_slice(part: np.ndarray, offset: int) -> int:
    """Computes what a slice from element `offset` on adds to its array's fingerprint, the sum modulo 2^32: an array can
    be written and verified slice by slice."""
    total, bits, block = 0, np.ascontiguousarray(part).reshape(-1).view(bits_of(part.dtype)), 1 << 22
    for start in range(0, bits.size, block):
        piece = bits[start : start + block]
        # Modulo 2^32, as on the devices: arrays may have more elements.
        index = np.arange(offset + start, offset + start + piece.size, dtype=np.uint64).astype(np.uint32)
        odd = index * np.uint32(2654435761) * np.uint32(2) + np.uint32(1)
        total += int((piece * odd).sum(dtype=np.uint64))
    return total % 2**32
