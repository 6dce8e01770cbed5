"""The interface of a mixer: a sublayer such as attention or the MLP."""

from typing import Any, ClassVar, Protocol

from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.layer_context import LayerContext

State = Any
"""A tree of arrays that a mixer reads and returns in addition to hidden states, such as a KV cache; None where there is
none, as in training."""


class Mixer(Protocol):
    """A sublayer. Its name in `MIXERS` is the name of its parameters, NAME, and of its norm's, NAME_norm."""

    scope: ClassVar[str]
    """Named scope of its operations in profiles and compiled programs."""
    init_number: ClassVar[int]
    """Folded into the layer's key for the mixer's initial parameters; mixers with the same number share random bits."""
    dropout_site: ClassVar[int]
    """Site, within the layer, of the dropout on its output. Dropouts inside a mixer have sites too; all sites of a
    layer differ."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters; `output_std` is the standard deviation of those just before the residual stream."""

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: State
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Computes the output, which is added to the residual stream, and the state for the layer's next call."""
        ...
