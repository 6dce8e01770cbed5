"""What a layer's attention does with its scores, for every kernel."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

if TYPE_CHECKING:
    from mtjax.models.alibi import Alibi


@dataclass(frozen=True)
class AttentionOptions:
    """Settings of a layer's attention; by default, that of GPT-2 without dropout."""

    rate: float = 0.0
    """Of the dropout on probabilities."""
    scale: float | None = None
    """Of the scores; head_dim^-0.5 when None."""
    softcap: float | None = None
    """When given, a score s is replaced by softcap * tanh(s / softcap), before bias and mask."""
    sinks: Float[Array, " heads"] | None = None
    """When given, a logit per head that is added to the softmax's denominator."""
    window: int | Int[Array, ""] | None = None
    """When given, a token attends to itself and the window - 1 tokens before it, and as many after it unless causal."""
    windows: tuple[int, ...] = ()
    """Where the layer's number selects the window, those of all layers: one length, and others longer than a sample."""
    alibi: "Alibi | None" = None
    """When given, its biases are added to the scores."""

    largest_scores: Float[Array, " heads"] | None = None
    """When given, zeros whose gradient is each head's largest score that the mask shows, before cap and bias."""

    @property
    def adjusts_scores(self) -> bool:
        """Whether scores are more than scaled products before they are masked."""
        return any(setting is not None for setting in (self.softcap, self.alibi, self.largest_scores))

    def scale_of(self, width: int) -> float:
        """Returns the factor of the scores of heads of this width."""
        return width**-0.5 if self.scale is None else self.scale

    def cap(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Caps scores, where there is a cap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def in_layer(self, windows: tuple[int, ...] | None, layer: Int[Array, ""] | int | None) -> "AttentionOptions":
        """Returns the options of a layer, by its number, where `windows` are those of all layers; None for none."""
        if windows is None:
            return self
        from mtjax.models.of_layer import of_layer

        return replace(self, window=of_layer(windows, layer), windows=windows)
