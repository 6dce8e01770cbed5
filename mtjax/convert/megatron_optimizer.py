"""The optimizer's state in a checkpoint of Megatron-LM: Adam's moments, float32 weights, steps and schedules."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.convert.megatron_buffers import (
    COPY,
    DEFAULT_BUCKET,
    DEFAULT_BUCKET_OF_RANK,
    EXPERT,
    SAVE_AGAIN,
    BufferStates,
    Degrees,
    Rank,
    bucket_sizes,
)
from mtjax.convert.megatron_experts import BIAS
from mtjax.convert.megatron_files import MegatronCheckpoint, load, loaded
from mtjax.convert.megatron_progress import Progress, optimizers_in, progress_of
from mtjax.convert.named import Shards, local_shapes
from mtjax.convert.table import Selection
from mtjax.convert.torch_dist import TorchDistCheckpoint
from mtjax.convert.torch_dist_files import StoredTensor
from mtjax.errors import UserError

WEIGHTS, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""The float32 weights, and the moving averages of gradients and of their squares."""
_IN_TENSORS, _IN_BUCKETS = "tensors of the model's shapes", "dp_reshardable"
LEGACY_FILE = "distrib_optim.pt"
_SHIFTED = (
    "the files are of different saves, or megatron-core has shifted them, as it does in fully_reshardable where a "
    "buffer has several buckets: save it again without --overlap-grad-reduce"
)
_OF_PARAMETER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.+)")
_OF_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)"
    r"\.(param|exp_avg|exp_avg_sq)"
)
_OBJECT = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(optimizer|grad_scaler|param_state)(?:/.*)?"
)


class FullStates:
    """Adam's state in tensors that are shaped like the model's, or cut into equal parts that are flattened."""

    dtype, ranks = "float32", 1

    def __init__(self, files: TorchDistCheckpoint, kind: str) -> None:
        """Finds the tensors.

        Raises:
          UserError: some are missing, or of another shape.
        """
        self._files, self.kind = files, kind
        self.shapes = files.shapes
        # The two names of float32 weights, by format.
        names = (WEIGHTS, "fp32_param") if kind == WEIGHTS else (kind,)
        stored = {
            match[2]: key for key in files.files.keys if (match := _OF_PARAMETER.fullmatch(key)) and match[1] in names
        }
        wanted = {key for key, _ in files.index.values() if not key.endswith(BIAS)}
        if missing := sorted(wanted - set(stored)):
            raise UserError(f"{files.folder} lacks {kind} of {', '.join(missing[:5])} in the optimizer's state")
        if absent := files.files.missing_files(stored.values()):
            raise UserError(f"{files.folder} lacks {len(absent)} of its files: {', '.join(absent[:5])}")
        self._tensors = {key: files.files.tensor(stored[key]) for key in wanted}
        # Shapes are checked before anything is written.
        for key, tensor in self._tensors.items():
            self._parts(key, tensor)

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns the state of one layer's or expert's tensor; `rank` is 0."""
        key, index = self._files.index[name]
        if key not in self._tensors:  # a router's biases, which are not trained by Adam
            return np.zeros(self.shapes[name], np.float32)
        tensor = self._tensors[key]
        parts = self._parts(key, tensor)
        if parts is None:
            return tensor.read(index)
        shape, grid, part = self._files.tensors[key].shape, parts, tensor.shape[-1]
        # If the tensor is cut between all its layers (and experts), only the parts of this one are read. Otherwise all
        # are read, and this one is selected at the end.
        ahead = len(index) if grid[: len(index)] == shape[: len(index)] else 0
        numbers, shape, grid = tensor.read(index[:ahead]), shape[ahead:], grid[ahead:]
        assert math.prod(s // g for s, g in zip(shape, grid, strict=True)) == part
        cut = numbers.reshape(*grid, *(s // g for s, g in zip(shape, grid, strict=True)))
        # [grid..., part...] -> [grid, part, grid, part, ...], which merges to the shape of the tensor.
        axes = [axis + half * len(grid) for axis in range(len(grid)) for half in range(2)]
        return cut.transpose(axes).reshape(shape)[index[ahead:]]

    def _parts(self, key: str, tensor: StoredTensor) -> tuple[int, ...] | None:
        """Returns into how many parts each dimension is cut, the parts being flattened; None if it is not.

        Raises:
          UserError: the shape is neither.
        """
        shape, grid = self._files.tensors[key].shape, tensor.shape[:-1]
        if tensor.dtype != "float32":
            raise UserError(
                f"{self._files.folder} holds {tensor.key} as {tensor.dtype}: Adam's state is read from float32"
            )
        if tensor.shape == shape:
            return None
        is_cut = len(grid) == len(shape) and not any(s % g for s, g in zip(shape, grid, strict=True) if g)
        if not is_cut or 0 in grid or math.prod(tensor.shape) != math.prod(shape):
            raise UserError(
                f"{self._files.folder} holds {tensor.key} as {list(tensor.shape)}, and {key} is {list(shape)}"
            )
        return grid


class _Buckets:
    """The buffers of a torch_dist checkpoint, saved as `dp_reshardable`: each bucket is a tensor."""

    def __init__(self, files: TorchDistCheckpoint) -> None:
        self._files = files
        self._keys = {}
        for key in files.files.keys:
            if match := _OF_BUCKET.fullmatch(key):
                # A key without `chained_N` is of the only optimizer, number 0.
                optimizer, *numbers = (int(number or 0) for number in match.groups()[:-1])
                self._keys[(optimizer, *numbers, match[5])] = key
        if absent := files.files.missing_files(self._keys.values()):
            raise UserError(f"{files.folder} lacks {len(absent)} of its files: {', '.join(absent[:5])}")
        self._tensors: dict[str, StoredTensor] = {}
        self.used: set[str] = set()

    def sizes(self, rank: Rank, buffer: int, tensors: Mapping[str, int]) -> Sequence[int]:
        """Returns the elements of a buffer's buckets."""
        found = []
        while (key := self._key(rank, buffer, len(found), WEIGHTS)) is not None:
            self.used.add(key)
            found.append(self._tensor(key).shape[0])
        return found

    def read(self, rank: Rank, buffer: int, bucket: int, kind: str, start: int, stop: int) -> np.ndarray:
        """Returns elements of a bucket.

        Raises:
          UserError: the bucket is missing, or its numbers are not float32.
        """
        key = self._key(rank, buffer, bucket, kind)
        if key is None:
            raise UserError(f"{self._files.folder} lacks {kind} of bucket {bucket} of rank {rank.number}")
        tensor = self._tensor(key)
        if tensor.dtype != "float32" or stop > tensor.shape[0]:
            raise UserError(f"{self._files.folder} holds {key} as {tensor.dtype} {list(tensor.shape)}: it is damaged")
        return tensor.rows(start, stop)

    def unused(self) -> list[str]:
        """Returns buckets of weights that belong to no rank."""
        return sorted(key for of, key in self._keys.items() if of[-1] == WEIGHTS and key not in self.used)

    def _key(self, rank: Rank, buffer: int, bucket: int, kind: str) -> str | None:
        return self._keys.get((rank.optimizer, rank.number, buffer, bucket, kind))

    def _tensor(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            self._tensors[key] = self._files.files.tensor(key)
        return self._tensors[key]


class _LegacyBuckets:
    """The buffers of the format torch, `distrib_optim.pt` in each rank's folder: a buffer's buckets are one tensor.

    Padding between buckets is left out, and where they end is not saved: of the sizes that Megatron may have chosen,
    those that add up to the buffer are taken.
    """

    def __init__(self, files: MegatronCheckpoint, shared: frozenset[str]) -> None:
        self._folder, self._grid, self._arguments, self._shared = files.folder, files.grid, files.arguments, shared
        self._loaded: dict[Path, Any] = {}
        self._starts: dict[tuple[Rank, int], list[int]] = {}

    def sizes(self, rank: Rank, buffer: int, tensors: Mapping[str, int]) -> Sequence[int]:
        """Returns the elements of a buffer's buckets.

        Raises:
          UserError: no sizes add up to the buffer.
        """
        total = len(self._buffer(rank, buffer, WEIGHTS))
        degree = lambda name: int(self._arguments.get(name) or 1)  # noqa: E731
        # Data parallel ranks, on which the default size of buckets depends (`DistributedDataParallel`).
        ranks = degree("world_size") // (degree("tensor_model_parallel_size") * degree("pipeline_model_parallel_size"))
        usual = max(DEFAULT_BUCKET, DEFAULT_BUCKET_OF_RANK * ranks)
        given = self._arguments.get("ddp_bucket_size")
        count = self._arguments.get("ddp_num_buckets")
        parts = sum(tensors.values()) // count if count else None
        # None first: one bucket is Megatron's choice without --overlap-grad-reduce.
        for least in (None, given, parts, usual):
            sizes = bucket_sizes(tensors, least, self._shared)
            if sum(sizes) == total:
                self._starts[rank, buffer] = [sum(sizes[:i]) for i in range(len(sizes))]
                return sizes
        raise UserError(
            f"{self._folder}: {LEGACY_FILE} of rank {rank.number} has {total} numbers, and the layout of its "
            f"{len(tensors)} tensors has {sum(bucket_sizes(tensors, None, self._shared))}: {SAVE_AGAIN}"
        )

    def read(self, rank: Rank, buffer: int, bucket: int, kind: str, start: int, stop: int) -> np.ndarray:
        """Returns elements of a bucket."""
        first = self._starts[rank, buffer][bucket]
        return self._buffer(rank, buffer, kind)[first + start : first + stop].float().numpy()

    def _buffer(self, rank: Rank, buffer: int, kind: str) -> Any:
        path, state = self._state(rank)
        if not isinstance(state, Mapping) or not state.get("buckets_coalesced"):
            raise UserError(f"{path} is in a format that Megatron-LM wrote before February 2024: {SAVE_AGAIN}")
        found = list(state[buffer].values()) if isinstance(state.get(buffer), Mapping) else []
        if len(found) != 1 or not hasattr(found[0].get(kind), "shape"):
            raise UserError(f"{path} has no {kind} of buffer {buffer}, or several: it is damaged")
        return found[0][kind]

    def _state(self, rank: Rank) -> tuple[Path, Any]:
        """Returns the file of a rank, and the state of its optimizer in it: with expert parallelism there are two."""
        tensors, experts = len(self._grid), len(self._grid[0][0])
        above, tensor = divmod(rank.number, tensors)
        stage, expert = divmod(above, experts) if rank.optimizer == EXPERT else (above, 0)
        # The state of dense parameters is in the folder of the first expert-parallel rank.
        path = self._grid[tensor][stage][expert].with_name(LEGACY_FILE)
        if path not in self._loaded:
            if not path.is_file():
                raise UserError(f"{path.parent} has no {LEGACY_FILE}, and other ranks have one: copy it, too")
            self._loaded[path] = loaded(path)
        state, count = self._loaded[path], 2 if experts > 1 else 1
        found = len(state) if isinstance(state, list) else 1
        if found != count:
            raise UserError(f"{path} has {found} optimizers, and {count} are read: {SAVE_AGAIN}")
        return path, state[rank.optimizer] if isinstance(state, list) else state


States = Callable[[str], Shards | None]


@dataclass(frozen=True)
class MegatronOptimizer:
    """The optimizer's state of a checkpoint, in whichever layout it was saved."""

    layout: str
    progress: Progress
    states: States
    """Returns one kind of state as tensors; None for float32 weights that are the model's own."""
    advice: str
    """The end of the message if the float32 weights are not those of the model."""


def open_optimizer(
    files: TorchDistCheckpoint | MegatronCheckpoint, selection: Selection, rows: int, config: Config
) -> MegatronOptimizer:
    """Finds the optimizer's state in a checkpoint.

    Args:
      files: the checkpoint.
      selection: the tensors of its model.
      rows: of the padded vocabulary.
      config: of the model.

    Raises:
      UserError: there is none, or its layout is not read.
    """
    model = config.model
    stages = int(_raw_arguments(files).get("pipeline_model_parallel_size") or 1)
    copy = next(iter(selection.table.copies.values())) if model.tie_embeddings and stages > 1 else None
    shared = () if copy is None else (copy, COPY)
    if isinstance(files, TorchDistCheckpoint):
        layout = _layout_of(files)
        progress = progress_of(files.common, _states_of(files), str(files.folder))
        if layout != _IN_BUCKETS:
            return MegatronOptimizer(layout, progress, _full_states(files), _SHIFTED)
        arguments = _raw_arguments(files)
        buckets: _Buckets | _LegacyBuckets = _Buckets(files)
    else:
        contents = load(files.grid[0][0][0])
        arguments = files.arguments
        if not files.grid[0][0][0].with_name(LEGACY_FILE).is_file():
            raise UserError(
                f"{files.folder} has no {LEGACY_FILE}: of the format torch only the distributed optimizer is read; "
                f"{SAVE_AGAIN}"
            )
        progress = progress_of(contents, list(optimizers_in(contents.get("optimizer"))), str(files.folder))
        buckets, layout = _LegacyBuckets(files, frozenset(shared)), LEGACY_FILE
    if any(name.startswith("language_model.") for name in files.shapes):
        raise UserError(
            f"{files.folder} is of the code before Megatron-Core, whose optimizer is not read: {SAVE_AGAIN}"
        )
    degrees = Degrees.of(arguments, model.num_layers, str(files.folder))
    shapes = local_shapes(selection, rows, degrees.tensor)
    in_buffers = lambda kind: BufferStates(buckets, kind, shapes, degrees, arguments, copy)  # noqa: E731
    # Compares the sizes of all buffers before anything is written.
    in_buffers(WEIGHTS)
    # A bucket that no rank's layout reaches: there are more ranks or buffers than the arguments say.
    if isinstance(buckets, _Buckets) and (unused := buckets.unused()):
        raise UserError(
            f"{files.folder}: the layout of the optimizer's buffers is not known: {unused[0]} is left: {SAVE_AGAIN}"
        )
    return MegatronOptimizer(layout, progress, in_buffers, f"their layout in the buffers is not known: {SAVE_AGAIN}")


def _layout_of(files: TorchDistCheckpoint) -> str:
    """Returns how the optimizer's state is laid out, by its keys.

    Raises:
      UserError: it is not there, or in a layout that is not read.
    """
    found = set(filter(None, map(_layout, (*files.files.keys, *files.files.objects))))
    named = (files.common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
    if len(found) != 1:
        what = f"{named}, which mtjax does not read" if named and found else "no optimizer's state"
        raise UserError(f"{files.folder} holds {what}: {SAVE_AGAIN}")
    layout = found.pop()
    if layout == "dp_zero_gather_scatter":
        raise UserError(f"{files.folder} holds the optimizer as {layout}, which mtjax does not read: {SAVE_AGAIN}")
    return layout if layout == _IN_BUCKETS else str(named or _IN_TENSORS)


def _full_states(files: TorchDistCheckpoint) -> States:
    """Returns the states in tensors that are shaped like the model's.

    Raises:
      UserError: a model in 16 bits has no float32 weights.
    """
    kinds = {match[1] for key in files.files.keys if (match := _OF_PARAMETER.fullmatch(key))}
    has_weights = bool(kinds & {WEIGHTS, "fp32_param"})
    if not has_weights and files.dtype != "float32":
        raise UserError(f"{files.folder} holds weights in {files.dtype}, and no float32 weights of its optimizer")
    return lambda kind: FullStates(files, kind) if kind != WEIGHTS or has_weights else None


def _layout(key: str) -> str | None:
    if _OF_PARAMETER.fullmatch(key):
        return _IN_TENSORS
    if _OF_BUCKET.fullmatch(key):
        return _IN_BUCKETS
    match = _OBJECT.fullmatch(key)
    return "dp_zero_gather_scatter" if match and match[1] == "param_state" else None


def _states_of(files: TorchDistCheckpoint) -> list[Mapping[str, Any]]:
    """Returns the state of each optimizer without tensors: of the common state, or one object for each rank."""
    found = []
    for key in files.files.objects:
        match = _OBJECT.fullmatch(key)
        if match and match[1] != "param_state":
            value = files.files.object(key)
            value = value[0] if isinstance(value, list) and len(value) == 1 else value
            found.append({"grad_scaler": value} if match[1] == "grad_scaler" else value)
    return found or list(optimizers_in(files.common.get("optimizer")))


def _raw_arguments(files: TorchDistCheckpoint | MegatronCheckpoint) -> Mapping[str, Any]:
    args = files.arguments if isinstance(files, MegatronCheckpoint) else files.common.get("args") or {}
    return args if isinstance(args, Mapping) else vars(args)
