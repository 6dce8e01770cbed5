"""Megatron-LM's checkpoint files, `mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`, read without executing pickled code.

XX is the tensor-parallel rank, YYY the pipeline stage and ZZZ the expert-parallel rank; the latter two are present if
there is more than one. Parameters other than those of experts are replicated on all expert-parallel ranks. With the
interleaved schedule, a file has `model0`, `model1`, ... instead of `model`: the layers of chunk c of stage p follow
those of chunk c of stage p - 1.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mtjax.convert.megatron_experts import BIAS, by_expert
from mtjax.convert.megatron_formats import checkpoint_folder
from mtjax.convert.stream import understood
from mtjax.errors import UserError, require

FILES = ("model_optim_rng.pt", "model_rng.pt")
"""Names of the file in a rank's folder; some versions write the second with the distributed optimizer."""

EXTRA_STATE = "_extra_state"
"""Suffix of Transformer Engine's entries that are not weights, such as FP8 scales."""

RENAMED = (
    (r"^language_model\.transformer\.", "language_model.encoder."),
    (r"(\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"^(language_model\..*)\.final_norm\.", r"\1.final_layernorm."),
    (r"\.mixer\.conv1d_(weight|bias)$", r".mixer.conv1d.\1"),
    (r"^lm_head\.norm\.", "lm_head.layernorm."),
)
"""Names of some versions -> the names in the tables."""
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class _StageChunk:
    """The layers of one pipeline stage, or of one of its chunks, on every tensor-parallel rank."""

    tensors: list[dict[str, list[Any]]]
    """For each tensor-parallel rank: name in the tables (layers counted from 0) -> the torch tensors (memory-mapped) of
    the expert-parallel ranks that have it."""
    num_layers: int


class MegatronCheckpoint:
    """A checkpoint with any parallel degrees, as the tensors of one model in tensor-parallel shards."""

    def __init__(self, folder: Path) -> None:
        """Opens every rank's file; the weights are read later, by `shard`.

        Raises:
          UserError: files are missing or can't be read, or the ranks are inconsistent.
        """
        self.folder = checkpoint_folder(folder)
        files_of = _rank_files(self.folder)
        first_path = files_of[min(files_of)]
        first = load(first_path)
        with understood(str(first_path)):
            # The first versions of Megatron saved none, for which it takes 0.
            self.version = float(first.get("checkpoint_version") or 0)
            # Arguments of the model are the same in every rank's file.
            args = first.get("args") or {}
            self.arguments: Mapping[str, Any] = args if isinstance(args, Mapping) else vars(args)
        grid = _grid(self.folder, files_of, (self.arguments.get("expert_model_parallel_size") or 1) > 1)
        self.grid = grid
        """The file of each tensor-parallel rank, pipeline stage and expert-parallel rank."""
        self.ranks, stages = len(grid), len(grid[0])
        loaded = [[[load(path) for path in paths] for paths in row] for row in grid]
        # Interleaved schedule: all stages have the same number of chunks.
        chunks = max(len(_models(one)) for row in loaded for files in row for one in files)
        chunks_of_layers = [
            _stage_chunk([[_models(one)[chunk] for one in row[stage]] for row in loaded], grid[0][stage][0])
            for chunk in range(chunks)
            for stage in range(stages)
        ]
        self._tensors = _joined(chunks_of_layers)
        self.num_layers = sum(chunk.num_layers for chunk in chunks_of_layers)
        # Shapes are those of rank 0; _stage_chunk has checked that all ranks have the same.
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(by[0][0].shape) for n, by in self._tensors.items()}
        self.dtype = self._common_dtype()

    @property
    def summary(self) -> str:
        """Describes it for a note."""
        return f"checkpoint_version {self.version:g}, {self.ranks} tensor-parallel ranks, {self.dtype}"

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns a tensor-parallel rank's shard of a tensor, or all of a tensor that is replicated.

        Raises:
          UserError: replicas on expert-parallel ranks differ.
        """
        torch = require("torch", "megatron")
        tensor, *copies = (one.detach() for one in self._tensors[name][rank])
        if not all(torch.equal(tensor, copy) for copy in copies):
            raise UserError(f"{self.folder}: {name} must be replicated on expert-parallel ranks, but they differ")
        # numpy has no bfloat16: reinterpret the bits.
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _common_dtype(self) -> str:
        """Returns the dtype of the weights, float32 if they have several.

        Raises:
          UserError: one is not supported.
        """
        kinds = {
            str(by[0][0].dtype).removeprefix("torch.") for name, by in self._tensors.items() if not name.endswith(BIAS)
        }
        odd = kinds - {"float32", "float16", "bfloat16"}
        if odd:
            raise UserError(
                f"{self.folder} contains weights of type {', '.join(sorted(odd))}; supported types: float32, float16, "
                "bfloat16"
            )
        return kinds.pop() if len(kinds) == 1 else "float32"


def _rank_files(folder: Path) -> dict[tuple[int, ...], Path]:
    """Returns the ranks in the names of the folders mp_rank_* -> the file in each."""
    found = {}
    for path in folder.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_(\d+)((?:_\d+){0,2})", path.name)
        if not match:
            raise UserError(f"{path}: expected mp_rank_XX, mp_rank_XX_YYY or mp_rank_XX_YYY_ZZZ")
        found[tuple(map(int, path.name.removeprefix("mp_rank_").split("_")))] = _file(path)
    return found


def _grid(folder: Path, files_of: Mapping[tuple[int, ...], Path], has_expert_ranks: bool) -> list[list[list[Path]]]:
    """Arranges the files by tensor-parallel rank, pipeline stage and expert-parallel rank.

    Raises:
      UserError: files are missing.
    """
    files = {}
    for numbers, path in files_of.items():
        tensor, *optional = numbers
        # mp_rank_XX_YYY: YYY is the expert-parallel rank of a run without pipeline stages, or the stage.
        expert = optional.pop() if optional and (has_expert_ranks or len(optional) == 2) else 0
        files[tensor, optional[0] if optional else 0, expert] = path
    ranks, stages, experts = (max(numbers[i] for numbers in files) + 1 for i in range(3))
    every = [(r, s, e) for r in range(ranks) for s in range(stages) for e in range(experts)]
    missing = [
        "_".join((f"{r:02}", f"{s:03}", *([f"{e:03}"] * (experts > 1)))) for r, s, e in every if (r, s, e) not in files
    ]
    if missing:
        sizes = f"{ranks} x {stages}" + (
            f" x {experts} (tensor x pipeline x expert)" if experts > 1 else " (tensor x pipeline)"
        )
        raise UserError(f"{folder} is missing mp_rank_ {', '.join(missing)} of {sizes}")
    return [[[files[r, s, e] for e in range(experts)] for s in range(stages)] for r in range(ranks)]


def _file(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} contains no {FILES[0]}")


def load(path: Path) -> dict[str, Any]:
    """Loads a file of a model, with its tensors memory-mapped.

    Raises:
      UserError: it is not such a file.
    """
    contents = loaded(path)
    if not isinstance(contents, dict) or not all(isinstance(m, Mapping) for m in _models(contents) or [None]):
        raise UserError(f"{path} contains no model of Megatron-LM")
    return contents


def loaded(path: Path) -> Any:
    """Loads any file of torch, with its tensors memory-mapped.

    Only tensors, plain containers and `argparse.Namespace` are constructed. Any other class or function that the file
    names is replaced by one that does nothing, so that neither an installed Megatron nor trust in the file is needed.

    Raises:
      UserError: it is not such a file.
    """
    torch = require("torch", "megatron")
    serialization = torch.serialization
    try:
        # Lists the names without constructing anything.
        named = serialization.get_unsafe_globals_in_checkpoint(str(path))
        with serialization.safe_globals([_harmless(name) for name in named]):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as e:  # a corrupted file may raise any error of pickle, zipfile or torch
        # Only the first sentence: torch continues with advice that does not apply here.
        reason = (str(e).strip() or repr(e)).splitlines()[0].split(". ")[0]
        raise UserError(f"{path} can't be read as a torch checkpoint without running code from it: {reason}") from e


def _harmless(name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    # torch accepts a pair of a class and the name that it replaces.
    return type(name.rpartition(".")[2], (_Nothing,), {}), name


class _Nothing:
    """Replaces objects of classes that are not loaded."""

    def __new__(cls, *_: object, **__: object) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _models(contents: Mapping[str, Any]) -> list[Any]:
    """Returns the state dict of each chunk in a file."""
    names = ["model"] if "model" in contents else sorted((k for k in contents if re.fullmatch(r"model\d+", k)), key=len)
    return [contents[name] for name in names]


def _stage_chunk(models: list[list[Any]], path: Path) -> _StageChunk:
    """Combines the state dicts of one chunk, by tensor-parallel and expert-parallel rank.

    Raises:
      UserError: the ranks have different tensors.
    """
    tensors = [_tensors_of_rank(of_rank) for of_rank in models]
    for rank, other in enumerate(tensors):
        # Tensors of only one of the two ranks, and those of different shapes.
        differing = set(tensors[0]) ^ set(other)
        differing |= {n for n in set(tensors[0]) & set(other) if _shapes(tensors[0][n]) != _shapes(other[n])}
        if differing:
            raise UserError(
                f"{path} and the same file of tensor-parallel rank {rank} differ in {', '.join(sorted(differing))}"
            )
    odd = sorted(name for name, copies in tensors[0].items() if len(set(_shapes(copies))) > 1)
    if odd:
        raise UserError(
            f"{path} and the same file of other expert-parallel ranks differ in the shapes of {', '.join(odd)}"
        )
    # Layers are numbered from 0 within the chunk, which has none if it holds only the embedding or the loss.
    layers = {int(match[0]) for name in tensors[0] if (match := _LAYER.search(name))}
    return _StageChunk(tensors, max(layers, default=-1) + 1)


def _shapes(copies: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in copies]


def _tensors_of_rank(models: list[Any]) -> dict[str, list[Any]]:
    """Collects the tensors of a tensor-parallel rank from its expert-parallel ranks."""
    found: dict[str, list[Any]] = {}
    for rank, model in enumerate(models):
        for name, tensor in by_expert(dict(flattened(model)), rank, len(models)):
            found.setdefault(name, []).append(tensor)
    return found


def flattened(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors of nested dicts with their dotted names in the tables."""
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif hasattr(value, "shape") and not name.endswith(EXTRA_STATE):
            for pattern, new in RENAMED:
                name = re.sub(pattern, new, name)
            yield name, value


def _shifted(name: str, layers: int) -> str:
    """Adds `layers` to the layer number in a name."""
    return _LAYER.sub(lambda match: str(int(match[0]) + layers), name)


def _joined(chunks: list[_StageChunk]) -> dict[str, list[list[Any]]]:
    """Merges the chunks, with layers numbered across all of them."""
    shards_by_name: dict[str, list[list[Any]]] = {}
    before = 0
    for chunk in chunks:
        for name in chunk.tensors[0]:
            shards = [tensors[name] for tensors in chunk.tensors]
            shards_by_name[_shifted(name, before)] = shards
        before += chunk.num_layers
    return shards_by_name
