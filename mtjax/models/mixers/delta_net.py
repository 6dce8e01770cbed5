"""The gated delta net (arXiv 2412.06464; Qwen3-Next): linear attention that replaces what its state holds at a key.

Letters of shapes: b samples, s tokens, u groups of heads that share a query and a key, h heads of a group, p width of a
head's value, n width of a key. As in Mamba-2, ranks may share a group, and each computes its queries and keys.
"""

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.ssm import delta_chunks_at_once, ssm_chunk, ssm_heads
from mtjax.layout.weights import delta_weights
from mtjax.models.kernels.delta_rule import DeltaInputs, delta_passage, delta_scan, delta_step
from mtjax.models.layer_context import LayerContext, MixerState
from mtjax.models.mixers.recurrent import RecurrentMixer
from mtjax.models.ops import constant
from mtjax.sharding.axes import num_shards

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.recurrent_state import RecurrentState

EPSILON = 1e-6
"""Added to the squared length of a query or key."""


class GatedDeltaNet(RecurrentMixer):
    """One product for gate, value, query, key, beta and decay; a convolution; the delta rule; a norm of each head, the
    gate; a row-parallel product."""

    scope: ClassVar[str] = "delta"
    init_number: ClassVar[int] = 4
    dropout_site: ClassVar[int] = 13
    shared_taps: ClassVar[str] = "conv_query_key"

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters: those of every recurrent mixer."""
        sizes = delta_weights(model)
        super().__init__(model, sizes, output_std=output_std, key=key)
        self.norm_scale = constant(1.0, sizes["norm_scale"])

    def recur(
        self, mixed: Float[Array, "b s u channels"], rates: list[Array], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "b s u h p"], MixerState]:
        """See `RecurrentMixer.recur`; before the rate is beta."""
        beta, rate = rates
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        # The logarithm: products of decays become sums.
        decay = self.rate_of(rate) * self.negative_a(mixed)
        if state is not None:
            assert context.cache_positions is not None
            return self._continue(mixed, decay, beta, context.cache_positions, state)
        if context.positions is not None:
            return self._scan_pieces(mixed, decay, beta, context), state
        inputs = self._inputs_of(self.convolve(mixed, None, context.segment_ids), decay, beta)
        return self._scan(inputs._replace(segments=context.segment_ids))[0], state

    def _inputs_of(self, convolved: Array, decay: Array, beta: Array) -> DeltaInputs:
        """Takes apart what was convolved, and normalizes queries and keys to length 1; queries are scaled."""
        value, query, key = self.split_convolved(convolved)
        query, key = _unit(query, self.model.ssm_state**-0.5), _unit(key, 1.0)
        return DeltaInputs(query, key, value, decay, beta)

    def _scan(self, inputs: DeltaInputs, state: Array | None = None) -> tuple[Array, Array]:
        with jax.named_scope("scan"):
            return delta_scan(inputs, ssm_chunk(self.model), self._chunks_at_once(inputs), state)

    def _scan_pieces(self, mixed: Array, decay: Array, beta: Array, context: LayerContext) -> Array:
        """Scans a rank's two pieces of each sample (context parallelism): ranks send each other the convolution's last
        inputs, and what their pieces do to a state that comes in."""
        from mtjax.sharding.context.states import states_before

        pieces, convolved, segments, before, _ = self.convolve_pieces(mixed, context)
        inputs = self._inputs_of(convolved, pieces.split(decay), pieces.split(beta))._replace(segments=segments)
        with jax.named_scope("scan"):
            # A piece does not know what comes in before all earlier pieces are done: so it computes what it does to any
            # state, and the state itself is passed on by a small matrix product for each piece.
            passage = delta_passage(inputs, ssm_chunk(self.model), self._chunks_at_once(inputs), before)
            return pieces.join(passage.read(states_before(pieces, passage.leaves, mixed.dtype)))

    def _chunks_at_once(self, inputs: DeltaInputs) -> int:
        return delta_chunks_at_once(self.model, inputs.value.shape[0], ssm_heads(self.model) // num_shards("heads"))

    def _continue(
        self, mixed: Array, decay: Array, beta: Array, positions: "CachePositions", state: "RecurrentState"
    ) -> tuple[Array, "RecurrentState"]:
        """Reads a token of each sequence, or a chunk of one."""
        # With decay and beta 0 a token leaves the state as it is.
        is_new = state.is_new(positions)[..., None, None]
        taps, before = state.read_by(positions)
        convolved = self.convolve(mixed, taps, None)
        inputs = self._inputs_of(convolved, jnp.where(is_new, decay, 0), jnp.where(is_new, beta, 0))
        y, after = delta_step(inputs, before) if positions.sequence is None else self._scan(inputs, before)
        return y, state.replaced(taps, mixed, after, positions)

    def gated_norm(self, y: Float[Array, "b s u h p"], gate: Array) -> Array:
        """Computes the RMS norm of each head, and multiplies it by silu(gate)."""
        wide = y.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.model.norm_epsilon)
        return (normal * self.norm_scale[...] * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _unit(x: Array, length: float) -> Array:
    """Scales vectors to a length, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * (length * lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + EPSILON))).astype(x.dtype)
