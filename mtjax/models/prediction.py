"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers that predict tokens further ahead.

Layer k combines the final hidden states of the layer before it (of the model for k = 1), normalized, with the
embeddings of the tokens k places ahead. Its output predicts the tokens that are k places after the labels, with the
model's output table. All of it belongs to the losses: pipeline stages run it with the head, on the last one.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Shaped

from mtjax.config import Model
from mtjax.layout.weights import replicated_product
from mtjax.models.language_model import Batch, Keys
from mtjax.models.layer import Layer
from mtjax.models.layer_context import LayerContext
from mtjax.models.ops import Linear, make_norm
from mtjax.models.routers import COUNTS, report_weights

PREFIX = "mtp_"
"""Prefix of the names of these layers' modules, losses, and routers' losses and counters."""


def loss_name(number: int) -> str:
    """Returns the name of the loss of layer `number`, from 1 on."""
    return f"{PREFIX}{number}_loss"


def ahead(values: Shaped[Array, "batch seq"], distance: int) -> Shaped[Array, "batch seq"]:
    """Shifts each sample's values, so that a token has those of the token `distance` ahead; 0 where there is none."""
    return jnp.pad(values[:, distance:], ((0, 0), (0, distance)))


def prediction_number(parameter: str) -> int:
    """Returns the number of the layer, from 1 on, to which a parameter with this dotted name belongs; 0 for none."""
    module = parameter.partition(".")[0]
    return int(module[len(PREFIX) :]) if module.startswith(PREFIX) else 0


def coefficient(model: Model) -> float:
    """Returns the coefficient of the loss of each layer."""
    # The mean over the layers, times the factor, as in DeepSeek-V3's equation 25.
    return model.mtp_loss_scaling_factor / model.mtp_num_layers


def prediction_weights(model: Model, batch: Batch) -> dict[str, Float[Array, "batch seq"]]:
    """Returns the weight of each token in the losses of the layers, by their names; {} without.

    A loss is a mean over the tokens of the global batch whose predicted token has a loss in the model itself, and is in
    the same document where these are kept apart.

    Args:
      model: with the number of layers.
      batch: of entire samples; the global batch.
    """
    found, segments = {}, batch.get("segment_ids")
    for number in range(1, model.mtp_num_layers + 1):
        weights = ahead(batch["loss_mask"], number)
        if segments is not None:
            # The zeros that follow a sample may equal its segment, and have weight 0 anyway.
            weights = jnp.where(ahead(segments, number) == segments, weights, 0)
        found[loss_name(number)] = coefficient(model) * weights / jnp.maximum(weights.sum(), 1)
    return found


def prediction_reports(model: Model, num_samples: int) -> dict[str, Float[Array, " batch"]]:
    """Returns the weights of the losses and counters of these layers' routers; {} without."""
    reports = report_weights(model, num_samples) if model.mtp_num_layers else {}
    return {f"{PREFIX}{name}": weight for name, weight in reports.items()}


def with_predictions(model: Model, parts: dict[str, Array]) -> dict[str, Array]:
    """Prepares the losses and counters of a step for its metrics: the layers' losses without their coefficient, so that
    they compare with the model's own, and the counters of their experts as rows after those of the other layers."""
    for number in range(1, model.mtp_num_layers + 1):
        parts = parts | {loss_name(number): parts[loss_name(number)] / coefficient(model)}
    # Counters of all layers are one array, in which the metrics number the layers.
    for name in COUNTS:
        if (rows := parts.get(f"{PREFIX}{name}")) is not None:
            joined = jnp.concatenate([parts[name], rows])
            parts = {key: part for key, part in parts.items() if key != f"{PREFIX}{name}"} | {name: joined}
    return parts


def keys_of(predictor: "Predictor", keys: Keys) -> Keys:
    """Derives the dropout keys of a layer from those of the samples."""
    return None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, predictor.layer_number))(keys)


def remove_predictors(model: Any) -> None:
    """Removes the layers from a model, which generates text without them."""
    for number in range(1, getattr(model, "num_predictors", 0) + 1):
        delattr(model, f"{PREFIX}{number}")
    model.num_predictors = 0


class Predictor(nnx.Module):
    """One layer of multi-token prediction, with the projection of its inputs and its final norm."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, number: int, key: Array) -> None:
        """Draws the parameters of layer `number`, from 1 on."""
        # Numbered after the model's layers, so that no dropout key is used twice.
        self.number, self.layer_number = number, model.num_layers + number - 1
        key = jax.random.fold_in(key, self.layer_number)
        self.embedding_norm, self.hidden_norm = make_norm(model, dtype), make_norm(model, dtype)
        # Replicated over tensor parallel ranks: with sequence parallelism each applies it to its own tokens.
        sizes = replicated_product(model.hidden_size, model.hidden_size, sources=2)
        projection_key, layer_key = jax.random.split(key)
        self.projection = Linear(*sizes, std=model.init_std, bias=False, sequence="act_seq", key=projection_key)
        self.layer = Layer(model, dtype, kind=kind, key=layer_key)
        self.final_norm = make_norm(model, dtype)

    def combined(
        self, embedded: Float[Array, "batch act_seq embed"], hidden: Float[Array, "batch act_seq embed"]
    ) -> Float[Array, "batch act_seq embed"]:
        """Computes the layer's input from embeddings of later tokens and normalized hidden states."""
        sources = jnp.stack([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=2)
        return self.projection(sources)


def run_predictor(
    hidden: Float[Array, "batch act_seq embed"],
    predictor: Predictor,
    embedded: Float[Array, "batch act_seq embed"],
    context: LayerContext,
) -> tuple[Float[Array, "batch act_seq embed"], dict[str, Array]]:
    """Runs a layer without its final norm; returns its output, and the report of its router, [1, batch, ...]."""
    x, states = predictor.layer(predictor.combined(embedded, hidden), context, None)
    report = {} if states is None else states["experts"]
    return x, jax.tree.map(lambda a: a[None], report)
