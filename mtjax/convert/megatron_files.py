"""Megatron-LM's checkpoint files, `mp_rank_XX[_YYY]/model_optim_rng.pt`: read without running what is pickled in them.

XX is the tensor-parallel rank, YYY the pipeline stage. With interleaved stages a file has `model0`, `model1`, ...
instead of `model`: chunk c of stage p comes after chunk c of stage p - 1.
"""

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mtjax.convert.stream import check_folder, looks_like, understood
from mtjax.errors import UserError, require

TRACKER = "latest_checkpointed_iteration.txt"
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

    tensors: list[dict[str, Any]]
    """By rank; torch tensors, mapped from the file, by their names in the tables, layers counted from the part's 0."""
    num_layers: int


class MegatronCheckpoint:
    """A checkpoint of any tensor and pipeline split, as one model's tensors in tensor-parallel shards."""

    def __init__(self, folder: Path) -> None:
        """Opens every rank's file; numbers are read when they are asked for.

        Raises:
          UserError: files are missing or can't be read, or ranks don't fit each other.
        """
        self.folder = checkpoint_folder(folder)
        grid = _grid(self.folder)
        self.ranks, stages = len(grid), len(grid[0])
        loaded = [[load(path) for path in row] for row in grid]
        first = loaded[0][0]
        with understood(str(grid[0][0])):
            self.version = float(first.get("checkpoint_version") or 0)
            args = first.get("args") or {}
            self.arguments: Mapping[str, Any] = args if isinstance(args, Mapping) else vars(args)
        chunks = max(len(_models(one)) for row in loaded for one in row)
        parts = [
            _part([_models(loaded[rank][stage])[chunk] for rank in range(self.ranks)], grid[0][stage])
            for chunk in range(chunks)
            for stage in range(stages)
        ]
        self._tensors = _joined(parts)
        self.num_layers = sum(part.num_layers for part in parts)
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(by[0].shape) for n, by in self._tensors.items()}
        self.dtype = self._common_dtype()

    def shard(self, name: str, rank: int) -> np.ndarray:
        """A rank's part of a tensor; a tensor that is not split is replicated on every rank."""
        torch = require("torch", "megatron")
        tensor = self._tensors[name][rank].detach()
        if tensor.dtype == torch.bfloat16:
            return tensor.contiguous().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()

    def _common_dtype(self) -> str:
        kinds = {str(by[0].dtype).removeprefix("torch.") for by in self._tensors.values()}
        odd = kinds - {"float32", "float16", "bfloat16"}
        if odd:
            raise UserError(f"{self.folder} holds {', '.join(sorted(odd))}; weights are converted from 16 or 32 bits")
        return kinds.pop() if len(kinds) == 1 else "float32"


def checkpoint_folder(folder: Path) -> Path:
    """The folder with `mp_rank_*`: itself, or the one that Megatron's tracker file names.

    Raises:
      UserError: there is none.
    """
    check_folder(folder)
    if any(folder.glob("mp_rank_*")):
        return folder
    _refuse_other_format(folder)
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise UserError(
            f"{folder} is not a checkpoint of Megatron-LM: it has neither mp_rank_* nor {TRACKER}{looks_like(folder)}"
        )
    word = tracker.read_text().strip()
    checkpoint = folder / (word if word == "release" else f"iter_{int(word) if word.isdigit() else 0:07}")
    _refuse_other_format(checkpoint)
    if not any(checkpoint.glob("mp_rank_*")):
        raise UserError(f"{tracker} says {word!r}, and {checkpoint} holds no mp_rank_*")
    return checkpoint


def _refuse_other_format(folder: Path) -> None:
    if any(folder.glob("*.distcp")):
        raise UserError(
            f"{folder} is in Megatron's format torch_dist, which mtjax does not read: save it with --ckpt-format torch"
        )


def _grid(folder: Path) -> list[list[Path]]:
    """The files by tensor-parallel rank and pipeline stage."""
    files: dict[tuple[int, int], Path] = {}
    for path in folder.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?", path.name)
        if not match:
            raise UserError(f"{path}: expected mp_rank_XX or mp_rank_XX_YYY; experts are not supported")
        files[int(match[1]), int(match[2] or 0)] = path
    ranks, stages = (max(place[i] for place in files) + 1 for i in (0, 1))
    missing = [f"{r:02}_{s:03}" for r in range(ranks) for s in range(stages) if (r, s) not in files]
    if missing:
        raise UserError(f"{folder} lacks mp_rank_ {', '.join(missing)} of {ranks} x {stages} (tensor x pipeline)")
    return [[_file(files[rank, stage]) for stage in range(stages)] for rank in range(ranks)]


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


def _part(models: list[Any], path: Path) -> _Part:
    """One part from what each rank has of it.

    Raises:
      UserError: the ranks have different tensors.
    """
    tensors = [dict(flattened(model)) for model in models]
    for rank, other in enumerate(tensors):
        differing = set(tensors[0]) ^ set(other)
        differing |= {n for n in set(tensors[0]) & set(other) if tensors[0][n].shape != other[n].shape}
        if differing:
            raise UserError(f"{path} and its like on rank {rank} differ in {', '.join(sorted(differing))}")
    layers = {int(match[0]) for name in tensors[0] if (match := _LAYER.search(name))}
    return _Part(tensors, max(layers, default=-1) + 1)


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


def _joined(parts: list[_Part]) -> dict[str, list[Any]]:
    """All parts' tensors by rank, with layers counted over all parts."""
    shards_by_name: dict[str, list[Any]] = {}
    before = 0
    for part in parts:
        for name in part.tensors[0]:
            shards = [tensors[name] for tensors in part.tensors]
            shards_by_name[_later(name, before)] = shards
        before += part.num_layers
    return shards_by_name
