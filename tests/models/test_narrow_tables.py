"""A post-LN decoder whose tables are narrower than its hidden states, against numpy in float64."""

from typing import Any

import jax
import numpy as np

from mtjax.sharding.axes import use_rules
from tests.tiny import batch_of, final_hidden, initial_state, model_logits, program_of

EPSILON, TOLERANCE = 1e-5, 1e-5


def normed(x: np.ndarray, norm: dict[str, np.ndarray]) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON) * norm["scale"] + norm["bias"]


def linear(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    return x @ weights["weight"] + weights["bias"]


def attended(x: np.ndarray, weights: Any) -> np.ndarray:
    """Causal attention of 8 heads."""
    weight, bias = weights["qkv"]["weight"], weights["qkv"]["bias"]
    query, key, value = np.moveaxis(np.einsum("bsh,hqad->bsqad", x, weight) + bias, 2, 0)
    scores = np.einsum("bsad,btad->bast", query, key) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("bast,btad->bsad", shares / shares.sum(-1, keepdims=True), value)
    return np.einsum("bsad,adh->bsh", mixed, weights["output"]["weight"]) + weights["output"]["bias"]


def fed_forward(x: np.ndarray, weights: Any) -> np.ndarray:
    inner = linear(x, weights["up"])
    tanh = np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3))
    return linear(0.5 * inner * (1 + tanh), weights["down"])


def logits_of(weights: Any, tokens: np.ndarray) -> np.ndarray:
    x = weights["embedding"][tokens] @ weights["project_in"]["weight"] + weights["positions"]
    layers = weights["stack"]["layers"]
    for number in range(2):
        layer = jax.tree.map(lambda stacked, number=number: stacked[number], layers)
        x = normed(x + attended(x, layer["attention"]), layer["attention_norm"])
        x = normed(x + fed_forward(x, layer["mlp"]), layer["mlp_norm"])
    return x @ weights["project_out"]["weight"] @ weights["embedding"].T


def test_logits_are_numpys() -> None:
    settings = {"norm_placement": "post", "embedding_size": 24, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    program = program_of("1x1", **settings, init_std=0.3)
    parameters, batch = initial_state(program).parameters, batch_of(program, 0)
    assert "final_norm" not in parameters

    def run(parameters: Any, tokens: Any) -> Any:
        with use_rules(program.layout.rules):
            model: Any = program.model(parameters)
            return model_logits(model, final_hidden(model, tokens))

    with jax.set_mesh(program.mesh):
        found = np.asarray(jax.jit(run)(parameters, batch["tokens"]))
    wide = jax.tree.map(lambda array: np.asarray(array, np.float64), parameters)
    expected = logits_of(wide, np.asarray(batch["tokens"]))
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()
