"""Matrices between the tables of tokens and the hidden states, where their widths differ (OPT-350M)."""

import jax
from jax import Array

from mtjax.config import Model
from mtjax.config.sizes import embedding_width
from mtjax.layout.weights import replicated_product
from mtjax.models.ops import Linear

NUMBER = 3
"""From which the matrices' key is derived, so that the other parameters are drawn alike with and without them."""


def table_projections(model: Model, key: Array) -> tuple[Linear, Linear]:
    """Draws the matrices from the width of the tables to that of the hidden states, and back."""
    table, hidden = embedding_width(model), model.hidden_size
    in_key, out_key = jax.random.split(jax.random.fold_in(key, NUMBER))
    # Replicated over tensor parallel ranks: with sequence parallelism each applies them to its own tokens.
    return _matrix(table, hidden, model.init_std, in_key), _matrix(hidden, table, model.init_std, out_key)


def _matrix(inputs: int, outputs: int, std: float, key: Array) -> Linear:
    return Linear(*replicated_product(inputs, outputs), std=std, bias=False, sequence="act_seq", key=key)
