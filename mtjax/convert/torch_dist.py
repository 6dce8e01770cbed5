"""Megatron-LM's distributed checkpoints, `--ckpt-format torch_dist`, as one model's tensors, named as in the tables.

Tensors are full, however many tensor, pipeline, expert and data parallel ranks saved them. Those of the layers are
stacked along a first dimension, over all pipeline stages, and those of the experts along the next one; where layers
differ, each has keys of its own.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.convert.megatron_experts import BIAS
from mtjax.convert.megatron_formats import checkpoint_folder
from mtjax.convert.stream import understood
from mtjax.convert.torch_dist_files import Archive, DistributedCheckpoint, StoredTensor
from mtjax.errors import UserError

VERSION = 3.0
"""`checkpoint_version` of all distributed checkpoints."""
COMMON_FILE = "common.pt"
COMMON_STATE = "common_state/"
"""Since Megatron-Core 0.19 the common state is an object of this name among the chunks."""
LAYERS = "decoder.layers."
OPTIMIZER = ("optimizer.", "chained_")
"""What the keys of an optimizer's state begin with."""
# The states of torch's generators and of Megatron's re-run machine, which are not the model's.
UNREAD = ("rng_state", "rerun_state")
MLP_NORM, EXPERTS_NORM = "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
_ROUTER = "mlp.router.weight"
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.experts\.(linear_fc[12]\.weight)")
_SINGLE = re.compile(r".*\.experts\.\d+\.|.*\.linear_fc1\.weight_[wv]")
"""Of `singleton_local_shards`, with which experts and the halves of a gated MLP have keys of their own."""


class TorchDistCheckpoint:
    """A folder of the format torch_dist.

    Its tensors are named as Transformer Engine's modules are, each with the numbers of its layer and expert.
    """

    ranks = 1
    """Tensor-parallel ranks: a tensor is full."""

    def __init__(self, folder: Path) -> None:
        """Reads the lists of tensors and the common state; numbers are read when they are asked for.

        Raises:
          UserError: files are missing or corrupted, a file would run code, or chunks overlap or leave gaps.
        """
        self.folder = checkpoint_folder(folder)
        self.files = DistributedCheckpoint(self.folder)
        self.common = common = self._common()
        with understood(str(self.folder)):
            self.version = float(common.get("checkpoint_version") or VERSION)
            args = common.get("args") or {}
            self.arguments: Mapping[str, Any] = dict(args if isinstance(args, Mapping) else vars(args))
        # How experts were sharded does not matter for full tensors.
        self.arguments = {n: v for n, v in self.arguments.items() if n != "expert_tensor_parallel_size"}
        keys = [key for key in self.files.keys if not key.startswith((*OPTIMIZER, *UNREAD))]
        if singles := [key for key in keys if _SINGLE.match(key)]:
            raise UserError(f"{self.folder} was saved with singleton_local_shards, which is not read: {singles[0]}")
        if missing := self.files.missing_files(keys):
            raise UserError(f"{self.folder} lacks {len(missing)} of its files: {', '.join(missing[:5])}")
        self.tensors = {key: self.files.tensor(key) for key in keys}
        self.index = {name: (key, index) for key in keys for name, index in self._named(key)}
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self.tensors[key].shape[len(index) :] for name, (key, index) in self.index.items()
        }
        self.dtype = self._common_dtype()

    @property
    def summary(self) -> str:
        """Describes it for a note."""
        chunks = sum(len(tensor.chunks) for tensor in self.tensors.values())
        has_optimizer = any(key.startswith(OPTIMIZER) for key in self.files.keys)
        unread = "; --with-optimizer converts the optimizer's state, too" if has_optimizer else ""
        return f"torch_dist, {len(self.tensors)} tensors in {chunks} chunks, {self.dtype}{unread}"

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns the tensor of one layer or expert; `rank` is 0.

        Raises:
          UserError: a file is corrupted, or of another save.
        """
        key, index = self.index[name]
        return self.tensors[key].read(index)

    def _common(self) -> Mapping[str, Any]:
        path = self.folder / COMMON_FILE
        if path.is_file():
            common = Archive(path).state()
        else:
            key = next((key for key in self.files.objects if key.startswith(COMMON_STATE)), None)
            if key is None:
                raise UserError(f"{self.folder} lacks {COMMON_FILE}, which holds Megatron's arguments")
            common = self.files.object(key)
            common = common[0] if isinstance(common, list) and len(common) == 1 else common
        if not isinstance(common, Mapping):
            raise UserError(f"{self.folder} has a common state that is not a dict, but {type(common).__name__}")
        return common

    def _named(self, key: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the names of a key's tensors, and the index of each in the first dimensions."""
        tensor = self.tensors[key]
        for name, index in self._of_layers(key, tensor):
            match = _EXPERTS.fullmatch(name)
            if match is None:
                yield name, index
                continue
            # The experts' dimension comes after that of the layers, if there is one.
            for expert in range(_size(tensor, len(index))):
                yield f"{match[1]}.local_experts.{expert}.{match[2]}", (*index, expert)

    def _of_layers(self, key: str, tensor: StoredTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yields the same of each layer, for all experts."""
        name = key
        start, _, kind = key.partition(MLP_NORM)
        if kind and f"{start}{_ROUTER}" in self.tensors:  # what the implementation `local` calls the experts' norm
            name = f"{start}{EXPERTS_NORM}{kind}"
        # `decoder.layers.mlp...` is stacked over layers, `decoder.layers.3.mlp...` is of one (non_homogeneous_layers).
        is_stacked = key.startswith(LAYERS) and not key.removeprefix(LAYERS).partition(".")[0].isdigit()
        if not is_stacked:
            yield name, ()
            return
        for layer in range(_size(tensor, 0)):
            yield f"{LAYERS}{layer}.{name.removeprefix(LAYERS)}", (layer,)

    def _common_dtype(self) -> str:
        kinds = {tensor.dtype for key, tensor in self.tensors.items() if not key.endswith(BIAS)}
        if odd := kinds - {"float32", "float16", "bfloat16"}:
            raise UserError(f"{self.folder} holds {', '.join(sorted(odd))}; weights are converted from 16 or 32 bits")
        return kinds.pop() if len(kinds) == 1 else "float32"


def _size(tensor: StoredTensor, axis: int) -> int:
    if axis >= len(tensor.shape):
        raise UserError(f"{tensor.key} is {list(tensor.shape)}, and should be stacked by layers or experts")
    return tensor.shape[axis]
