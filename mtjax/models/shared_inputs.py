"""What layers with shared blocks read (`mtjax.models.shared_block`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array
from jaxtyping import Float


@dataclass(frozen=True)
class SharedInputs:
    """What layers with shared blocks read, besides the hidden states."""

    blocks: tuple[Callable[..., Any], ...]
    """Each a `SharedBlock`."""
    embedded: Float[Array, "batch act_seq embed"]
    """Input of the first layer."""
    layer: Any = None
    """The `SharedLayer` that runs a block, with its adapters."""
