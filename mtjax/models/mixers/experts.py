"""A mixture of experts (arXiv 1701.06538): a router chooses some of many MLPs for each token."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Float, Int

from mtjax.config import Model
from mtjax.config.sizes import GATED, expert_capacity, expert_size
from mtjax.layout.weights import Sizes, expert_biases, expert_products, router_weights, shared_gate
from mtjax.models.jitter import jitter
from mtjax.models.kernels.grouped import Blocks
from mtjax.models.layer_context import RESIDUAL, LayerContext, MixerState
from mtjax.models.mixers.transformer import MLP
from mtjax.models.ops import constant, draw_normal
from mtjax.models.routers import LOAD, LOST, ROUTER_AUX_LOSS, Z_LOSS, Padding
from mtjax.models.saved_names import SAVED
from mtjax.sharding.axes import map_shards, spec, varying_like
from mtjax.sharding.context.zigzag import from_first_context_rank, sample_length, sum_over_context
from mtjax.sharding.experts.dispatch import ExpertCompute, apply_experts

JITTER_SITE = 5
EPSILON = 1e-20
"""Added to sums of scores before division by them."""


class Routes(NamedTuple):
    """The experts of tokens, and the router's losses and counters."""

    experts: Int[Array, "batch act_seq chosen"]
    """Indices of experts; for padding, an index past the last one."""
    gates: Float[Array, "batch act_seq chosen"]
    """Weights of the experts' outputs, float32."""
    report: dict[str, Array]
    """Of each sample: the two losses, float32 [batch], and the number of tokens of each expert, [batch, routes]; where
    experts have a capacity, also the number of choices beyond it, [batch]."""


class Router(nnx.Module):
    """Scores experts, and chooses those with the highest; in float32."""

    def __init__(self, model: Model, *, key: Array) -> None:
        """Draws the weight, [embed, routes]; biases, [routes], are 0."""
        biases = {"bias": model.router_bias, "linear_bias": model.router_linear_bias}
        sizes = router_weights(model.hidden_size, model.num_experts, **biases)
        self.weight = draw_normal(key, sizes["weight"], model.init_std)
        self.bias = constant(0.0, sizes["bias"]) if "bias" in sizes else None
        self.linear_bias = constant(0.0, sizes["linear_bias"]) if "linear_bias" in sizes else None
        self.model = model

    def __call__(self, x: Float[Array, "batch act_seq embed"], context: LayerContext) -> Routes:
        """Chooses the experts of each token.

        The losses are of a sample: E sum(f P), with f an expert's fraction of the choices and P its mean fraction of
        the scores (load balancing: arXiv 2101.03961, section 2.2), and the mean square of the logits' log-sum-exp
        (z-loss: arXiv 2202.08906). With context parallelism each rank reports its tokens' contribution to both, with f
        of the entire sample.

        Padding is neither counted nor sent to an expert: its indices are past the last expert.

        Args:
          x: tokens.
          context: with dropout keys for the jitter, and padding.
        """
        model, sharding = self.model, spec("batch", "act_seq", None)
        # The router's input alone: experts read the tokens as they are.
        x = jitter(x, model.router_jitter, context.dropout_keys, JITTER_SITE, RESIDUAL, context.positions)
        weight = varying_like(self.weight[...], x)
        wide = x.astype(jnp.float32)
        # HIGHEST, as GPUs multiply float32 in TF32 otherwise: a top-k of rounded scores may choose other experts.
        logits = jnp.einsum("bsh,he->bse", wide, weight, out_sharding=sharding, precision=lax.Precision.HIGHEST)
        if self.linear_bias is not None:
            logits += varying_like(self.linear_bias[...], x)
        # A few numbers per token, of which the backward pass recomputes scores and choice.
        logits = checkpoint_name(logits, SAVED)
        scores = jax.nn.sigmoid(logits) if model.router_score == "sigmoid" else jax.nn.softmax(logits, -1)
        # The choice is not differentiable; gradients reach the router through the gates.
        ranked = lax.stop_gradient(scores)
        if self.bias is not None:
            # Auxiliary-loss-free balancing (arXiv 2408.15664): the bias affects the choice alone, not the gates, and is
            # updated from the load, not by gradients.
            ranked += varying_like(lax.stop_gradient(self.bias[...]), x)
        ranked = within_groups(ranked, model)
        # XLA: the partitioner would all-gather scores of some shapes for a top-k, so it is computed on each shard.
        chosen = map_shards(lambda shard: lax.top_k(shard, model.experts_top_k)[1], sharding)(ranked)
        # A product with one-hot vectors, because a gather would communicate between shards.
        hot = jax.nn.one_hot(chosen, model.num_experts, dtype=jnp.float32)
        gates = jnp.einsum("bske,bse->bsk", hot, scores, out_sharding=sharding)
        if model.router_normalize:
            gates = gates / (gates.sum(-1, keepdims=True) + EPSILON)
        report = self._report(logits, scores, hot, context.padding, x.shape[1])
        if context.padding is not None:
            # After the gates are normalized: those of padding would sum to 0, and the quotient's gradient be NaN.
            is_text = reshard(context.padding.is_text, spec("batch", "act_seq"))
            chosen = jnp.where(is_text[..., None], chosen, model.num_experts)
        return Routes(chosen, gates * model.router_scale, report)

    def _report(
        self,
        logits: Float[Array, "batch act_seq routes"],
        scores: Float[Array, "batch act_seq routes"],
        hot: Float[Array, "batch act_seq chosen routes"],
        padding: Padding | None,
        tokens: int,
    ) -> dict[str, Array]:
        """Computes `Routes.report`; this rank has `tokens` of each sample's tokens."""
        model, length = self.model, sample_length(tokens)
        # Sigmoid scores do not sum to 1; those of softmax do, but for rounding.
        shares, squares = scores / (scores.sum(-1, keepdims=True) + EPSILON), jnp.square(jax.nn.logsumexp(logits, -1))
        count: Any = length
        if padding is not None:
            is_text = reshard(padding.is_text, spec("batch", "act_seq"))
            shares, hot = jnp.where(is_text[..., None], shares, 0), jnp.where(is_text[..., None, None], hot, 0)
            # At least 1: a sample without text has no load, and would divide 0 by 0.
            squares, count = jnp.where(is_text, squares, 0), jnp.maximum(padding.length, 1).astype(jnp.float32)
        load = hot.sum((1, 2))
        # f needs the load of all tokens of a sample, an all-reduce with context parallelism; P is linear in the tokens,
        # so each rank adds its share.
        mean_share = shares.sum(1) / (count if padding is None else count[:, None])
        sample_load = varying_like(sum_over_context(load), load)
        balance = model.num_experts * (sample_load * mean_share).sum(-1) / (count * model.experts_top_k)
        z = squares.sum(1) / count
        report = {ROUTER_AUX_LOSS: balance, Z_LOSS: z, LOAD: load}
        if (capacity := sample_capacity(model, length, padding)) is not None:
            limit = capacity if padding is None else capacity[:, None]
            # Every context parallel rank knows the sample's load; the sum over ranks must count what is lost once.
            report[LOST] = from_first_context_rank(jnp.maximum(sample_load - limit, 0).sum(-1), tokens)
        return report


def sample_capacity(model: Model, length: int, padding: Padding | None) -> Any:
    """Returns the maximum number of tokens of a sample per expert.

    Args:
      model: with the capacity factor.
      length: tokens of a sample.
      padding: of the samples, if any.

    Returns:
      An integer; with padding int32 [batch], by the text lengths; None without a capacity.
    """
    capacity = expert_capacity(model, length)
    if capacity is None or padding is None:
        return capacity
    # A lookup table instead of arithmetic: float32 would round some products up that Python's floats do not.
    by_length = np.array([expert_capacity(model, n) for n in range(length + 1)], np.int32)
    return jnp.asarray(by_length).at[padding.length].get(out_sharding=spec("batch"))


def within_groups(ranked: Float[Array, "batch seq routes"], model: Model) -> Float[Array, "batch seq routes"]:
    """Masks experts outside the best groups with -inf (node-limited routing: arXiv 2405.04434, section 2.2.2).

    Args:
      ranked: scores by which experts are chosen.
      model: with the number of groups and of those to choose from; of equal groups the first are chosen.
    """
    groups, top_k = model.expert_groups, model.expert_groups_top_k
    if top_k == groups:
        return ranked
    # Groups are compared pairwise, because a sort would communicate between shards.
    grouped = ranked.reshape(*ranked.shape[:-1], groups, -1)
    best = grouped.max(-1)
    if model.router_score == "sigmoid":
        # DeepSeek-V3 ranks groups by the sum of their two best experts; softmax scores (V2) by the best.
        is_best = grouped == best[..., None]
        second = jnp.where(is_best, -jnp.inf, grouped).max(-1)
        best += jnp.where(is_best.sum(-1) > 1, best, second)
    other, this = best[..., None, :], best[..., :, None]
    is_earlier = jnp.arange(groups) < jnp.arange(groups)[:, None]
    num_better = ((other > this) | ((other == this) & is_earlier)).sum(-1)
    return jnp.where(num_better[..., None] < top_k, grouped, -jnp.inf).reshape(ranked.shape)


class Matrices(nnx.Module):
    """One matrix of every expert, and perhaps one bias."""

    def __init__(self, sizes: Sizes, std: float, key: Array, bias: Sizes | None = None) -> None:
        self.weight = draw_normal(key, sizes, std)
        self.bias = constant(0.0, bias) if bias else None


def named(parameter: nnx.Param, dtype: Any) -> tuple[Array, tuple[str, ...]]:
    """Casts a parameter; returns it with the logical names of its dimensions."""
    return parameter[...].astype(dtype), parameter.get_metadata()["axes"]


class Experts(nnx.Module):
    """A router, experts, and perhaps a shared expert for all tokens, which has no biases."""

    scope: ClassVar[str] = "mlp"
    init_number: ClassVar[int] = 1
    dropout_site: ClassVar[int] = 2

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        # Experts are stacked, [experts, embed, gate, mlp] and [experts, mlp, embed].
        up, down, router, shared = jax.random.split(key, 4)
        is_gated = model.activation in GATED
        sizes = expert_products(model.hidden_size, expert_size(model), model.num_experts, is_gated=is_gated)
        self.router = Router(model, key=router)
        biases = expert_biases(sizes) if model.expert_bias else {}
        self.up = Matrices(sizes["up"].weight, model.init_std, up, biases.get("up"))
        self.down = Matrices(sizes["down"].weight, output_std, down, biases.get("down"))
        # The shared expert is a dense MLP of another width.
        like_dense = dataclasses.replace(
            model, mlp_size=model.shared_expert_size, bias=False, mlp_bias=False, mlp_gate_scale=1.0
        )
        dense = self.shared_class(model)
        self.shared = dense(like_dense, output_std=output_std, key=shared) if model.shared_expert_size else None
        # Folded, so that the other parameters draw what they would draw without a gate.
        key, gate = jax.random.fold_in(shared, 1), shared_gate(model.hidden_size)
        self.shared_gate = Matrices(gate, model.init_std, key) if model.shared_expert_gate else None
        self.blocks: ExpertCompute = Blocks(model.activation, model.num_experts)

    def shared_class(self, model: Model) -> type[MLP]:
        """Returns the class of the shared expert."""
        del model
        return MLP

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, state: MixerState
    ) -> tuple[Float[Array, "batch act_seq embed"], MixerState]:
        """Applies to each token; the returned state is the router's report.

        In generation there is no report, and no token is dropped.
        """
        with jax.named_scope("router"):
            routes = self.router(x, context)
            # XLA: here, because gradients of x are added in reverse order, and only those of the experts and of the
            # shared expert, if nothing is between them, are added before one all-reduce.
            factor = self._shared_factor(x)
        weights = self.matrices(x.dtype)
        generates = context.cache_positions is not None
        model, length = self.router.model, sample_length(x.shape[1])
        # In generation a token must not depend on which other tokens are in the batch: no capacity.
        capacity = None if generates else expert_capacity(model, length)
        limits = None if generates or context.padding is None else sample_capacity(model, length, context.padding)
        chosen = routes.experts, limits
        out = apply_experts(self.blocks, x, routes.gates, chosen, weights, capacity, context.expert_dispatch)
        if self.shared is not None:
            out = out + self.shared(x, context, None, factor)[0]
        if self.down.bias is not None:
            # XLA: last, or it would not add the shared expert's output before the all-reduce.
            with jax.named_scope("router"):
                biases = self._weighted(self.down.bias[...], routes)
            out = (out.astype(jnp.float32) + biases).astype(x.dtype)
        return out, None if generates else routes.report

    def matrices(self, dtype: Any) -> list[tuple[Array, tuple[str, ...]]]:
        """Returns the experts' weights in this type, and biases, each with the logical names of its dimensions."""
        weights = [named(self.up.weight, dtype), named(self.down.weight, dtype)]
        if self.up.bias is not None:
            weights.append(named(self.up.bias, jnp.float32))
        return weights

    def _shared_factor(self, x: Float[Array, "batch act_seq embed"]) -> Float[Array, "batch seq 1"] | None:
        """Computes the factor of the shared expert's output, float32; None where it is 1."""
        if self.shared_gate is None:
            return None
        # Not a matmul: with one output it would be a kernel of its own.
        weight = varying_like(self.shared_gate.weight[...], x)[:, 0]
        logits = checkpoint_name((x.astype(jnp.float32) * weight).sum(-1, keepdims=True), SAVED)
        return reshard(jax.nn.sigmoid(logits), spec("batch", "seq", None))

    def _weighted(
        self, bias: Float[Array, "every_expert embed"], routes: Routes
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes each token's sum over its experts of gate times bias, in float32.

        Not where the experts are: every rank has the biases of all of them, and adds those of its own tokens, once.
        """
        bias = varying_like(bias, routes.gates)
        # Padding, whose index is past the last expert, has a row of zeros, and gets no bias.
        hot = jax.nn.one_hot(routes.experts, self.router.model.num_experts, dtype=jnp.float32)
        gates = (hot * routes.gates[..., None]).sum(2)
        return jnp.einsum("bse,eh->bsh", gates, bias, out_sharding=spec("batch", "act_seq", "embed"))
