"""The state of training: what a step changes, and what a checkpoint holds."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mtjax.sharding.host_memory import copied_to_device

Tree = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "random", "parameters", "optimizer", "loss_scale"],
    meta_fields=[],
)
@dataclass(frozen=True)
class State:
    """All values that a step updates, and that a checkpoint must save."""

    step: Any
    """Number of steps done, int32."""
    random: Any
    """Key data from which dropout keys are derived."""
    parameters: Tree
    """Nested dicts of arrays, in the types of `ParamSpec.dtype`."""
    optimizer: Tree
    """optax state."""
    loss_scale: Any = None
    """Only for float16."""

    @property
    def weights(self) -> Tree:
        """The parameters on the devices, where evaluations read them."""
        # With `offload` parameters may be in the host's memory, and programs of evaluations read the device's alone.
        return copied_to_device(self.parameters)
