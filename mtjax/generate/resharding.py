"""Trained parameters on the mesh that writes: layer after layer, so that there is never a second copy in float32."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from mtjax.generate.inference_weights import Call, Stacks, layer_locations
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import dimension_axes, partition_spec
from mtjax.theory.layout import gathers_in_compute_dtype

Tree = Any


class LayerwiseTransfer:
    """A GPT's or Llama's parameters on their way from the mesh they were trained on to one of its devices, or of some.

    Matrices are in the compute type when they arrive. What each layer's programs send are its own parameters: a sum
    over the ranks that have different layers, and whatever the other mesh splits differently.
    """

    def __init__(self, trained: ShardedModel, placed: ShardedModel, call: Call) -> None:
        self._trained, self._placed, self._call = trained, placed, call

    def of(self, parameters: Tree) -> tuple[Any, Stacks]:
        """The model without its layers, and these in their order, each as a stack of its own.

        Args:
          parameters: as they are stored; abstract ones stay abstract.
        """
        model, places = layer_locations(self._trained.model(parameters))
        movers = {id(stack): self._transfer(stack, _layer_at) for stack, _ in places}
        layers = ((self._move(movers[id(stack)], stack, np.int32(place)), 0) for stack, place in places)
        return self._move(self._transfer(model, lambda leaf, _: leaf), model), layers

    def _move(self, move: "Transfer", module: Any, place: Any = None) -> Any:
        leaves, structure = jax.tree.flatten(module)
        moved = self._trained.on_mesh(self._call, move.program, leaves, place)
        return jax.tree.unflatten(structure, move.put(moved))

    def _transfer(self, module: Any, select: Any) -> "Transfer":
        """What puts `part` of each leaf of a module where the other mesh has it."""
        variables = jax.tree.leaves(module, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        names = [variable.get_metadata()["axes"] for variable in variables]
        dtype, placed = self._placed.config.training.compute_dtype, self._placed

        def move(leaves: list[Array], place: Array | None) -> list[Array]:
            parts = [select(leaf, place) for leaf in leaves]
            pairs = zip(parts, names, strict=True)
            return [array.astype(dtype) if gathers_in_compute_dtype(own) else array for array, own in pairs]

        def sharding(variable: Any, own: tuple[str, ...]) -> NamedSharding:
            whole = (None,) * (len(variable.shape) - len(own)) + tuple(own)
            return NamedSharding(placed.mesh, partition_spec(placed.layout.rules, whole))

        shardings = [sharding(*pair) for pair in zip(variables, names, strict=True)]
        if placed.mesh.size == self._trained.mesh.size:
            return Transfer(jax.jit(move, out_shardings=shardings), None)
        return Transfer(jax.jit(move, out_shardings=NamedSharding(self._trained.mesh, PartitionSpec())), shardings)


@dataclass(frozen=True)
class Transfer:
    """How parts of a module come to another mesh."""

    program: Any
    """Its results lie there already; or are whole on every device, where the other mesh has fewer of them."""
    shardings: list[NamedSharding] | None
    """Those of the other mesh, in the latter case."""

    def put(self, arrays: list[Any]) -> list[Any]:
        """The program's results on the other mesh; abstract ones too."""
        if self.shardings is None:
            return arrays
        pairs = zip(arrays, self.shardings, strict=True)
        return [
            jax.device_put(a, own) if isinstance(a, Array) else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=own)
            for a, own in pairs
        ]


def _layer_at(stack: Array, place: Array) -> Array:
    """One layer of a stack, [1, ...], on every rank: those that have others add zeros."""
    sharding = jax.typeof(stack).sharding
    first, *rest = sharding.spec
    ways = math.prod(sharding.mesh.shape[axis] for axis in dimension_axes(sharding.spec, 0))
    shares = stack.reshape(ways, -1, *stack.shape[1:], out_sharding=PartitionSpec(first, None, *rest))
    each = shares.shape[1]
    own = lax.dynamic_index_in_dim(shares, place % each, axis=1)
    if ways == 1:
        return own[0]
    is_held = (jnp.arange(ways) == place // each).reshape(-1, *(1,) * (own.ndim - 1))
    return jnp.where(is_held, own, 0).sum(0)
