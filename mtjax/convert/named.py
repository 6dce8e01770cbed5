"""Weights of another format, assembled to mtjax's parameters by the format's table."""

import zlib
from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from mtjax.config import Config
from mtjax.convert.check import check_complete
from mtjax.convert.finite import NotFinite, are_equal
from mtjax.convert.parameters import Parameter
from mtjax.convert.safetensors_files import DTYPES
from mtjax.convert.stream import unpadded_vocab_size
from mtjax.convert.table import VOCAB, Selection, Tensor, name_of, with_vocab
from mtjax.errors import UserError
from mtjax.models.routers import ROUTER_BIAS


class Shards(Protocol):
    """Tensors by name, each in as many shards as there are tensor-parallel ranks."""

    ranks: int
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of one rank's shards."""

    @property
    def dtype(self) -> str:
        """The dtype that represents every weight exactly."""
        ...

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns a rank's shard of a tensor, or all of a tensor that is replicated."""
        ...


class NamedWeights:
    """mtjax's parameters, read from another format's tensors.

    The constructor checks the names and shapes of all tensors against the table.

    Raises:
      UserError: tensors are missing, unexpected or of another shape (lists all of them).
    """

    def __init__(self, selection: Selection, shards: Shards, config: Config, vocab_rows: int, source: str) -> None:
        self.selection, self.shards, self.config, self.vocab_rows = selection, shards, config, vocab_rows
        self.source, self.not_finite = source, NotFinite(source)
        expected = local_shapes(selection, vocab_rows, shards.ranks)
        self.fresh = check_complete(selection, expected, shards.shapes, source)
        self._check_copies()

    @property
    def fresh_modules(self) -> list[str]:
        """Modules of mtjax that the source does not have."""
        modules = self.selection.table.optional
        return [m for m in modules if any(name.startswith(f"{m}.") for name in self.fresh)]

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, in the source's dtype; initializes it if the source does not have it."""
        for layer in parameter.layers:
            if parameter.name in self.fresh:
                yield fresh_slice(parameter, layer, self.config)
            else:
                yield self._slice(parameter, layer)

    def _slice(self, parameter: Parameter, layer: int | None) -> np.ndarray:
        """Assembles one layer's slice of a parameter from the shards of its tensors."""
        sizes = parameter.sizes
        if VOCAB in sizes:
            sizes[VOCAB] = self.vocab_rows
        # Routers' biases accumulate small updates, and are float32 even if the weights are 16-bit.
        dtype = np.float32 if parameter.name.endswith(ROUTER_BIAS) else DTYPES[self.shards.dtype]
        slice_ = np.empty(tuple(sizes.values()), dtype)
        tensors = self.selection.tensors_of(parameter, layer)
        # The file has no tensor for this layer, in which the parameter has no effect (`Tensor.first`).
        if not tensors:
            return fresh_slice(parameter, layer, self.config).astype(dtype)
        for tensor in tensors:
            self._read(tensor, name_of(tensor, layer), slice_, parameter)
        return with_vocab(slice_, parameter, unpadded_vocab_size(self.config.model))

    def _read(self, tensor: Tensor, name: str, into: np.ndarray, parameter: Parameter) -> None:
        """Reads all ranks' shards of a tensor into one layer's slice of a parameter.

        Raises:
          UserError: a replicated tensor differs between ranks.
        """
        # Replicated tensors (norms, biases of row-parallel layers) must be equal on all ranks; sharded ones are read
        # rank by rank.
        first = self.shards.shard(name, 0)
        if tensor.split is None:
            self.not_finite.add(name, [first])
            tensor.insert(tensor.view(first, parameter), into, parameter)
            for rank in range(1, self.shards.ranks):
                if not are_equal(first, self.shards.shard(name, rank)):
                    raise UserError(f"{self.source}: {name} must be replicated, but ranks 0 and {rank} differ")
            return
        shards = [first, *(self.shards.shard(name, rank) for rank in range(1, self.shards.ranks))]
        self.not_finite.add(name, shards)
        for rank, shard in enumerate(shards):
            tensor.insert(tensor.view(shard, parameter), into, parameter, (rank, self.shards.ranks))

    def _check_copies(self) -> None:
        """Checks that tensors that are copies of others are equal to them.

        Raises:
          UserError: one differs, so the two are not tied.
        """
        for copy, name in self.selection.table.copies.items():
            present = copy in self.shards.shapes and name in self.shards.shapes
            # An untied output is a tensor of its own that has the copy's name.
            if not present or any(name_of(t, layer) == copy for _, layer, t in self.selection.tensors()):
                continue
            for rank in range(self.shards.ranks):
                if not are_equal(self.shards.shard(copy, rank), self.shards.shard(name, rank)):
                    why = "" if copy in self.selection.table.duplicates else " (tie_embeddings)"
                    raise UserError(f"{self.source}: {copy} differs from {name}, but the model ties them{why}")


def local_shapes(selection: Selection, vocab_rows: int, ranks: int) -> dict[str, tuple[int, ...]]:
    """Returns the name -> the shape of every tensor's shard on one of `ranks` tensor-parallel ranks.

    Raises:
      UserError: the degree does not divide a dimension.
    """
    shapes = {}
    for parameter, layer, tensor in selection.tensors():
        sizes = parameter.sizes | {VOCAB: vocab_rows}
        for axis in set(sizes) & {tensor.split}:
            if sizes[axis] % ranks:
                raise UserError(f"tensor parallel degree {ranks} does not divide {axis} {sizes[axis]}")
            sizes[axis] //= ranks
        shapes[name_of(tensor, layer)] = tensor.shape(sizes)
    return shapes


def fresh_slice(parameter: Parameter, layer: int | None, config: Config) -> np.ndarray:
    """Initializes a slice that the source does not have: normal weights, scales of 1, biases of 0; deterministic."""
    kind = parameter.name.rpartition(".")[2]
    sizes = parameter.sizes
    if VOCAB in sizes:
        sizes[VOCAB] = unpadded_vocab_size(config.model)
    shape = tuple(sizes.values())
    if kind in ("bias", "scale"):
        return np.full(shape, float(kind == "scale"), np.float32)
    # Seeded by name and layer, so that a repeated conversion gives the same weights.
    random = np.random.default_rng([zlib.crc32(parameter.name.encode()), layer or 0])
    return (config.model.init_std * random.standard_normal(shape)).astype(np.float32)
