"""Copies of one process's shards of a state, on its machine's local disk.

A copy is a folder like a checkpoint: `state/`, with a zarr array under each dotted name of which only this process's
chunks exist, each with a checksum, and `page/metadata`, which also lists these chunks.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from mtjax.runtime.checkpoints.arrays import open_array
from mtjax.runtime.checkpoints.corruption import CorruptedCheckpoint, with_checksum
from mtjax.sharding.param_specs import dotted
from mtjax.storage import key_value_store

Tree = Any


@dataclass(frozen=True)
class ArrayShards:
    """Shards of one array."""

    shape: tuple[int, ...]
    """Global shape."""
    size: tuple[int, ...]
    """Shape of a shard."""
    dtype: np.dtype
    parts: Mapping[tuple[int, ...], np.ndarray]
    """Start index -> shard."""


def copy_pieces(tree: Tree, *, first_copies: bool = False) -> dict[str, ArrayShards]:
    """Copies the distinct shards on this process's devices to host memory; the arrays may be donated afterwards.

    With `first_copies`, copies only shards with replica id 0: all processes together then have each shard once.
    """
    named = [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
    for _, leaf in named:  # start all copies before waiting for the first
        for _, shard in _distinct(leaf, first_copies):
            shard.copy_to_host_async()
    # A copy: on CPUs the array would be a view of memory that the next step overwrites.
    parts = {name: {s: np.array(shard) for s, shard in _distinct(leaf, first_copies)} for name, leaf in named}
    return {
        name: ArrayShards(leaf.shape, leaf.sharding.shard_shape(leaf.shape), leaf.dtype, parts[name])
        for name, leaf in named
    }


def _distinct(leaf: jax.Array, first_copies: bool) -> Iterator[tuple[tuple[int, ...], jax.Array]]:
    """Yields start index and data of each distinct shard on this process's devices."""
    seen = set()
    for shard in leaf.addressable_shards:
        start = tuple(index.start or 0 for index in shard.index)
        # Several devices of a process may hold one shard.
        if start not in seen and (shard.replica_id == 0 or not first_copies):
            seen.add(start)
            yield start, shard.data


def write_pieces(pieces: Mapping[str, ArrayShards], metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes a copy; `folder` appears atomically when it is complete, and replaces an earlier one.

    Raises:
      OSError, ValueError: from the disk.
    """
    # Beside the folders of steps, not in one: a step's folder without copies would look like a checkpoint.
    temporary = folder.parent.parent / f"writing-{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / "page").mkdir(parents=True)
    write_arrays(pieces, temporary / "state")
    (temporary / "state" / "_METADATA").write_text(json.dumps({"use_zarr3": True}))  # read by `open_array`
    listed = {name: {"size": array.size, "starts": sorted(array.parts)} for name, array in pieces.items()}
    complete = json.loads(json.dumps({**metadata, "pieces": listed}))  # normalized as JSON reads it, for the checksum
    with (temporary / "page" / "metadata").open("w") as file:
        file.write(json.dumps(with_checksum(complete)))
        file.flush()
        os.fsync(file.fileno())
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def write_arrays(pieces: Mapping[str, ArrayShards], state: Path) -> None:
    """Writes shards of arrays to a folder, or to an address in an object store, where other processes may write theirs.

    Raises:
      OSError, ValueError: from the disk, or from the store.
    """
    writes = []
    for name, array in pieces.items():
        store = ts.open(_spec(state / name, array)).result()
        for start, part in array.parts.items():
            index = tuple(slice(s, s + n) for s, n in zip(start, part.shape, strict=True))
            # Without another copy: the parts belong to this save alone.
            writes.append(store[index].write(part, can_reference_source_data_indefinitely=True))
    for write in writes:
        write.result()


def _spec(path: Path, array: ArrayShards) -> dict[str, Any]:
    """Returns TensorStore's spec of an array whose chunks are shards, without compression: float weights do not
    compress."""
    return {
        "driver": "zarr3",
        "kvstore": key_value_store(path),
        "metadata": {
            "shape": array.shape,
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.size}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
        "create": True,
        "open": True,
        # Otherwise a chunk of zeros would have no file, and look like one that is missing.
        "store_data_equal_to_fill_value": True,
    }


def covers(listed: Mapping[str, Any], leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether the shards that metadata list of an array include all that this process's devices need."""
    return all(
        sum(_overlap(start, listed["size"], box) for start in listed["starts"]) == math.prod(n for _, n in box)
        for box in _boxes(leaf)
    )


def _boxes(leaf: Any) -> set[tuple[tuple[int, int], ...]]:
    """Returns (start, length) in every dimension of the shards that this process's devices need."""
    sharding: Any = leaf.sharding
    size = sharding.shard_shape(leaf.shape)
    indices = sharding.addressable_devices_indices_map(leaf.shape).values()
    return {tuple((index.start or 0, n) for index, n in zip(starts, size, strict=True)) for starts in indices}


def _overlap(start: tuple[int, ...], size: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> int:
    """Returns the number of elements that a shard and a box share."""
    each = zip(start, size, box, strict=True)
    return math.prod(max(0, min(s + n, begin + length) - max(s, begin)) for s, n, (begin, length) in each)


def verify(state: Path, name: str, listed: Mapping[str, Any], leaf: jax.ShapeDtypeStruct) -> None:
    """Reads the shards of an array that this process's devices need, which verifies their checksums.

    Raises:
      CorruptedCheckpoint: a shard that the metadata list is missing; TensorStore would read it as zeros.
      ValueError, OSError: it can't be read, or is not what was written.
    """
    for start in listed["starts"]:
        chunk = "/".join(["c", *(str(s // n) for s, n in zip(start, listed["size"], strict=True))])
        if not (state / name / chunk).exists():
            raise CorruptedCheckpoint(f"{chunk} of {name} is missing")
    store = open_array(state, name)
    for box in _boxes(leaf):
        store[tuple(slice(begin, begin + length) for begin, length in box)].read().result()
