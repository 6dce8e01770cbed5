"""Scales and zero points of a Hugging Face folder's quantized matrices, read like the matrices themselves."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Literal

import numpy as np

from mtjax.config.storage import PLAIN, Storage
from mtjax.convert.finite import NotFinite
from mtjax.convert.named import NamedWeights
from mtjax.convert.parameters import Parameter
from mtjax.convert.stream import Origin, unpadded_vocab_size
from mtjax.convert.table import name_of
from mtjax.errors import UserError


class GridSource:
    """A source whose parameters are the scales or zero points of a folder's, each as often as it is used."""

    def __init__(self, weights: NamedWeights, kind: Literal["scales", "zeros"], origin: Origin) -> None:
        # What is not finite here makes weights that are not, which are counted as those are read.
        self.origin = replace(origin, not_finite=NotFinite())
        # The tensors' shapes are those of the weights, so that the same table assembles them.
        grids = _Grids(weights.shards, kind)
        rows = unpadded_vocab_size(weights.config.model)
        self._weights = NamedWeights(weights.selection, grids, weights.config, rows, weights.source)
        self.parameters = {parameter.name: parameter for parameter, _ in weights.selection.rows}

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer; 1 where it is not quantized."""
        return self._weights.slices(parameter)


class _Grids:
    """See `named.Shards`."""

    ranks = 1
    dtype = "float32"

    def __init__(self, tensors: Any, kind: Literal["scales", "zeros"]) -> None:
        self._tensors, self._kind, self.shapes = tensors, kind, tensors.shapes

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Returns scales or zero points in the shape of the tensor; `rank` is 0."""
        grid = self._tensors.grid(name)
        return np.ones(self.shapes[name], np.float32) if grid is None else getattr(grid, self._kind)


def kept_grids(weights: NamedWeights, storage: Storage, origin: Origin) -> list[GridSource]:
    """Returns the sources of scales and zero points, if the folder's matrices are quantized as `storage` says.

    Raises:
      UserError: matrices are quantized in another way, or only some of them are.
    """
    tensors: Any = weights.shards
    found = {}
    for parameter, layer, tensor in weights.selection.tensors():
        if layer is not None and parameter.is_layer_matrix:
            name = name_of(tensor, layer)
            stored = tensors.stored(name)
            # One example of each kind for the message.
            found.setdefault("floats" if stored is None else stored.settings or "another type", name)
    # Only what says how matrices are stored is compared.
    storage = replace(storage, cache_dtype=None)
    if list(found) == ["floats"]:
        return []
    if list(found) != [storage]:
        kinds = "; ".join(f"{name} {_options(kind)}" for kind, name in found.items())
        raise UserError(
            f"{weights.source} has quantized weights, which {_options(storage)} would round again ({kinds}): remove "
            "--weights-dtype, or give the same options"
        )
    kinds = ("scales", "zeros") if storage.weights_zero_point else ("scales",)
    return [GridSource(weights, kind, origin) for kind in kinds]


def _options(kind: Any) -> str:
    if not isinstance(kind, Storage):
        return f"in {kind}"
    given = {name: value for name, value in asdict(kind).items() if value != getattr(PLAIN, name)}
    words = [f"--{n.replace('_', '-')}" + ("" if value is True else f" {value}") for n, value in given.items()]
    return " ".join(words)
