"""GPT-2 as Hugging Face's transformers computes it: logits, loss and every gradient, from the same random weights."""

from typing import Any

import numpy as np
import pytest

from tests.parity.compare import Named, assert_next_token_parity, padded, shaken
from tests.tiny import tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

SHAPES = [
    {},
    {"num_layers": 3, "hidden_size": 48, "num_heads": 8, "mlp_size": 80, "vocab_size": 256},
]


def reference_model(config) -> Any:
    """transformers' model of a config, without dropout."""
    model = config.model
    theirs = transformers.GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.sequence_length,
        bos_token_id=0,
        eos_token_id=0,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_heads,
        n_inner=model.mlp_size,
        layer_norm_epsilon=model.norm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return shaken(lambda: transformers.GPT2LMHeadModel(theirs))


def as_ours(named: Named, config) -> dict[str, Any]:
    """transformers' tensors (weights, or their gradients) under our names and in our shapes."""
    model = config.model
    heads, width = model.num_heads, model.hidden_size // model.num_heads

    def stacked(name: str, *shape: int) -> np.ndarray:
        layers = [named[f"transformer.h.{i}.{name}"] for i in range(model.num_layers)]
        return np.stack([layer.reshape(shape) if shape else layer for layer in layers])

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    def linear(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[str, np.ndarray]:
        return {"weight": stacked(f"{name}.weight", *inputs, *outputs), "bias": stacked(f"{name}.bias", *outputs)}

    hidden, inner = (model.hidden_size,), (model.mlp_size or 4 * model.hidden_size,)
    return {
        "embedding": padded(config, named["transformer.wte.weight"]),
        "positions": named["transformer.wpe.weight"],
        "final_norm": {"scale": named["transformer.ln_f.weight"], "bias": named["transformer.ln_f.bias"]},
        "stack": {
            "layers": {
                "attention_norm": norm("ln_1"),
                "attention": {
                    "qkv": linear("attn.c_attn", hidden, (3, heads, width)),
                    "output": linear("attn.c_proj", (heads, width), hidden),
                },
                "mlp_norm": norm("ln_2"),
                "mlp": {"up": linear("mlp.c_fc", hidden, inner), "down": linear("mlp.c_proj", inner, hidden)},
            }
        },
    }


@pytest.mark.parametrize(
    ("shape", "mesh"),
    [
        pytest.param(SHAPES[0], "2x4", id="2x4-padded vocabulary"),
        pytest.param(SHAPES[1], "1x1", id="1x1-odd sizes"),
        pytest.param(SHAPES[0], "1x1", id="1x1-padded vocabulary", marks=pytest.mark.exhaustive),
        pytest.param(SHAPES[1], "2x4", id="2x4-odd sizes", marks=pytest.mark.exhaustive),
    ],
)
def test_logits_loss_and_gradients_equal_transformers(shape, mesh):
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0, **shape)
    assert_next_token_parity(reference_model(config), config, mesh, lambda named: as_ours(named, config), 1e-4)
