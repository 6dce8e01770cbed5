"""Sharded, asynchronous checkpoints (Orbax) that any mesh restores, and that prove what they hold.

A checkpoint is one atomic folder: the state, and next to it a JSON page with the config, the position in the data and a
fingerprint of every array. Fingerprints are computed where the arrays live and don't depend on the mesh, so a restore
compares what it has with what was saved: a flipped bit or a missing chunk (which reads as zeros) does not pass.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, auto_axes

from mtjax import config as configs
from mtjax.config import Config
from mtjax.config.shape import differences
from mtjax.errors import UserError
from mtjax.sharding.axes import WHOLE
from mtjax.train.checkpoint_arrays import array_handler
from mtjax.train.step import State

TIMEOUT = 600
"""Seconds that a process waits for the others at a checkpoint before it says who is missing."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """A checkpoint, back on the devices."""

    step: int
    state: State
    consumed_samples: int
    passed_over: tuple[str, ...] = ()
    """Newer checkpoints that were damaged, with what was wrong."""


class Damaged(Exception):
    """A checkpoint does not hold what was saved."""


class Checkpoints:
    """The checkpoints of one run, in `folder`."""

    def __init__(self, folder: Path, *, keep_last: int, keep_every: int | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep_last,
            keep_period=keep_every,
            async_options=ocp.AsyncOptions(timeout_secs=TIMEOUT),
        )
        handlers = {"state": array_handler(), "page": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options, item_handlers=handlers)

    def save(self, state: State, config: Config, consumed_samples: int) -> None:
        """Starts saving; the arrays may be donated as soon as it returns."""
        step = int(state.step)
        page = {
            "version": 1,
            "step": step,
            "consumed_samples": consumed_samples,
            "config": configs.to_dict(config),
            "fingerprints": fingerprints(state),
        }
        page["checksum"] = page_checksum(page)
        arguments = ocp.args.Composite(state=ocp.args.PyTreeSave(present(state)), page=ocp.args.JsonSave(page))
        self._manager.save(step, args=arguments, force=True)

    def restore(self, abstract: State, config: Config) -> Restored | None:
        """The newest checkpoint that holds what was saved, placed as `abstract` says; None when there is none.

        A damaged one is named in a warning and renamed, so that the run can write its step again.

        Raises:
          UserError: the checkpoint is of another model.
        """
        passed_over = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                restored = self._restore_step(step, abstract, config)
            except Damaged as e:
                passed_over.append(f"{self.folder / str(step)}: {e}")
                log.warning("checkpoint %s is damaged and skipped (%s)", self.folder / str(step), e)
                self._set_aside(step)
                continue
            return Restored(step, *restored, tuple(passed_over))
        return None

    def latest(self) -> int | None:
        """The newest step saved."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()

    def _restore_step(self, step: int, abstract: State, config: Config) -> tuple[State, int]:
        page = together(lambda: self._page(step))
        check_same_model(page["config"], config, f"checkpoint {self.folder / str(step)}")

        def read() -> State:
            tree = present(abstract)
            placed = ocp.checkpoint_utils.construct_restore_args(tree)
            arguments = ocp.args.Composite(state=ocp.args.PyTreeRestore(tree, restore_args=placed))
            return State(**self._items(step, arguments)["state"])

        state = together(read)
        now = fingerprints(state)
        wrong = [name for name, print_ in page["fingerprints"].items() if now.get(name) != print_]
        if wrong:
            raise Damaged(
                f"{wrong[0]} is not what was saved" + (f", nor are {len(wrong) - 1} more" if wrong[1:] else "")
            )
        return state, page["consumed_samples"]

    def _page(self, step: int) -> Mapping[str, Any]:
        page = dict(self._items(step, ocp.args.Composite(page=ocp.args.JsonRestore()))["page"])
        if page.pop("checksum", None) != page_checksum(page):
            raise Damaged("its page of metadata is not what was saved")
        return page

    def _items(self, step: int, arguments: ocp.args.Composite) -> Mapping[str, Any]:
        items: Any = self._manager.restore(step, args=arguments)
        return items

    def _set_aside(self, step: int) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            source = self.folder / str(step)
            number = sum(1 for _ in self.folder.glob(f"damaged-{step}*"))
            source.rename(self.folder / (f"damaged-{step}" + (f"-{number}" if number else "")))
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"set aside checkpoint {step}")
        self._manager.reload()


def together(read: Any) -> Any:
    """What `read` returns, if it succeeded in every process.

    Raises:
      Damaged: in all processes, when it failed in any: each must go on to the same checkpoint.
    """
    result, failure = None, None
    try:
        result = read()
    except Exception as e:  # tensorstore, zlib, JSON, missing files: whatever a broken file may cause
        failure = e
    good = failure is None
    if jax.process_count() > 1:
        good = bool(np.all(multihost_utils.process_allgather(np.array(good))))
    if not good:
        reason = str(failure).strip().splitlines()[0][:200] if failure and str(failure).strip() else repr(failure)
        raise Damaged(reason if failure else "another process could not read it") from failure
    return result


def check_same_model(saved: Mapping[str, Any], config: Config, source: str) -> None:
    """Checks that a checkpoint's config describes this model.

    Raises:
      UserError: names each setting of the model that differs, with both values.
    """
    theirs = configs.from_dict({"model": saved["model"]}, source=source).model
    if differing := differences(theirs, config.model):
        raise UserError(f"{source} is of another model: {'; '.join(differing)}")


def present(state: State) -> dict[str, Any]:
    """The parts that a state has: only float16 has a loss scale."""
    return {name: part for name, part in vars(state).items() if part is not None}


def fingerprints(state: State) -> dict[str, int]:
    """A number for every array that changes with any bit and with any exchange of elements, whatever the mesh."""
    return fingerprints_of(present(state), state.step.sharding.mesh)


def fingerprints_of(tree: Any, mesh: Mesh) -> dict[str, int]:
    """`fingerprints` of any tree of arrays on a mesh, by dotted names."""
    with jax.set_mesh(mesh):
        numbers = _fingerprint(tree)
    flat = jax.tree_util.tree_leaves_with_path(numbers)
    return {jax.tree_util.keystr(path, simple=True, separator="."): int(n) for path, n in flat}


@jax.jit
def _fingerprint(tree: Any) -> Any:
    return auto_axes(lambda t: jax.tree.map(_hash, t), out_sharding=WHOLE)(tree)


def _hash(a: jax.Array) -> jax.Array:
    """Sum of the bits of each element times an odd number of its own, modulo 2^32."""
    bits = jax.lax.bitcast_convert_type(a, jnp.uint32)
    index = jnp.zeros(a.shape, jnp.uint32)
    for dimension, size in enumerate(a.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, a.shape, dimension)
    return (bits * (index * jnp.uint32(2654435761) * jnp.uint32(2) + jnp.uint32(1))).sum(dtype=jnp.uint32)


def fingerprint_of_part(part: np.ndarray, offset: int) -> int:
    """What a contiguous part of a float32 array, beginning at element `offset`, adds to the array's fingerprint.

    Sums of the parts' numbers, modulo 2^32, are the whole's: an array can be written, and proven, piece by piece.
    """
    total, bits, block = 0, np.ascontiguousarray(part).reshape(-1).view(np.uint32), 1 << 22
    for start in range(0, bits.size, block):
        piece = bits[start : start + block]
        index = np.arange(offset + start, offset + start + piece.size, dtype=np.uint64).astype(np.uint32)
        odd = index * np.uint32(2654435761) * np.uint32(2) + np.uint32(1)
        total += int((piece * odd).sum(dtype=np.uint64))
    return total % 2**32


def page_checksum(page: Mapping[str, Any]) -> str:
    """Of a page without its `checksum`."""
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()
