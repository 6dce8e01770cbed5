"""The gated delta net (arXiv 2412.06464; Qwen3-Next): linear attention that replaces what its state holds at a key.

Letters of shapes: b samples, s tokens, u groups of heads that share a query and a key, h heads of a group, p width of a
head's value, n width of a key. As in Mamba-2, ranks may share a group, and each computes its queries and keys.
"""

from typing import TYPE_CHECKING, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.ssm import delta_chunks_at_once, ssm_chunk, ssm_groups, ssm_heads
from mtjax.models.gradients_together import gradients_together
from mtjax.models.kernels.convolution import causal_convolution
from mtjax.models.kernels.delta_rule import DeltaInputs, delta_scan, delta_step
from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import Linear, constant, normal
from mtjax.models.mixers.mamba import by_groups, initial_rate_bias, uniform
from mtjax.models.mixers.mixer import State
from mtjax.models.project import project, reshard_sequence
from mtjax.models.recompute import ATTENTION_OUTPUT
from mtjax.sharding.axes import num_shards, spec, varying_like
from mtjax.sharding.kv_heads import groups_in_use, heads_in_use

if TYPE_CHECKING:
    from mtjax.models.kv_cache import CachePositions
    from mtjax.models.recurrent_state import RecurrentState

EPSILON = 1e-6
"""Added to the squared length of a query or key."""


class GatedDeltaNet(nnx.Module):
    """One product for gate, value, query, key, beta and decay; a convolution; the delta rule; a norm of each head, the
    gate; a row-parallel product."""

    scope: ClassVar[str] = "delta"
    init_number: ClassVar[int] = 4
    dropout_site: ClassVar[int] = 13

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters: A uniform in 1 to 16, the rates and the convolution as in Mamba-2."""
        self.model, count = model, ssm_heads(model)
        embed, heads = {"embed": model.hidden_size}, {"heads": count}
        inner, taps = {**heads, "head_dim": model.ssm_head_dim}, {"taps": model.ssm_conv}
        shared = {"kv": 2, "groups": ssm_groups(model), "state": model.ssm_state}
        keys, bound = iter(jax.random.split(key, 6)), model.ssm_conv**-0.5
        self.inputs = DeltaProjection(model, key=next(keys))
        self.conv = uniform(next(keys), {**taps, **inner}, -bound, bound)
        self.conv_query_key = uniform(next(keys), {**taps, **shared}, -bound, bound)
        self.rate_bias = initial_rate_bias(next(keys), heads)
        self.a_log = nnx.Param(jnp.log(uniform(next(keys), heads, 1.0, 16.0)[...]), axes=("heads",))
        self.norm_scale = constant(1.0, {"head_dim": model.ssm_head_dim})
        self.output = Linear(inner, embed, std=output_std, bias=False, sequence="act_seq", key=next(keys))

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: State
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Reads, for each token, what the tokens up to it, in its document, have left in the states of the heads.

        Args:
          x: the input.
          context: documents, cache positions.
          state: None, or a `RecurrentState`, which the tokens change.

        Returns:
          The output, and the new state.
        """
        assert context.positions is None, "layout.hybrid checks it"
        with jax.named_scope("inputs"):
            gate, mixed, beta, rate = self._split(self.inputs(reshard_sequence(x, "seq")))
        beta = jax.nn.sigmoid(beta.astype(jnp.float32))
        rate = jax.nn.softplus(rate.astype(jnp.float32) + self._by_groups(self.rate_bias[...]))
        decay = rate * varying_like(-jnp.exp(self._by_groups(self.a_log[...])), mixed)
        if state is None:
            inputs = self._inputs_of(self._convolve(mixed, None, context.segment_ids), decay, beta)
            y, _ = self._scan(inputs._replace(segments=context.segment_ids))
        else:
            assert context.cache_positions is not None
            y, state = self._continue(mixed, decay, beta, context.cache_positions, state)
        y = checkpoint_name(y, ATTENTION_OUTPUT)
        with jax.named_scope("gate"):
            y = self._gated_norm(*gradients_together(y, gate))
        y = y.reshape(*y.shape[:2], -1, y.shape[-1], out_sharding=spec("batch", "seq", "heads", "head_dim"))
        return self.output(y), state

    def _by_groups(self, parameter: Array, before: int = 0) -> Array:
        return by_groups(parameter, ssm_groups(self.model), before)

    @property
    def _heads_of_group(self) -> int:
        return ssm_heads(self.model) // groups_in_use(ssm_groups(self.model))

    def _split(self, product: Float[Array, "b s u width"]) -> tuple[Array, Array, Array, Array]:
        """Takes out the gate [b, s, u, h, p], the convolution's input [b, s, u, channels], and the logits of beta and
        of the rate, [b, s, u, h]."""
        heads, width = self._heads_of_group, self.model.ssm_head_dim
        inner = heads * width
        ends = [inner, 2 * inner + 2 * self.model.ssm_state, product.shape[-1] - heads]
        gate, mixed, beta, rate = jnp.split(product, ends, -1)
        return gate.reshape(*gate.shape[:-1], heads, width), mixed, beta, rate

    def _convolve(
        self, mixed: Float[Array, "b s u channels"], before: Array | None, segments: Array | None
    ) -> Float[Array, "b s u channels"]:
        """Computes the convolution of value, query and key; see `causal_convolution`."""
        shared = heads_in_use(self.conv_query_key[...], "groups")
        values = self._by_groups(self.conv[...], 1)
        weights = [values.reshape(*values.shape[:2], -1), shared[:, 0], shared[:, 1]]
        return causal_convolution(mixed, jnp.concatenate(weights, -1), None, before, segments)

    def _inputs_of(self, convolved: Array, decay: Array, beta: Array) -> DeltaInputs:
        """Takes apart what was convolved, and normalizes queries and keys to length 1; queries are scaled."""
        heads, width, state = self._heads_of_group, self.model.ssm_head_dim, self.model.ssm_state
        value, query, key = jnp.split(convolved, [heads * width, heads * width + state], -1)
        query, key = _unit(query, state**-0.5), _unit(key, 1.0)
        return DeltaInputs(query, key, value.reshape(*value.shape[:-1], heads, width), decay, beta)

    def _scan(self, inputs: DeltaInputs, state: Array | None = None) -> tuple[Array, Array]:
        at_once = delta_chunks_at_once(self.model, inputs.value.shape[0], ssm_heads(self.model) // num_shards("heads"))
        with jax.named_scope("scan"):
            return delta_scan(inputs, ssm_chunk(self.model), at_once, state)

    def _continue(
        self, mixed: Array, decay: Array, beta: Array, positions: "CachePositions", state: "RecurrentState"
    ) -> tuple[Array, "RecurrentState"]:
        """Reads a token of each sequence, or a chunk of one."""
        # With decay and beta 0 a token leaves the state as it is.
        is_new = state.is_new(positions)[..., None, None]
        taps, before = state.read_by(positions)
        convolved = self._convolve(mixed, taps, None)
        inputs = self._inputs_of(convolved, jnp.where(is_new, decay, 0), jnp.where(is_new, beta, 0))
        y, after = delta_step(inputs, before) if positions.sequence is None else self._scan(inputs, before)
        seen = jnp.concatenate([taps, mixed.astype(taps.dtype)], 1)
        return y, state.replaced(seen, after, positions)

    def _gated_norm(self, y: Float[Array, "b s u h p"], gate: Array) -> Array:
        """Computes the RMS norm of each head, and multiplies it by silu(gate)."""
        wide = y.astype(jnp.float32)
        normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.model.norm_epsilon)
        return (normal * self.norm_scale[...] * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _unit(x: Array, length: float) -> Array:
    """Scales vectors to a length, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * (length * lax.rsqrt(jnp.square(wide).sum(-1, keepdims=True) + EPSILON))).astype(x.dtype)


class DeltaProjection(nnx.Module):
    """The parts of the first product, each a parameter that is sharded on its own; see `mamba.InputProjection`."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the weights of gate and value, of query and key, of beta and of the rate."""
        embed, heads = {"embed": model.hidden_size}, {"heads": ssm_heads(model)}
        shared = {"kv": 2, "groups": ssm_groups(model), "state": model.ssm_state}
        keys, std = jax.random.split(key, 4), model.init_std
        self.gate_value = normal(keys[0], {**embed, "gate": 2, **heads, "head_dim": model.ssm_head_dim}, std)
        self.query_key = normal(keys[1], {**embed, **shared}, std)
        self.beta, self.rate = (normal(each, {**embed, **heads}, std) for each in keys[2:])
        self.groups = ssm_groups(model)

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """Computes, of each group in use, gate | value | query | key | beta | rate."""
        return _project(x, self._weight())

    def assembled(self) -> "AssembledDelta":
        """Assembles the parameters once, for many products with few tokens (generation)."""
        return AssembledDelta(self._weight())

    def _weight(self) -> Float[Array, "embed u width"]:
        pair = by_groups(self.gate_value[...], self.groups, 2)
        gate, value = (part.reshape(*part.shape[:2], -1) for part in (pair[:, 0], pair[:, 1]))
        shared = heads_in_use(self.query_key[...], "groups")
        beta, rate = (by_groups(part[...], self.groups, 1) for part in (self.beta, self.rate))
        return jnp.concatenate([gate, value, shared[:, 0], shared[:, 1], beta, rate], -1)


class AssembledDelta(nnx.Module):
    """`DeltaProjection` with an assembled weight, [embed, groups, width]; not for training."""

    def __init__(self, weight: Array) -> None:
        self.weight = nnx.Param(weight, axes=("embed", "heads", None))

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """See `DeltaProjection.__call__`."""
        return _project(x, self.weight[...])


def _project(x: Array, weight: Array) -> Array:
    return project(x, weight, None, ("heads", None), by_sample=True)
