"""Megatron-LM's checkpoint files, `mp_rank_XX[_YYY][_ZZZ]/model_optim_rng.pt`: read without running what is pickled in
them.

XX is the tensor-parallel rank, YYY the pipeline stage, ZZZ the expert-parallel rank, each of the latter where there is
more than one: what is not an expert's, all of these ranks have. With interleaved stages a file has `model0`, `model1`,
... instead of `model`: chunk c of stage p comes after chunk c of stage p - 1.
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
"""The second is that of runs with a distributed optimizer in some versions."""

EXTRA_STATE = "_extra_state"
"""What Transformer Engine keeps besides weights: scales of 8-bit numbers."""

RENAMED = (
    (r"^language_model\.transformer\.", "language_model.encoder."),
    (r"(\.layers\.\d+)\.attention\.", r"\1.self_attention."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.post_attention_norm\.", ".post_attention_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
    (r"^lm_head\.norm\.", "lm_head.layernorm."),
)
"""Names of some versions -> the names in the tables."""
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class _Part:
    """The layers of one pipeline stage, or of one chunk of it, on every tensor-parallel rank."""

    tensors: list[dict[str, list[Any]]]
    """By rank; torch tensors, mapped from the file, by their names in the tables, layers counted from the part's 0;
    with what other expert-parallel ranks have of the same."""
    num_layers: int


class MegatronCheckpoint:
    """A checkpoint of any tensor, pipeline and expert split, as one model's tensors in tensor-parallel shards."""

    def __init__(self, folder: Path) -> None:
        """Opens every rank's file; numbers are read when they are asked for.

        Raises:
          UserError: files are missing or can't be read, or ranks don't fit each other.
        """
        self.folder = checkpoint_folder(folder)
        places = _places(self.folder)
        some = places[min(places)]
        first = load(some)
        with understood(str(some)):
            self.version = float(first.get("checkpoint_version") or 0)
            args = first.get("args") or {}
            self.arguments: Mapping[str, Any] = args if isinstance(args, Mapping) else vars(args)
        grid = _grid(self.folder, places, (self.arguments.get("expert_model_parallel_size") or 1) > 1)
        self.ranks, stages = len(grid), len(grid[0])
        loaded = [[[load(path) for path in paths] for paths in row] for row in grid]
        chunks = max(len(_models(one)) for row in loaded for files in row for one in files)
        parts = [
            _part([[_models(one)[chunk] for one in row[stage]] for row in loaded], grid[0][stage][0])
            for chunk in range(chunks)
            for stage in range(stages)
        ]
        self._tensors = _joined(parts)
        self.num_layers = sum(part.num_layers for part in parts)
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(by[0][0].shape) for n, by in self._tensors.items()}
        self.dtype = self._common_dtype()

    @property
    def summary(self) -> str:
        """Describes it for a note."""
        return f"checkpoint_version {self.version:g}, {self.ranks} tensor-parallel ranks, {self.dtype}"

    def shard(self, name: str, rank: int) -> np.ndarray:
        """A rank's part of a tensor; a tensor that is not split is replicated on every rank.

        Raises:
          UserError: expert-parallel ranks don't have the same of what they share.
        """
        torch = require("torch", "megatron")
        tensor, *copies = (one.detach() for one in self._tensors[name][rank])
        if not all(torch.equal(tensor, copy) for copy in copies):
            raise UserError(f"{self.folder}: {name} is not an expert's, and differs between expert-parallel ranks")
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _common_dtype(self) -> str:
        kinds = {
            str(by[0][0].dtype).removeprefix("torch.") for name, by in self._tensors.items() if not name.endswith(BIAS)
        }
        odd = kinds - {"float32", "float16", "bfloat16"}
        if odd:
            raise UserError(f"{self.folder} holds {', '.join(sorted(odd))}; weights are converted from 16 or 32 bits")
        return kinds.pop() if len(kinds) == 1 else "float32"


def _places(folder: Path) -> dict[tuple[int, ...], Path]:
    """The files by the numbers in the names of their folders."""
    found = {}
    for path in folder.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_(\d+)((?:_\d+){0,2})", path.name)
        if not match:
            raise UserError(f"{path}: expected mp_rank_XX, mp_rank_XX_YYY or mp_rank_XX_YYY_ZZZ")
        found[tuple(map(int, path.name.removeprefix("mp_rank_").split("_")))] = _file(path)
    return found


def _grid(folder: Path, places: Mapping[tuple[int, ...], Path], has_expert_ranks: bool) -> list[list[list[Path]]]:
    """The files by tensor-parallel rank, pipeline stage and expert-parallel rank: the last number, if any is."""
    files = {}
    for numbers, path in places.items():
        first, *others = numbers
        expert = others.pop() if others and (has_expert_ranks or len(others) == 2) else 0
        files[first, others[0] if others else 0, expert] = path
    ranks, stages, experts = (max(place[i] for place in files) + 1 for i in range(3))
    every = [(r, s, e) for r in range(ranks) for s in range(stages) for e in range(experts)]
    missing = [
        "_".join((f"{r:02}", f"{s:03}", *([f"{e:03}"] * (experts > 1)))) for r, s, e in every if (r, s, e) not in files
    ]
    if missing:
        sizes = f"{ranks} x {stages}" + (
            f" x {experts} (tensor x pipeline x expert)" if experts > 1 else " (tensor x pipeline)"
        )
        raise UserError(f"{folder} lacks mp_rank_ {', '.join(missing)} of {sizes}")
    return [[[files[r, s, e] for e in range(experts)] for s in range(stages)] for r in range(ranks)]


def _file(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} holds no {FILES[0]}")


def load(path: Path) -> dict[str, Any]:
    """A file's contents, tensors mapped into memory.

    Only tensors and plain containers are made, and `argparse.Namespace`. Any other class or function that the file
    names becomes one that does nothing, so that neither Megatron nor trust in the file is needed.

    Raises:
      UserError: it is not such a file.
    """
    torch = require("torch", "megatron")
    serialization = torch.serialization
    try:
        named = serialization.get_unsafe_globals_in_checkpoint(str(path))
        with serialization.safe_globals([_harmless(name) for name in named]):
            contents = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as e:  # pickle, zipfile, torch: whatever a file may cause
        reason = (str(e).strip() or repr(e)).splitlines()[0].split(". ")[0]  # torch's advice follows, not ours
        raise UserError(f"{path} can't be read as a torch checkpoint without running code from it: {reason}") from e
    if not isinstance(contents, dict) or not all(isinstance(m, Mapping) for m in _models(contents) or [None]):
        raise UserError(f"{path} holds no model of Megatron-LM")
    return contents


def _harmless(name: str) -> Any:
    if name == "argparse.Namespace":
        return argparse.Namespace
    return type(name.rpartition(".")[2], (_Nothing,), {}), name


class _Nothing:
    """Stands for an object of a class that is not loaded."""

    def __new__(cls, *_: object, **__: object) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, _: object) -> None:
        pass


def _models(contents: Mapping[str, Any]) -> list[Any]:
    names = ["model"] if "model" in contents else sorted((k for k in contents if re.fullmatch(r"model\d+", k)), key=len)
    return [contents[name] for name in names]


def _part(models: list[list[Any]], path: Path) -> _Part:
    """One part from what each tensor-parallel rank, and of these each expert-parallel one, has of it.

    Raises:
      UserError: the ranks have different tensors.
    """
    tensors = [_rank(of_rank) for of_rank in models]
    for rank, other in enumerate(tensors):
        differing = set(tensors[0]) ^ set(other)
        differing |= {n for n in set(tensors[0]) & set(other) if _shapes(tensors[0][n]) != _shapes(other[n])}
        if differing:
            raise UserError(f"{path} and its like on rank {rank} differ in {', '.join(sorted(differing))}")
    odd = sorted(name for name, copies in tensors[0].items() if len(set(_shapes(copies))) > 1)
    if odd:
        raise UserError(f"{path} and its like on other expert-parallel ranks differ in the shapes of {', '.join(odd)}")
    layers = {int(match[0]) for name in tensors[0] if (match := _LAYER.search(name))}
    return _Part(tensors, max(layers, default=-1) + 1)


def _shapes(copies: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in copies]


def _rank(models: list[Any]) -> dict[str, list[Any]]:
    """A tensor-parallel rank's tensors from what each expert-parallel rank has of them."""
    found: dict[str, list[Any]] = {}
    for rank, model in enumerate(models):
        for name, tensor in by_expert(dict(flattened(model)), rank, len(models)):
            found.setdefault(name, []).append(tensor)
    return found


def flattened(model: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors of nested dicts by dotted names, those of the tables."""
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flattened(value, f"{name}.")
        elif hasattr(value, "shape") and not name.endswith(EXTRA_STATE):
            for pattern, new in RENAMED:
                name = re.sub(pattern, new, name)
            yield name, value


def _later(name: str, layers: int) -> str:
    """The name with its layer counted from `layers`."""
    return _LAYER.sub(lambda match: str(int(match[0]) + layers), name)


def _joined(parts: list[_Part]) -> dict[str, list[list[Any]]]:
    """All parts' tensors by rank, with layers counted over all parts."""
    shards_by_name: dict[str, list[list[Any]]] = {}
    before = 0
    for part in parts:
        for name in part.tensors[0]:
            shards = [tensors[name] for tensors in part.tensors]
            shards_by_name[_later(name, before)] = shards
        before += part.num_layers
    return shards_by_name
