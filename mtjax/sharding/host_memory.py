"""Arrays in the pinned memory of a device's host."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
PINNED = "pinned_host"
"""jax's name of the memory."""


class AbsentHost(NamedSharding):
    """A sharding in the host memory of devices that are compiled for without being there."""

    # Such devices name no memories, and jax 0.10.2 drops a memory that a device does not have without an error.
    @property
    def memory_kind(self) -> str:
        """The host's memory."""
        return PINNED

    def __hash__(self) -> int:
        return hash((self.mesh, self.spec, PINNED))

    def __eq__(self, other: object) -> bool:
        # jax caches by it, and the same sharding on the device is another one.
        return isinstance(other, AbsentHost) and (self.mesh, self.spec) == (other.mesh, other.spec)


def is_on_host(array: Any) -> bool:
    """Returns whether an array, or an abstract one, is in the host's memory."""
    return getattr(array.sharding, "memory_kind", None) == PINNED


def is_traced_on_host(array: Any) -> bool:
    """Returns whether a traced array is in the host's memory."""
    return jax.typeof(array).memory_space == HOST


def on_device(tree: Any) -> Any:
    """Copies traced arrays of the host's memory to the device; others are returned as they are."""
    return jax.tree.map(lambda a: jax.device_put(a, DEVICE) if is_traced_on_host(a) else a, tree)


def copied_to_device(tree: Any) -> Any:
    """Copies arrays of the host's memory to the device; others are returned as they are."""
    # A sharding that names no memory is in the device's.
    sharding = lambda a: NamedSharding(a.sharding.mesh, a.sharding.spec)  # noqa: E731
    return jax.tree.map(lambda a: jax.device_put(a, sharding(a)) if is_on_host(a) else a, tree)


def by_memory(function: Callable[[Any, tuple[Any, ...]], Any], tree: Any, values: tuple[Any, ...]) -> Any:
    """Applies a compiled function to a tree of arrays; if some are in the host's memory, to one array at a time.

    Args:
      function: (tree, a value of each leaf) -> a tree alike.
      tree: arrays.
      values: of the leaves.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not any(map(is_on_host, leaves)):
        return function(tree, values)
    # Together they might not fit into the device's memory.
    return structure.unflatten([function(leaf, (value,)) for leaf, value in zip(leaves, values, strict=True)])
