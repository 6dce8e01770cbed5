"""Reshards trained parameters for generation, layer by layer, so that there is never a second float32 copy of all."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding

from mtjax.generate.inference_weights import Call, Stacks, layer_locations
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import REPLICATED, PartitionSpec, dimension_axes, partition_spec

Tree = Any


class LayerwiseTransfer:
    """Moves a GPT's or Llama's parameters from the training mesh to a mesh of the same devices, or of some of them.

    Matrices are converted to the compute dtype before they are sent. The program for a layer communicates that layer's
    parameters only: an all-reduce over the ranks that have different layers, and the resharding of its dimensions.
    """

    def __init__(self, trained: ShardedModel, sharded_model: ShardedModel, call: Call) -> None:
        self._trained, self._sharded_model, self._call = trained, sharded_model, call

    def of(self, parameters: Tree) -> tuple[Any, Stacks]:
        """Returns the model without its layers, and the layers in order, each as a stack of one.

        Args:
          parameters: as they are stored in training; abstract ones stay abstract.
        """
        model, locations = layer_locations(self._trained.model(parameters))
        # Keyed by identity: one program for each stack, in which the index of a layer is traced.
        transfers = {id(stack): self._transfer(stack, _layer_at) for stack, _ in locations}
        # A generator: a layer is moved when `prepare_weights` takes it, and its transferred copy freed before the next.
        layers = ((self._move(transfers[id(stack)], stack, np.int32(index)), 0) for stack, index in locations)
        return self._move(self._transfer(model, lambda leaf, _: leaf), model), layers

    def _move(self, transfer: "Resharding", module: Any, index: Any = None) -> Any:
        """Moves a module; `index` selects a layer of a stack."""
        leaves, structure = jax.tree.flatten(module)
        moved = self._trained.on_mesh(self._call, transfer.program, leaves, index)
        return jax.tree.unflatten(structure, transfer.put(moved))

    def _transfer(self, module: Any, select: Any) -> "Resharding":
        """Builds the transfer that applies `select` to each leaf of a module and reshards the result."""
        variables = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        names = [variable.get_metadata()["axes"] for variable in variables]
        dtype, sharded_model = self._sharded_model.config.training.compute_dtype, self._sharded_model

        def move(leaves: list[Array], index: Array | None) -> list[Array]:
            pairs = zip([select(leaf, index) for leaf in leaves], names, strict=True)
            # Norms and biases stay in float32, as in training.
            return [array.astype(dtype) if gathers_in_compute_dtype(axes) else array for array, axes in pairs]

        def sharding(variable: Any, axes: tuple[str, ...]) -> NamedSharding:
            all_axes = (None,) * (len(variable.shape) - len(axes)) + tuple(axes)  # the layer dimension has no name
            return NamedSharding(sharded_model.mesh, partition_spec(sharded_model.layout.rules, all_axes))

        shardings = [sharding(*pair) for pair in zip(variables, names, strict=True)]
        if sharded_model.mesh.size == self._trained.mesh.size:
            return Resharding(jax.jit(move, out_shardings=shardings), None)
        # XLA: a program's outputs are on all of its devices. For fewer devices they are replicated, and `put` reshards.
        return Resharding(jax.jit(move, out_shardings=NamedSharding(self._trained.mesh, REPLICATED)), shardings)


@dataclass(frozen=True)
class Resharding:
    """A program on the training mesh, and the shardings that its outputs are put on afterwards."""

    program: Any
    """Its outputs have their final sharding, or are replicated if the other mesh has fewer devices."""
    shardings: list[NamedSharding] | None
    """In the latter case, the final shardings on the other mesh."""

    def put(self, arrays: list[Any]) -> list[Any]:
        """Puts the program's outputs on the other mesh; abstract outputs get the final shardings."""
        if self.shardings is None:
            return arrays
        pairs = zip(arrays, self.shardings, strict=True)
        return [
            jax.device_put(a, to) if isinstance(a, Array) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=to)
            for a, to in pairs
        ]


def _layer_at(stack: Array, index: Array) -> Array:
    """Returns one layer of a stack [layers, ...], whose first dimension may be sharded, on every rank: [1, ...]."""
    sharding = jax.typeof(stack).sharding
    first, *dimensions = sharding.spec
    degree = math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, 0))
    # [ranks, layers of a rank, ...]: each rank indexes its own layers, without communication.
    shards = stack.reshape(degree, -1, *stack.shape[1:], out_sharding=PartitionSpec(first, None, *dimensions))
    layers = shards.shape[1]
    layer = lax.dynamic_index_in_dim(shards, index % layers, axis=1)
    if degree == 1:
        return layer[0]
    # A masked sum, which is an all-reduce in which the ranks that do not have the layer contribute zeros.
    is_owner = (jnp.arange(degree) == index // layers).reshape(-1, *(1,) * (layer.ndim - 1))
    return jnp.where(is_owner, layer, 0).sum(0)
