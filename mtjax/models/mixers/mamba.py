"""Mamba-2 (arXiv 2405.21060, section 7): a gated state-space layer, sharded by heads.

Letters of shapes: b samples, s tokens, u groups of heads that share B and C, h heads of a group, p width of a head, n
width of the state. With fewer groups than tensor parallel ranks, several ranks share one, and each computes its B and
C.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.ssm import chunks_at_once, ssm_chunk, ssm_groups, ssm_heads
from mtjax.models.gradients_together import gradients_together
from mtjax.models.kernels.convolution import causal_convolution
from mtjax.models.kernels.ssd import HIGHEST, ScanInputs, left_behind, pass_states, scan, step
from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import Linear, constant, normal, scaled
from mtjax.models.mixers.mixer import State
from mtjax.models.project import project, reshard_sequence
from mtjax.models.recompute import ATTENTION_OUTPUT
from mtjax.sharding.axes import num_shards, spec, varying_like
from mtjax.sharding.kv_heads import groups_in_use, heads_in_use, heads_of_ranks

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.recurrent_state import RecurrentState

LEAST_RATE, SLOWEST, FASTEST = 1e-4, 0.001, 0.1
"""Initial dt: log-uniform between the last two, and at least the first (mamba-ssm, Megatron)."""


class Mamba(nnx.Module):
    """One product for gate, value, B, C and dt; a convolution; the scan; a gated norm; a row-parallel product."""

    scope: ClassVar[str] = "mamba"
    init_number: ClassVar[int] = 3
    dropout_site: ClassVar[int] = 9

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters: A uniform in 1 to 16, D 1, the convolution uniform within taps^-0.5 (mamba-ssm)."""
        self.model, count = model, ssm_heads(model)
        embed, heads = {"embed": model.hidden_size}, {"heads": count}
        inner, taps = {**heads, "head_dim": model.ssm_head_dim}, {"taps": model.ssm_conv}
        shared = {"kv": 2, "groups": ssm_groups(model), "state": model.ssm_state}
        keys, bound = iter(jax.random.split(key, 6)), model.ssm_conv**-0.5
        self.inputs = InputProjection(model, key=next(keys))
        self.conv = uniform(next(keys), {**taps, **inner}, -bound, bound)
        self.conv_bias = constant(0.0, inner)
        self.conv_b_c = uniform(next(keys), {**taps, **shared}, -bound, bound)
        self.conv_b_c_bias = constant(0.0, shared)
        self.rate_bias = initial_rate_bias(next(keys), heads)
        self.a_log = nnx.Param(jnp.log(uniform(next(keys), heads, 1.0, 16.0)[...]), axes=("heads",))
        self.skip = constant(1.0, heads)
        if model.ssm_norm:
            self.norm_scale = constant(1.0, inner)
        self.output = Linear(inner, embed, std=output_std, bias=False, sequence="act_seq", key=next(keys))

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: State
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Reads, for each token, what the tokens up to it, in its document, have left in the states of the heads.

        Args:
          x: the input.
          context: documents, positions with context parallelism, cache positions.
          state: None, or a `RecurrentState`, which the tokens change.

        Returns:
          The output, and the new state.
        """
        with jax.named_scope("inputs"):
            gate, mixed, rate = self._split(self.project_in(x, context))
        rate = jax.nn.softplus(rate.astype(jnp.float32) + self._by_groups(self.rate_bias[...]))
        rate = jnp.maximum(rate, self.model.ssm_rate_floor) if self.model.ssm_rate_floor else rate
        a = varying_like(-jnp.exp(self._by_groups(self.a_log[...])), mixed)
        if state is not None:
            assert context.cache_positions is not None
            y, state = self._continue(mixed, rate, a, context.cache_positions, state)
        elif context.positions is not None:
            y = self._scan_pieces(mixed, rate, a, context)
        else:
            inputs = self._scan_inputs(self._convolve(mixed, None, context.segment_ids), rate, context.segment_ids)
            y = self._add_skip(self._scan(inputs, a)[0], inputs)
        y = checkpoint_name(y, ATTENTION_OUTPUT)
        with jax.named_scope("gate"):
            y = self._gated_norm(*gradients_together(y, gate))
        y = y.reshape(*y.shape[:2], -1, y.shape[-1], out_sharding=spec("batch", "seq", "heads", "head_dim"))
        return self.project_out(y, context), state

    def project_in(self, x: Array, context: LayerContext) -> Array:
        """All-gathers sequences, and computes the first product, [batch, seq, groups, width]."""
        del context
        return self.inputs(reshard_sequence(x, "seq"))

    def project_out(self, y: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, heads, head_dim] to the residual stream, [batch, act_seq, embed]."""
        del context
        return self.output(y)

    # --- products and convolution

    def _by_groups(self, parameter: Array, before: int = 0) -> Array:
        return by_groups(parameter, ssm_groups(self.model), before)

    @property
    def _heads_of_group(self) -> int:
        return ssm_heads(self.model) // groups_in_use(ssm_groups(self.model))

    def _split(self, product: Float[Array, "b s u width"]) -> tuple[Array, Array, Array]:
        """Takes out the gate [b, s, u, h, p], the convolution's input [b, s, u, channels] and dt [b, s, u, h]."""
        heads, width = self._heads_of_group, self.model.ssm_head_dim
        inner = heads * width
        if (scales := self.model.ssm_scales) is not None:
            widths = (inner, inner, self.model.ssm_state, self.model.ssm_state, heads)
            product = scaled(product, np.repeat(np.array(scales, np.float32), widths))
        gate, mixed, rate = jnp.split(product, [inner, 2 * inner + 2 * self.model.ssm_state], -1)
        return gate.reshape(*gate.shape[:-1], heads, width), mixed, rate

    def _convolve(
        self, mixed: Float[Array, "b s u channels"], before: Array | None, segments: Array | None
    ) -> Float[Array, "b s u channels"]:
        """Computes the causal convolution of each channel, and SiLU, in float32.

        Args:
          mixed: the channels of value, B and C.
          before: those of the taps - 1 tokens before; zeros when None.
          segments: document of each token, which may begin with those of the tokens before: no tap crosses documents.
        """
        b_c, b_c_bias = (heads_in_use(p[...], "groups") for p in (self.conv_b_c, self.conv_b_c_bias))
        weights = jnp.concatenate([_merged(self._by_groups(self.conv[...], 1), 2), b_c[:, 0], b_c[:, 1]], -1)
        bias = jnp.concatenate([_merged(self._by_groups(self.conv_bias[...]), 1), b_c_bias[0], b_c_bias[1]], -1)
        return causal_convolution(mixed, weights, bias, before, segments)

    # --- scan

    def _scan_inputs(self, convolved: Array, rate: Array, segments: Array | None) -> ScanInputs:
        heads, width, state = self._heads_of_group, self.model.ssm_head_dim, self.model.ssm_state
        value, b, c = jnp.split(convolved, [heads * width, heads * width + state], -1)
        return ScanInputs(value.reshape(*value.shape[:-1], heads, width), rate, b, c, segments)

    def _scan(
        self, inputs: ScanInputs, a: Array, state: Array | None = None, before: Array | None = None
    ) -> tuple[Array, Array]:
        heads = ssm_heads(self.model) // num_shards("heads")
        at_once = chunks_at_once(self.model, inputs.x.shape[0], heads)
        with jax.named_scope("scan"):
            return scan(inputs, a, ssm_chunk(self.model), at_once, state, before)

    def _add_skip(self, y: Array, inputs: ScanInputs) -> Array:
        skip = self._by_groups(self.skip[...])[..., None]
        return (y.astype(jnp.float32) + inputs.x.astype(jnp.float32) * skip).astype(y.dtype)

    def _scan_pieces(self, mixed: Array, rate: Array, a: Array, context: LayerContext) -> Array:
        """Scans a rank's two pieces of each sample (context parallelism): ranks send each other what their pieces leave
        behind, which is the convolution's last inputs and the states, and no tokens."""
        from mtjax.sharding.context.states import Pieces

        pieces, taps = Pieces.of(context.positions), self.model.ssm_conv - 1
        mixed, rate, segments, goes_on = pieces.split(mixed), pieces.split(rate), None, None
        before = pieces.before(mixed[:, -taps:])
        if context.segment_ids is not None:
            segments = pieces.split(context.segment_ids)
            segments = jnp.concatenate([pieces.before(segments[:, -taps:]), segments], 1)
            goes_on = segments[:, taps - 1] == segments[:, -1]
        convolved = self._convolve(mixed, before, segments)
        last, own = (None, None) if segments is None else (segments[:, taps - 1], segments[:, taps:])
        inputs = self._scan_inputs(convolved, rate, own)
        left, total = left_behind(inputs, a, ssm_chunk(self.model))
        states, totals = (jnp.moveaxis(pieces.in_order(v), 0, 1) for v in (left, total))
        kept = None if goes_on is None else jnp.moveaxis(pieces.in_order(goes_on.astype(jnp.int32)), 0, 1) > 0
        incoming, _ = pass_states(totals, states, None, kept)
        y, _ = self._scan(inputs, a, pieces.own_of(jnp.moveaxis(incoming, 1, 0)), last)
        return pieces.join(self._add_skip(y, inputs))

    def _continue(
        self, mixed: Array, rate: Array, a: Array, positions: "CachePositions", state: "RecurrentState"
    ) -> tuple[Array, "RecurrentState"]:
        """Reads a token of each sequence, or a chunk of one."""
        # With dt = 0 a token leaves the state as it is.
        rate = jnp.where(state.is_new(positions)[..., None, None], rate, 0)
        taps, before = state.read_by(positions)
        inputs = self._scan_inputs(self._convolve(mixed, taps, None), rate, None)
        y, after = step(inputs, a, before) if positions.sequence is None else self._scan(inputs, a, before)
        seen = jnp.concatenate([taps, mixed.astype(taps.dtype)], 1)
        return self._add_skip(y, inputs), state.replaced(seen, after, positions)

    # --- norm

    def _gated_norm(self, y: Float[Array, "b s u h p"], gate: Array) -> Array:
        """Computes the RMS norm of y silu(gate) over each group, or none; squares of a group of several ranks are added
        up."""
        groups, ranks = ssm_groups(self.model), groups_in_use(ssm_groups(self.model))
        count = ssm_heads(self.model) * self.model.ssm_head_dim // groups
        y = y.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        if not self.model.ssm_norm:
            return y.astype(gate.dtype)
        squares = jnp.square(y).sum((-2, -1))
        if ranks > groups:
            own, place = heads_of_ranks(ranks, groups), spec("batch", "seq", None)
            squares = jnp.einsum("bsu,ug->bsg", squares, own, precision=HIGHEST, out_sharding=place)
        scale = lax.rsqrt(squares / count + self.model.norm_epsilon)
        if ranks > groups:
            own, place = heads_of_ranks(ranks, groups), spec("batch", "seq", "heads")
            scale = jnp.einsum("bsg,ug->bsu", scale, own, precision=HIGHEST, out_sharding=place)
        return (y * scale[..., None, None] * self._by_groups(self.norm_scale[...])).astype(gate.dtype)


class InputProjection(nnx.Module):
    """The parts of the first product, each a parameter that is sharded on its own.

    Their weight is assembled by groups, as `GroupedQKV`'s is, so that a rank computes entire groups, and the backward
    pass reduces one cotangent of the input.
    """

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the weights of gate and value, of B and C, and of dt."""
        embed, heads = {"embed": model.hidden_size}, {"heads": ssm_heads(model)}
        shared = {"kv": 2, "groups": ssm_groups(model), "state": model.ssm_state}
        keys, std = jax.random.split(key, 3), model.init_std
        self.gate_value = normal(keys[0], {**embed, "gate": 2, **heads, "head_dim": model.ssm_head_dim}, std)
        self.b_c = normal(keys[1], {**embed, **shared}, std)
        self.rate = normal(keys[2], {**embed, **heads}, std)
        self.groups = ssm_groups(model)

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """Computes, of each group in use, gate | value | B | C | dt."""
        return _project(x, self._weight())

    def assembled(self) -> "AssembledInput":
        """Assembles the parameters once, for many products with few tokens (generation)."""
        return AssembledInput(self._weight())

    def _weight(self) -> Float[Array, "embed u width"]:
        return assembled_by_groups(self.gate_value[...], self.b_c[...], self.rate[...], self.groups)


class AssembledInput(nnx.Module):
    """`InputProjection` with an assembled weight, [embed, groups, width]; not for training."""

    def __init__(self, weight: Array) -> None:
        self.weight = nnx.Param(weight, axes=("embed", "heads", None))

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """See `InputProjection.__call__`."""
        return _project(x, self.weight[...])


def _project(x: Array, weight: Array) -> Array:
    return project(x, weight, None, ("heads", None), by_sample=True)


def assembled_by_groups(gate_value: Array, b_c: Array, rate: Array, groups: int) -> Float[Array, "inputs u width"]:
    """Puts the parts of the first product's weight in the order of a group: gate | value | B | C | dt."""
    gate_value = by_groups(gate_value, groups, 2)
    b_c, rate = heads_in_use(b_c, "groups"), by_groups(rate, groups, 1)
    parts = [_merged(gate_value[:, 0], 2), _merged(gate_value[:, 1], 2), b_c[:, 0], b_c[:, 1], rate]
    return jnp.concatenate(parts, -1)


def by_groups(parameter: Array, groups: int, before: int = 0) -> Array:
    """Splits heads into groups in use: [*before, heads, ...] -> [*before, u, h, ...]."""
    groups, heads = groups_in_use(groups), parameter.shape[before]
    shape = (*parameter.shape[:before], groups, heads // groups, *parameter.shape[before + 1 :])
    sharding = spec(*(None,) * before, "heads", *(None,) * (len(shape) - before - 1))
    return parameter.reshape(shape, out_sharding=sharding)


def uniform(key: Array, sizes: Mapping[str, int], low: float, high: float) -> nnx.Param:
    """Draws a parameter uniformly from low to high, with the same values on every mesh."""
    drawn = jax.random.uniform(key, tuple(sizes.values()), out_sharding=spec(*sizes))
    return nnx.Param(low + (high - low) * drawn, axes=tuple(sizes))


def initial_rate_bias(key: Array, heads: Mapping[str, int]) -> nnx.Param:
    """Draws the rates' biases, whose softplus is log-uniform between `SLOWEST` and `FASTEST`."""
    rate = jnp.exp(uniform(key, heads, math.log(SLOWEST), math.log(FASTEST))[...])
    rate = jnp.maximum(rate, LEAST_RATE)
    return nnx.Param(rate + jnp.log(-jnp.expm1(-rate)), axes=tuple(heads))


def _merged(x: Array, start: int) -> Array:
    return x.reshape(*x.shape[:start], -1)
