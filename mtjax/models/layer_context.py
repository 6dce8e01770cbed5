"""The residual stream, and what every layer of a stack reads besides it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array
from jaxtyping import Bool, Float, Int, Key

from mtjax.config import Model
from mtjax.models.kv_cache import CachePositions
from mtjax.models.rotary import Rotation
from mtjax.sharding.context.ring_attention import Method
from mtjax.theory.plan import ExpertDispatch

RESIDUAL = ("batch", "act_seq", "embed")
"""Logical names of the residual stream's dimensions."""


PADDING_MASK, TEXT_LENGTH = "padding_mask", "text_length"
"""Arrays of a batch: 1 on text and 0 on padding, [batch, seq]; and the tokens of each sample that are text, [batch]."""


class Padding(NamedTuple):
    """Where samples have text, and how much of it."""

    is_text: Bool[Array, "batch seq"]
    length: Int[Array, " batch"]
    """Tokens of each sample that are text; where ranks share a sample, of all of it."""

    @classmethod
    def of(cls, batch: Mapping[str, Array]) -> "Padding | None":
        """The padding of a batch; None unless `with_text_lengths` has counted its text."""
        if TEXT_LENGTH not in batch:
            return None
        return cls(batch[PADDING_MASK] > 0, batch[TEXT_LENGTH])


def with_text_lengths(model: Model, batch: Mapping[str, Array]) -> dict[str, Array]:
    """The batch, with the text lengths of its samples if it has a padding mask and the model routers that need them.

    Call it outside the manual region: there a sample is still one row, whichever ranks share its tokens, and the sum
    takes one small reduction per step instead of one per layer.
    """
    if not model.num_experts or PADDING_MASK not in batch:
        return dict(batch)
    return {**batch, TEXT_LENGTH: batch[PADDING_MASK].sum(1)}


@dataclass(frozen=True)
class LayerContext:
    """What every layer reads besides the residual stream; each field may be left out."""

    dropout_keys: Key[Array, " batch"] | None = None
    """One per sample; None turns dropout off. A layer's mixers get the layer's own keys, derived from the stack's keys
    and the layer's number."""
    segment_ids: Int[Array, "batch seq"] | None = None
    """When given, tokens attend within their own segment only; padding is a segment of its own."""
    rotation: Rotation | None = None
    """When given, queries and keys are rotated by it."""
    is_causal: bool = True
    """Tokens attend to those before them only."""
    bias: Float[Array, "#batch heads seq key_seq"] | None = None
    """When given, added to the scores of self-attention."""
    scale: float | None = None
    """Of the scores; head_dim^-0.5 when None."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """What cross-attention reads."""
    encoded_mask: Int[Array, "batch key_seq"] | None = None
    """1 where cross-attention may look, 0 on padding; None lets it see everything."""
    positions: Int[Array, " seq"] | None = None
    """Where this rank's tokens stand in their sample, when ranks share it; None where a rank has all of it."""
    context_method: Method = "ring"
    """How keys and values come to the queries of other ranks then."""
    expert_dispatch: ExpertDispatch = "all-gather"
    """How tokens come to the experts of other ranks."""
    padding: Padding | None = None
    """Which tokens are padding, which routers neither count nor send to experts; None where all are text."""
    cache_positions: CachePositions | None = None
    """Where the tokens stand in sequences whose earlier tokens a cache, the layers' state, holds; None without one."""
