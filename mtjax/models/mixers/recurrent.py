"""What mixers with a recurrent state share (Mamba-2, the gated delta net): parameters, the order of a call, products.

Letters of shapes: b samples, s tokens, u groups of heads that share two vectors of the state's width (B and C, or query
and key), h heads of a group, p width of a head, n width of the state. With fewer groups than tensor parallel ranks,
several ranks share one, and each computes its two vectors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Int

from mtjax.config import Model
from mtjax.config.ssm import ssm_groups, ssm_heads
from mtjax.layout.weights import ProductSizes, Sizes, recurrent_inputs, recurrent_output
from mtjax.models.gradients_together import gradients_together
from mtjax.models.kernels.convolution import causal_convolution
from mtjax.models.layer_context import LayerContext, State
from mtjax.models.layer_loop import ATTENTION_OUTPUT
from mtjax.models.ops import Linear, draw_normal
from mtjax.models.project import project, reshard_sequence
from mtjax.sharding.axes import spec, varying_like
from mtjax.sharding.kv_heads import groups_in_use, heads_in_use

if TYPE_CHECKING:
    from mtjax.sharding.context.states import Pieces

LEAST_RATE, SLOWEST, FASTEST = 1e-4, 0.001, 0.1
"""Initial dt: log-uniform between the last two, and at least the first (mamba-ssm, Megatron)."""


class RecurrentMixer(nnx.Module):
    """One product, a causal convolution, a recurrence, a norm with a gate, and a row-parallel product."""

    scope: ClassVar[str]
    init_number: ClassVar[int]
    dropout_site: ClassVar[int]
    conv: nnx.Param
    shared_taps: ClassVar[str]
    """Name of the parameter with the convolution of the two vectors that a group shares."""

    def __init__(self, model: Model, sizes: Mapping[str, Sizes], *, output_std: float, key: Array) -> None:
        """Draws the parameters: A uniform in 1 to 16, the convolution uniform within taps^-0.5 (mamba-ssm)."""
        self.model = model
        keys, bound = iter(jax.random.split(key, 6)), model.ssm_conv**-0.5
        self.inputs = GroupedProjection(model, recurrent_inputs(sizes), key=next(keys))
        for name in ("conv", self.shared_taps):
            setattr(self, name, uniform(next(keys), sizes[name], -bound, bound))
        self.rate_bias = _initial_rate_bias(next(keys), sizes["rate_bias"])
        # Its logarithm is trained, so that A stays below 0.
        self.a_log = nnx.Param(jnp.log(uniform(next(keys), sizes["a_log"], 1.0, 16.0)[...]), axes=("heads",))
        output = recurrent_output(model)
        self.output = Linear(*output, std=output_std, bias=False, sequence="act_seq", key=next(keys))

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
            gate, mixed, *rates = self.split(self.project_in(x, context))
        y, state = self.recur(mixed, rates, context, state)
        # Named as attention's output is, so that only full recompute runs the scan again.
        y = checkpoint_name(y, ATTENTION_OUTPUT)
        with jax.named_scope("gate"):
            # Otherwise the gate's gradient would be computed only where the first product's gradient needs it, and what
            # it is computed from kept until then.
            y = self.gated_norm(*gradients_together(y, gate))
        # Groups and their heads are heads again, for the row-parallel product.
        y = y.reshape(*y.shape[:2], -1, y.shape[-1], out_sharding=spec("batch", "seq", "heads", "head_dim"))
        return self.project_out(y, context), state

    def project_in(self, x: Array, context: LayerContext) -> Array:
        """All-gathers sequences, and computes the first product, [batch, seq, groups, width]."""
        del context
        return self.inputs(reshard_sequence(x, "seq"))

    def project_out(self, mixed: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, heads, head_dim] to the residual stream, [batch, act_seq, embed]."""
        del context
        return self.output(mixed)

    def split(self, product: Float[Array, "b s u width"]) -> tuple[Array, ...]:
        """Takes the first product apart: the gate [b, s, u, h, p], the convolution's input [b, s, u, channels], and the
        numbers of each head, [b, s, u, h] each, the rate last."""
        inner = self.heads_of_group * self.model.ssm_head_dim
        mixed = 2 * inner + 2 * self.model.ssm_state
        # The gate; what is convolved together; then a number of each head for every rate.
        ends = [inner, *range(mixed, product.shape[-1], self.heads_of_group)]
        gate, *parts = jnp.split(product, ends, -1)
        return gate.reshape(*gate.shape[:-1], self.heads_of_group, self.model.ssm_head_dim), *parts

    def recur(
        self, mixed: Float[Array, "b s u channels"], rates: list[Array], context: LayerContext, state: State
    ) -> tuple[Float[Array, "b s u h p"], State]:
        """Runs the convolution and the recurrence, in training or from a state; see `split` and `__call__`."""
        raise NotImplementedError

    def gated_norm(self, y: Float[Array, "b s u h p"], gate: Array) -> Array:
        """Normalizes what was read of the states, with the gate."""
        raise NotImplementedError

    def convolve(
        self, mixed: Float[Array, "b s u channels"], before: Array | None, segments: Array | None
    ) -> Float[Array, "b s u channels"]:
        """Computes the convolution of the value and of the shared vectors; see `causal_convolution`."""
        # Where ranks share a group, those of the one that this rank computes. Channels are in the order of `split`.
        shared = heads_in_use(getattr(self, self.shared_taps)[...], "groups")
        weights = jnp.concatenate([merged(self.by_groups(self.conv[...], 1), 2), shared[:, 0], shared[:, 1]], -1)
        return causal_convolution(mixed, weights, self.convolution_bias(), before, segments)

    def convolve_pieces(self, mixed: Float[Array, "b s u channels"], context: LayerContext) -> "ConvolvedPieces":
        """Computes the convolution of a rank's two pieces of each sample (context parallelism), which begins with the
        last inputs of the piece before; ranks send each other these, and no other tokens."""
        from mtjax.sharding.context.states import Pieces, one_later

        pieces, taps = Pieces.of(context.positions), self.model.ssm_conv - 1
        mixed = pieces.split(mixed)
        # The piece before in the sample, which may be another rank's.
        before = pieces.before(mixed[:, -taps:])
        if context.segment_ids is None:
            return ConvolvedPieces(pieces, self.convolve(mixed, before, None), None, None, None)
        segments = pieces.split(context.segment_ids)
        ends = pieces.in_order(segments[:, -taps:])
        earlier = one_later(ends)
        # The documents of the taps' tokens, too: no tap crosses into another document.
        segments = jnp.concatenate([pieces.own_of(earlier), segments], 1)
        # A piece goes on whose last token is in the document of the token before the piece.
        convolved, goes_on = self.convolve(mixed, before, segments), ends[..., -1] == earlier[..., -1]
        return ConvolvedPieces(pieces, convolved, segments[:, taps:], segments[:, taps - 1], goes_on)

    def convolution_bias(self) -> Float[Array, "u channels"] | None:
        """Returns the bias of each channel, if there are any."""
        return None

    def split_convolved(self, convolved: Array) -> tuple[Array, Array, Array]:
        """Takes apart what was convolved: the value [b, s, u, h, p], and the shared vectors, [b, s, u, n] each."""
        heads, width, state = self.heads_of_group, self.model.ssm_head_dim, self.model.ssm_state
        value, first, second = jnp.split(convolved, [heads * width, heads * width + state], -1)
        return value.reshape(*value.shape[:-1], heads, width), first, second

    def rate_of(self, logits: Array) -> Float[Array, "b s u h"]:
        """Computes dt, float32."""
        return jax.nn.softplus(logits.astype(jnp.float32) + self.by_groups(self.rate_bias[...]))

    def negative_a(self, like: Array) -> Float[Array, "u h"]:
        """Returns A, below 0, which varies over mesh axes like an array."""
        return varying_like(-jnp.exp(self.by_groups(self.a_log[...])), like)

    def by_groups(self, parameter: Array, before: int = 0) -> Array:
        """Splits heads into groups in use: see `by_groups`."""
        return by_groups(parameter, ssm_groups(self.model), before)

    @property
    def heads_of_group(self) -> int:
        """h."""
        return ssm_heads(self.model) // groups_in_use(ssm_groups(self.model))


class ConvolvedPieces(NamedTuple):
    """What was convolved of a rank's pieces of samples, [2 b, s / 2, ...]."""

    pieces: "Pieces"
    convolved: Float[Array, "2b s u channels"]
    segments: Int[Array, "2b s"] | None
    """Document of each token."""
    before: Int[Array, " 2b"] | None
    """Document of the token before each piece."""
    goes_on: Bool[Array, "pieces b"] | None
    """Whether each piece of all ranks ends in the document of the token before it."""


class GroupedProjection(nnx.Module):
    """The parts of the first product, each a parameter that is sharded on its own.

    Their weight is assembled by groups, as `GroupedQKV`'s is, so that a rank computes entire groups, and the backward
    pass reduces one cotangent of the input.
    """

    def __init__(self, model: Model, parts: Mapping[str, ProductSizes], *, key: Array) -> None:
        """Draws the weights of gate and value, of the two shared vectors, and of the numbers of each head."""
        self.names, self.groups = tuple(parts), ssm_groups(model)
        for (name, sizes), inputs in zip(parts.items(), jax.random.split(key, len(parts)), strict=True):
            setattr(self, name, draw_normal(inputs, sizes.weight, model.init_std))

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """Computes, of each group in use: gate, value, the two shared vectors, the numbers of each head."""
        return _project(x, assembled_by_groups(self.parts(), self.groups))

    def parts(self) -> tuple[nnx.Param, ...]:
        """Returns the parameters in the order of the product."""
        return tuple(getattr(self, name) for name in self.names)

    def assembled(self) -> "AssembledProjection":
        """Assembles the parameters once, for many products with few tokens (generation)."""
        return AssembledProjection(assembled_by_groups(self.parts(), self.groups))


class AssembledProjection(nnx.Module):
    """A `GroupedProjection` with an assembled weight, [embed, groups, width]; not for training."""

    def __init__(self, weight: Array) -> None:
        self.weight = nnx.Param(weight, axes=("embed", "heads", None))

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """See `GroupedProjection.__call__`."""
        return _project(x, self.weight[...])


def _project(x: Array, weight: Array) -> Array:
    return project(x, weight, None, ("heads", None), by_sample=True)


def assembled_by_groups(parts: Sequence[nnx.Param], groups: int) -> Float[Array, "inputs u width"]:
    """Puts the parts of the first product's weight in the order of a group; see `GroupedProjection`."""
    gate_value, shared, *of_heads = (part[...] for part in parts)
    gate_value, shared = by_groups(gate_value, groups, 2), heads_in_use(shared, "groups")
    halves = [merged(gate_value[:, 0], 2), merged(gate_value[:, 1], 2), shared[:, 0], shared[:, 1]]
    return jnp.concatenate([*halves, *(by_groups(part, groups, 1) for part in of_heads)], -1)


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


def _initial_rate_bias(key: Array, heads: Mapping[str, int]) -> nnx.Param:
    """Draws the rates' biases, whose softplus is log-uniform between `SLOWEST` and `FASTEST`."""
    rate = jnp.exp(uniform(key, heads, math.log(SLOWEST), math.log(FASTEST))[...])
    rate = jnp.maximum(rate, LEAST_RATE)
    # The inverse of softplus, in a form that keeps the digits of small rates.
    return nnx.Param(rate + jnp.log(-jnp.expm1(-rate)), axes=tuple(heads))


def merged(x: Array, start: int) -> Array:
    """Merges the dimensions of a group's heads, from `start` on."""
    # A reshape by itself would drop the axis of a single group on one tensor rank.
    return x.reshape(*x.shape[:start], -1, out_sharding=spec(*(None,) * (start - 1), "heads", None))
