"""The interface of a mixer, a sublayer such as attention or the MLP, and its inputs other than the hidden states."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jax import Array
from jaxtyping import Float, Int, Key

from mtjax.config import Model
from mtjax.layout.attention_kernel import ContextMethod
from mtjax.layout.plan import ExpertDispatch

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.rotary import Rotation, Rotations
    from mtjax.models.routers import Padding
    from mtjax.models.shared_inputs import SharedInputs


RESIDUAL = ("batch", "act_seq", "act_embed")
"""Logical names of the dimensions of hidden states (the residual stream)."""
Residual = Float[Array, "batch act_seq embed"]
"""Hidden states, [batch, act_seq, embed]; `embed` is `act_embed` with 2D tensor parallelism."""

PADDING_MASK, TEXT_LENGTH = "padding_mask", "text_length"
"""Arrays of a batch: 1 on text and 0 on padding, [batch, seq]; and the number of text tokens per sample, [batch]."""


# One type for all kinds of layers, so that a stack passes it on without knowing which mixer reads what.
@dataclass(frozen=True)
class LayerContext:
    """Inputs of every layer other than the hidden states; all of them are optional."""

    dropout_keys: Key[Array, " batch"] | None = None
    """One per sample; None turns dropout off. A layer's mixers get keys derived from the stack's keys and the layer's
    number."""
    segment_ids: Int[Array, "batch seq"] | None = None
    """When given, tokens attend within their segment only; padding is a separate segment."""
    layer: Int[Array, ""] | int | None = None
    """The layer's number in the model, by which settings that differ between layers are selected."""
    rotation: "Rotation | Rotations | None" = None
    """When given, queries and keys are rotated by it, or by that of the layer."""
    query_scale: Float[Array, "#batch seq"] | None = None
    """When given, factors of the queries, by position."""
    is_causal: bool = True
    """Whether tokens attend only to themselves and those before them."""
    bias: Float[Array, "#batch heads seq key_seq"] | None = None
    """When given, added to the scores of self-attention."""
    encoded: Float[Array, "batch act_seq embed"] | None = None
    """The encoder's hidden states, which cross-attention reads."""
    encoded_mask: Int[Array, "batch key_seq"] | None = None
    """1 on tokens that cross-attention reads, 0 on padding; None when there is no padding."""
    retro_normed: Float[Array, "batch act_seq embed"] | None = None
    """Retro: normalized hidden states of the first layer with chunked cross-attention, which its encoder reads, too."""
    retro_reads: Int[Array, "batch seq"] | None = None
    """Retro: 1 on tokens that read neighbours, 0 on others; None where all do that have a chunk before them."""
    shared: "SharedInputs | None" = None
    """Blocks that several layers share, and the embeddings that they read."""
    positions: Int[Array, " seq"] | None = None
    """Positions of this rank's tokens in their sample, with context parallelism; None where a rank has all of it."""
    context_method: ContextMethod = "ring"
    """How context parallelism sends keys and values to the queries of other ranks."""
    expert_dispatch: ExpertDispatch = "all-gather"
    """How expert parallelism sends tokens to the experts of other ranks."""
    padding: "Padding | None" = None
    """Which tokens are padding, which routers neither count nor send to experts; None where all are text."""
    cache_positions: "CachePositions | None" = None
    """Positions of the tokens in sequences whose earlier tokens are in a KV cache, the layers' state; None without
    one."""


MixerState = Any
"""A tree of arrays that a mixer reads or returns besides hidden states: a KV cache in generation, a router's report in
training; else None."""


# A protocol, not a base class: attributes and parameters of a mixer are its own, and so are their names in checkpoints.
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
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Computes the output, which is added to the residual stream, and the state for the layer's next call."""
        ...
