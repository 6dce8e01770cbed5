"""QK-clip (arXiv 2507.20534, algorithm 1): after an update, scales queries and keys of heads with too large scores.

Where the largest score of a head in a step, s, exceeds the threshold t, its query weights are multiplied by (t/s)^alpha
and its key weights by (t/s)^(1 - alpha), so that the same score would be t. Query heads that share a key head are
scaled together, by the largest score of them all, as in Megatron-Core. Of latent attention the rotated part of keys
belongs to all heads and remains; that of queries is multiplied by t/s.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import num_kv_heads
from mtjax.layout.layouts import LARGEST_SCORES
from mtjax.models.language_model import LanguageModel
from mtjax.models.largest_scores import (
    observe_given,
    observe_scores,
    only_observers,
    with_observers,
    without_observers,
)
from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.train_state import State
from mtjax.sharding.factors import sharded_by_rows, times_factors
from mtjax.train.step import LossInputs, TrainStep

Tree = Any

METRIC = "largest_score"
"""Name of the largest score of all heads among a step's metrics; 0 if none is above 0."""


class QKClipStep(TrainStep):
    """A train step that bounds attention scores, which attention by XLA and in blocks observes (`choose_kernel`)."""

    def bind_records(self) -> None:
        """See `ShardedModel.bind_records`: the region of a step has the zeros; states and other readers have none."""
        super().bind_records()
        trees = self.logical_axes, self.abstract_parameters, self.records
        self.logical_axes, self.abstract_parameters, self.records = map(without_observers, trees)
        # `step_region` keeps them: only a step's gradients have them.
        self.region = dataclasses.replace(self.region, records=self.records)

    def build(self, key: Array) -> LanguageModel:
        """See `ShardedModel.build`; adds the zeros."""
        model = super().build(key)
        observe_scores(model, self.config.model.num_heads)
        return model

    def draw_float32(self, key: Array) -> Tree:
        """See `ShardedModel.draw_float32`."""
        return without_observers(super().draw_float32(key))

    def model(self, parameters: Tree) -> LanguageModel:
        """See `ShardedModel.model`."""
        model = super().model(parameters)
        observe_given(model, parameters)
        return model

    def loss_inputs(self, parameters: Tree, batch: GlobalBatch) -> LossInputs:
        """See `TrainStep.loss_inputs`."""
        return super().loss_inputs(with_observers(self.step_region.records, parameters), batch)

    def gradients(
        self, parameters: Tree, batch: GlobalBatch, key: Array | None, scale: Array | None = None
    ) -> tuple[Array, dict[str, Any], Tree]:
        """See `TrainStep.gradients`; the largest scores are among the losses by name."""
        loss, losses, gradients = super().gradients(parameters, batch, key, scale)
        largest = only_observers(gradients)
        if scale is not None:  # a power of two, by which all gradients were divided; scores are not scaled
            largest = jax.tree.map(lambda scores: scores * scale, largest)
        # Among the losses, with which `apply_gradients` receives them.
        return loss, {**losses, LARGEST_SCORES: largest}, without_observers(gradients)

    def apply_gradients(
        self, state: State, batch: GlobalBatch, loss: Array, losses: dict[str, Any], gradients: Tree
    ) -> tuple[State, dict[str, Array]]:
        """See `TrainStep.apply_gradients`."""
        # The scores of all heads are not logged: their largest is.
        after, metrics = super().apply_gradients(state, batch, loss, losses, gradients)
        every = jax.tree.leaves(metrics.pop(LARGEST_SCORES))
        return after, {**metrics, METRIC: jnp.stack([jnp.max(scores) for scores in every]).max()}

    def rescaled(self, updated: Tree, losses: dict[str, Any], state: State) -> Tree:
        """See `TrainStep.rescaled`."""
        # After the update, so that the next step reads weights whose scores are bounded.
        updated = super().rescaled(updated, losses, state)
        with jax.named_scope("qk_clip"):
            options = self.config.optimizer
            return clipped(self.config.model, options.qk_clip, options.qk_clip_alpha, updated, losses[LARGEST_SCORES])


def clipped(model: Model, threshold: float, alpha: float, weights: Tree, largest: Tree) -> Tree:
    """Returns weights in which queries and keys of heads with larger scores than `threshold` are scaled.

    Args:
      model: the model.
      threshold: of scores.
      alpha: the share of queries in the factor's logarithm.
      weights: of layers, stacked; float32.
      largest: scores [layers, heads], in a tree like the weights', named `LARGEST_SCORES`.
    """
    if LARGEST_SCORES in largest:
        scores = largest[LARGEST_SCORES]
        scores = sharded_by_rows(scores)
        clip = _clip_latent if model.kv_lora_rank else _clip_heads
        return clip(model, threshold, alpha, weights, scores)
    below = {name: clipped(model, threshold, alpha, weights[name], inside) for name, inside in largest.items()}
    return {**weights, **below}


def _factors(scores: Array, threshold: float) -> Array:
    # The maximum keeps the branch that is not taken finite.
    return jnp.where(scores > threshold, threshold / jnp.maximum(scores, threshold), 1.0)


def _clip_heads(
    model: Model, threshold: float, alpha: float, weights: Tree, scores: Float[Array, "layers heads"]
) -> Tree:
    """Scales the weights and biases of ordinary or grouped attention."""
    layers, keys = len(scores), num_kv_heads(model)
    of_groups = _factors(scores.reshape(layers, keys, -1).max(-1), threshold)
    of_queries, of_keys = jnp.repeat(of_groups, model.num_heads // keys, axis=1) ** alpha, of_groups ** (1 - alpha)
    product = weights["qkv"]
    if keys == model.num_heads:
        # Query, key and value are one matrix; values keep their size.
        both = jnp.stack([of_queries, of_keys, jnp.ones_like(of_keys)], axis=1)
        return {**weights, "qkv": _scaled(product, both[..., None])}
    pair = jnp.stack([of_keys, jnp.ones_like(of_keys)], axis=1)
    query, key_value = _scaled(product["query"], of_queries[..., None]), _scaled(product["key_value"], pair[..., None])
    return {**weights, "qkv": {**product, "query": query, "key_value": key_value}}


def _clip_latent(
    model: Model, threshold: float, alpha: float, weights: Tree, scores: Float[Array, "layers heads"]
) -> Tree:
    """Scales the weights of latent attention: its queries, and the part of its keys that each head has."""
    factor = _factors(scores, threshold)[..., None]
    still, turned, values = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    # The rotated part of a key belongs to all heads and can't be scaled for one: its query takes the entire factor.
    of_query = jnp.concatenate([factor**alpha] * still + [factor] * turned, axis=-1)
    of_keys = jnp.concatenate([factor ** (1 - alpha)] * still + [jnp.ones_like(factor)] * values, axis=-1)
    query = "query_up" if model.q_lora_rank else "query"
    return {
        **weights,
        query: _scaled(weights[query], of_query),
        "key_value_up": _scaled(weights["key_value_up"], of_keys),
    }


def _scaled(linear: Tree, factor: Float[Array, "layers ..."]) -> Tree:
    """Multiplies a product's weight [layers, input, ...] and bias, if any, [layers, ...] by factors [layers, ...]."""
    after = {**linear, "weight": times_factors(linear["weight"], factor[:, None])}
    return after if linear.get("bias") is None else {**after, "bias": times_factors(linear["bias"], factor)}
