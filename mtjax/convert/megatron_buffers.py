"""The layout of Megatron-Core's distributed optimizer: which part of a flat buffer belongs to which tensor.

Every model-parallel rank has a buffer for each of its model's chunks. The rank's tensors, in the reverse order in which
the modules create them, begin at multiples of 64; a buffer is divided into buckets, each with a start of its own. The
layout is not saved, so `BufferStates` rebuilds it, and whoever reads it must compare the float32 weights in the buffers
with the model's (`_ParamAndGradBuffer` and `DistributedOptimizer` in megatron-core).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mtjax.convert.megatron_experts import BIAS, number_of, with_number
from mtjax.convert.megatron_stages import stage_layers
from mtjax.convert.megatron_tables import LOCAL
from mtjax.errors import UserError

ALIGNMENT = 64
"""Tensors begin at multiples of this number of elements."""
DEFAULT_BUCKET, DEFAULT_BUCKET_OF_RANK = 40_000_000, 1_000_000
"""Elements that a bucket has at least, in all and for each data-parallel rank, by default."""
SAVE_AGAIN = "save it again with --dist-ckpt-optim-fully-reshardable (torch_dist), or convert without --with-optimizer"
DENSE, EXPERT = 0, 1
"""The optimizer of most parameters, and with expert parallelism that of the experts."""
_STANDALONE = "standalone_embedding_stage"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_"
_MODULES = (
    *("input_layernorm.", "self_attention.linear_proj.", _ATTENTION_NORM, "self_attention.linear_qkv."),
    *("self_attention.q_layernorm.", "self_attention.k_layernorm.", "pre_mlp_layernorm.", "mlp.router."),
    *("mlp.experts.", "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1.", "mlp.shared_experts."),
    *("mlp.linear_fc1.layer_norm_", "mlp.linear_fc1.", "mlp.linear_fc2."),
)
"""Modules of a layer in the order in which Transformer Engine's create their tensors."""


class Buffers(Protocol):
    """Buffers of all ranks, in any file format."""

    def sizes(self, rank: "Rank", buffer: int, tensors: Mapping[str, int]) -> Sequence[int]:
        """Returns the elements of each bucket of a buffer, of these tensors and their sizes."""
        ...

    def read(self, rank: "Rank", buffer: int, bucket: int, kind: str, start: int, stop: int) -> np.ndarray:
        """Returns elements of a bucket."""
        ...


@dataclass(frozen=True)
class Rank:
    """A model-parallel rank of one of the optimizers."""

    optimizer: int
    number: int


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a tensor is."""

    rank: Rank
    buffer: int
    bucket: int
    start: int


@dataclass(frozen=True)
class Degrees:
    """The parallel degrees of the run that saved."""

    tensor: int
    expert: int
    layers: Sequence[Sequence[range]]
    """The layers of each pipeline stage's chunks."""

    @classmethod
    def of(cls, arguments: Mapping[str, Any], num_layers: int, source: str) -> "Degrees":
        """Reads Megatron's arguments.

        Raises:
          UserError: experts or the embedding are divided in a way that is not rebuilt, or the stages do not hold the
            layers.
        """
        tensor, expert = (int(arguments.get(f"{kind}_model_parallel_size") or 1) for kind in ("tensor", "expert"))
        # Each of the two changes which tensors a rank has, or their order.
        if arguments.get(_STANDALONE) or (
            expert > 1 and arguments.get("expert_tensor_parallel_size") not in (None, tensor)
        ):
            name = _STANDALONE if arguments.get(_STANDALONE) else "expert_tensor_parallel_size"
            raise UserError(f"{source} was saved with {name}, with which the buffers' layout is not rebuilt")
        return cls(tensor, expert, stage_layers(arguments, num_layers, source))


class BufferStates:
    """Adam's state in buffers, as tensors in shards of the tensor-parallel ranks."""

    dtype = "float32"

    def __init__(
        self,
        buffers: Buffers,
        kind: str,
        shapes: Mapping[str, tuple[int, ...]],
        degrees: Degrees,
        arguments: Mapping[str, Any],
        copy: str | None = None,
    ) -> None:
        """Rebuilds the layout.

        Args:
          buffers: to read.
          kind: param, exp_avg or exp_avg_sq.
          shapes: of each rank's tensors, by Megatron's names.
          degrees: of the run that saved.
          arguments: Megatron's.
          copy: name of the last stage's copy of the embedding, if it has one.

        Raises:
          UserError: the buffers' sizes are not those of the layout.
        """
        self.shapes, self.ranks, self.kind, self._buffers = shapes, degrees.tensor, kind, buffers
        ordered = sorted((name for name in shapes if not name.endswith(BIAS)), key=lambda n: _order(n, arguments))
        self.places: dict[tuple[str, int], Place] = {}
        has_expert_buffers = degrees.expert > 1 and any(number_of(name) is not None for name in shapes)
        stages = len(degrees.layers)
        for stage in range(stages):
            for tensor in range(degrees.tensor):
                rank = Rank(DENSE, tensor + degrees.tensor * stage)
                # Without expert parallelism experts are parameters like any other, in the same buffers.
                names = [n for n in ordered if number_of(n) is None or not has_expert_buffers]
                self._place(rank, tensor, stage, names, degrees, copy)
                for expert in range(degrees.expert if has_expert_buffers else 0):
                    rank = Rank(EXPERT, tensor + degrees.tensor * (expert + degrees.expert * stage))
                    self._place(rank, tensor, stage, _of_rank(ordered, expert, degrees.expert), degrees, None)

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns a tensor-parallel rank's shard; zeros for a router's biases, which are not trained by Adam."""
        shape = self.shapes[name]
        location = self.places.get((name, rank))
        if location is None:
            return np.zeros(shape, np.float32)
        start, stop = location.start, location.start + math.prod(shape)
        return self._buffers.read(location.rank, location.buffer, location.bucket, self.kind, start, stop).reshape(
            shape
        )

    def _place(
        self, rank: Rank, tensor: int, stage: int, names: Sequence[str], degrees: Degrees, copy: str | None
    ) -> None:
        chunks = degrees.layers[stage]
        buffer = 0
        for chunk, layers in enumerate(chunks):
            is_first = stage == 0 and chunk == 0
            is_last = stage == len(degrees.layers) - 1 and chunk == len(chunks) - 1
            sizes = {n: math.prod(self.shapes[n]) for n in names if _is_in(n, layers, is_first, is_last)}
            # The copy takes room in the last stage's buffer, in front of all else.
            if copy is not None and is_last and not is_first:
                sizes[COPY] = math.prod(self.shapes[copy])
            # A chunk without layers has no buffer, and the next one takes its number.
            if not sizes:
                continue
            found = ranges_of(sizes, self._buffers.sizes(rank, buffer, sizes), f"rank {rank.number}")
            for name, (bucket, start) in found.items():
                self.places[name, tensor] = Place(rank, buffer, bucket, start)
            buffer += 1


COPY = "copy of the embedding"
"""Stands for the last stage's copy, whose state is that of the first stage's embedding."""


def _is_in(name: str, layers: range, is_first: bool, is_last: bool) -> bool:
    if match := _LAYER.match(name):
        return int(match[1]) in layers
    return is_first if name.startswith("embedding.") else is_last


def _of_rank(names: Sequence[str], rank: int, ranks: int) -> list[str]:
    """Returns the names of an expert-parallel rank's experts."""
    experts = {number for name in names if (number := number_of(name)) is not None}
    each = (max(experts, default=-1) + 1) // ranks
    return [name for name in names if (number := number_of(name)) is not None and number // max(each, 1) == rank]


def _order(name: str, arguments: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a key that sorts tensors in the order in which a model's modules create them."""
    match = _LAYER.match(name)
    if match is None:
        parts = ("embedding.word", "embedding.position", "decoder.", "output_layer")
        part = next(i for i, part in enumerate(parts) if name.startswith(part))
        return (0 if name.startswith("embedding.") else 2, part, name.endswith("bias"))
    module = next((i for i, module in enumerate(_MODULES) if match[2].startswith(module)), len(_MODULES))
    if arguments.get("transformer_impl") == LOCAL.transformer_impl and match[2].startswith(_ATTENTION_NORM):
        module = -1  # a module of its own, before attention
    experts: tuple[Any, ...] = ()
    if (number := number_of(name)) is not None:
        matrix = with_number(name, 0)
        experts = (matrix, number) if arguments.get("moe_grouped_gemm") else (number, matrix)
    return (1, int(match[1]), module, *experts, name.endswith("bias"))


def ranges_of(tensors: Mapping[str, int], sizes: Sequence[int], where: str) -> dict[str, tuple[int, int]]:
    """Returns the bucket and the start in it of each tensor, the last one first.

    Raises:
      UserError: buckets of these sizes do not hold them.
    """
    found: dict[str, tuple[int, int]] = {}
    bucket = at = 0
    for name in list(tensors)[::-1]:
        start = aligned(at)
        # A bucket ends with a tensor, or with the padding before a copied embedding, which has a bucket of its own.
        if at and bucket < len(sizes) and sizes[bucket] in (at, start):
            bucket, start = bucket + 1, 0
        at = start + tensors[name]
        if bucket >= len(sizes) or at > sizes[bucket]:
            break
        found[name] = bucket, start
    # Every bucket must be filled exactly: one number too many means that the order or the alignment is another.
    if len(found) < len(tensors) or bucket != len(sizes) - 1 or at != sizes[bucket]:
        raise UserError(
            f"the optimizer's buffers of {where} have {', '.join(map(str, sizes))} numbers, and its "
            f"{len(tensors)} tensors do not fit these: {SAVE_AGAIN}"
        )
    return found


def bucket_sizes(tensors: Mapping[str, int], least: int | None, shared: frozenset[str]) -> list[int]:
    """Returns the elements of each bucket, of which each but the last has `least` or more; None for one bucket."""
    sizes: list[int] = []
    at = 0
    for name in list(tensors)[::-1]:
        start = aligned(at)
        # Megatron gives a shared embedding a bucket of its own, so that both stages shard its state alike
        # (`_does_param_require_new_bucket`).
        if name in shared and at:
            sizes.append(start)
            start = 0
        at = start + tensors[name]
        if (least is not None and at >= least) or name in shared:
            sizes.append(at)
            at = 0
    return [*sizes, at] if at else sizes


def aligned(at: int) -> int:
    """Returns the next multiple at which a tensor may begin."""
    return -(-at // ALIGNMENT) * ALIGNMENT
