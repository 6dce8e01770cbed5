"""Mamba-2 (arXiv 2405.21060, section 7): a gated state-space layer, sharded by heads.

Letters of shapes: see `mtjax.models.mixers.recurrent`; the two vectors that a group shares are B and C.
"""

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.ssm import chunks_at_once, ssm_chunk, ssm_groups, ssm_heads
from mtjax.layout.weights import mamba_weights
from mtjax.models.kernels.ssd import HIGHEST, ScanInputs, left_behind, pass_states, scan, step
from mtjax.models.layer_context import LayerContext, State
from mtjax.models.mixers.recurrent import RecurrentMixer, merged
from mtjax.models.ops import constant, scaled
from mtjax.sharding.axes import num_shards, spec
from mtjax.sharding.kv_heads import groups_in_use, heads_in_use, heads_of_ranks

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.recurrent_state import RecurrentState


class Mamba(RecurrentMixer):
    """One product for gate, value, B, C and dt; a convolution; the scan; a gated norm; a row-parallel product."""

    scope: ClassVar[str] = "mamba"
    init_number: ClassVar[int] = 3
    dropout_site: ClassVar[int] = 9
    shared_taps: ClassVar[str] = "conv_b_c"

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters: those of every recurrent mixer; D is 1."""
        sizes = mamba_weights(model)
        super().__init__(model, sizes, output_std=output_std, key=key)
        self.conv_bias, self.conv_b_c_bias = constant(0.0, sizes["conv_bias"]), constant(0.0, sizes["conv_b_c_bias"])
        self.skip = constant(1.0, sizes["skip"])
        if model.ssm_norm:
            self.norm_scale = constant(1.0, sizes["norm_scale"])

    def recur(
        self, mixed: Float[Array, "b s u channels"], rates: list[Array], context: LayerContext, state: State
    ) -> tuple[Float[Array, "b s u h p"], State]:
        """See `RecurrentMixer.recur`; the rate is dt."""
        rate = self.rate_of(*rates)
        rate = jnp.maximum(rate, self.model.ssm_rate_floor) if self.model.ssm_rate_floor else rate
        a = self.negative_a(mixed)
        if state is not None:
            assert context.cache_positions is not None
            return self._continue(mixed, rate, a, context.cache_positions, state)
        if context.positions is not None:
            return self._scan_pieces(mixed, rate, a, context), state
        inputs = self._scan_inputs(self.convolve(mixed, None, context.segment_ids), rate, context.segment_ids)
        return self._add_skip(self._scan(inputs, a)[0], inputs), state

    def split(self, product: Float[Array, "b s u width"]) -> tuple[Array, ...]:
        """See `RecurrentMixer.split`; Falcon-H1 scales each part."""
        if (scales := self.model.ssm_scales) is not None:
            heads, state = self.heads_of_group, self.model.ssm_state
            widths = (heads * self.model.ssm_head_dim,) * 2 + (state, state, heads)
            # The order of the parts in the product: gate, value, B, C, dt.
            product = scaled(product, np.repeat(np.array(scales, np.float32), widths))
        return super().split(product)

    def convolution_bias(self) -> Array:
        """See `RecurrentMixer.convolution_bias`."""
        shared = heads_in_use(self.conv_b_c_bias[...], "groups")
        return jnp.concatenate([merged(self.by_groups(self.conv_bias[...]), 1), shared[0], shared[1]], -1)

    # --- scan

    def _scan_inputs(self, convolved: Array, rate: Array, segments: Array | None) -> ScanInputs:
        value, b, c = self.split_convolved(convolved)
        return ScanInputs(value, rate, b, c, segments)

    def _scan(
        self, inputs: ScanInputs, a: Array, state: Array | None = None, before: Array | None = None
    ) -> tuple[Array, Array]:
        """Runs the scan over each sample; returns [batch, seq, groups, heads, width] and the last state."""
        heads = ssm_heads(self.model) // num_shards("heads")
        at_once = chunks_at_once(self.model, inputs.x.shape[0], heads)
        with jax.named_scope("scan"):
            return scan(inputs, a, ssm_chunk(self.model), at_once, state, before)

    def _add_skip(self, y: Array, inputs: ScanInputs) -> Array:
        skip = self.by_groups(self.skip[...])[..., None]
        return (y.astype(jnp.float32) + inputs.x.astype(jnp.float32) * skip).astype(y.dtype)

    def _scan_pieces(self, mixed: Array, rate: Array, a: Array, context: LayerContext) -> Array:
        """Scans a rank's two pieces of each sample (context parallelism): ranks send each other what their pieces leave
        behind, which is the convolution's last inputs and the states, and no tokens."""
        pieces, convolved, segments, before, goes_on = self.convolve_pieces(mixed, context)
        inputs = self._scan_inputs(convolved, pieces.split(rate), segments)
        # Twice through the pieces: first what they leave, which needs no state, then the scan from the state that comes
        # in.
        left, total = left_behind(inputs, a, ssm_chunk(self.model))
        states, totals = (jnp.moveaxis(pieces.in_order(v), 0, 1) for v in (left, total))
        incoming, _ = pass_states(totals, states, None, None if goes_on is None else goes_on.T)
        y, _ = self._scan(inputs, a, pieces.own_of(jnp.moveaxis(incoming, 1, 0)), before)
        return pieces.join(self._add_skip(y, inputs))

    def _continue(
        self, mixed: Array, rate: Array, a: Array, positions: "CachePositions", state: "RecurrentState"
    ) -> tuple[Array, "RecurrentState"]:
        """Reads a token of each sequence, or a chunk of one."""
        # With dt = 0 a token leaves the state as it is.
        rate = jnp.where(state.is_new(positions)[..., None, None], rate, 0)
        taps, before = state.read_by(positions)
        inputs = self._scan_inputs(self.convolve(mixed, taps, None), rate, None)
        y, after = step(inputs, a, before) if positions.sequence is None else self._scan(inputs, a, before)
        return self._add_skip(y, inputs), state.replaced(taps, mixed, after, positions)

    # --- norm

    def gated_norm(self, y: Float[Array, "b s u h p"], gate: Array) -> Array:
        """Computes the RMS norm of y silu(gate) over each group, or none; squares of a group of several ranks are added
        up."""
        groups, ranks = ssm_groups(self.model), groups_in_use(ssm_groups(self.model))
        count = ssm_heads(self.model) * self.model.ssm_head_dim // groups
        y = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        if not self.model.ssm_norm:
            return y.astype(gate.dtype)
        squares = jnp.square(y).sum((-2, -1))
        if ranks > groups:
            ranks_by_group, sharding = heads_of_ranks(ranks, groups), spec("batch", "seq", None)
            # A norm's group is larger than what a rank has: sums over its ranks, an all-reduce of one number per token
            # and group.
            squares = jnp.einsum("bsu,ug->bsg", squares, ranks_by_group, precision=HIGHEST, out_sharding=sharding)
        scale = lax.rsqrt(squares / count + self.model.norm_epsilon)
        if ranks > groups:
            ranks_by_group, sharding = heads_of_ranks(ranks, groups), spec("batch", "seq", "heads")
            scale = jnp.einsum("bsg,ug->bsu", scale, ranks_by_group, precision=HIGHEST, out_sharding=sharding)
        return (y * scale[..., None, None] * self.by_groups(self.norm_scale[...])).astype(gate.dtype)
