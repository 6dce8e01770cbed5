"""BERT as Hugging Face's transformers computes it: logits, losses and every gradient, from the same random weights.

Post-LN is their BertForPreTraining, pre-LN their MegatronBertForPreTraining.
"""

from typing import Any

import jax
import numpy as np
import pytest

from tests.parity.compare import (
    Named,
    assert_same_gradients,
    computed,
    gradients_of,
    padded,
    relative,
    shaken,
    weights_of,
)
from tests.tiny import host_batch, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

POST = {"norm_placement": "post", "norm_epsilon": 1e-12, "activation": "gelu_exact"}
ODD = {"num_layers": 3, "hidden_size": 48, "num_heads": 8, "mlp_size": 80, "vocab_size": 256, "tie_embeddings": False}
CASES = {"post-LN": POST, "post-LN, odd sizes, untied": POST | ODD, "pre-LN": {}, "pre-LN, odd sizes, untied": ODD}


def reference_model(config) -> Any:
    """transformers' model of a config, without dropout."""
    model = config.model
    kinds = {
        "post": (transformers.BertConfig, transformers.BertForPreTraining),
        "pre": (transformers.MegatronBertConfig, transformers.MegatronBertForPreTraining),
    }
    settings, network = kinds[model.norm_placement]
    theirs = settings(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=model.mlp_size or 4 * model.hidden_size,
        hidden_act={"gelu": "gelu_new", "gelu_exact": "gelu"}[model.activation],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=model.sequence_length,
        type_vocab_size=2,
        layer_norm_eps=model.norm_epsilon,
        tie_word_embeddings=model.tie_embeddings,
        attn_implementation="eager",
    )
    return shaken(lambda: network(theirs))


def as_ours(named: Named, config) -> dict[str, Any]:
    """transformers' tensors (weights, or their gradients) under our names and in our shapes."""
    model = config.model
    split, hidden = (model.num_heads, model.hidden_size // model.num_heads), (model.hidden_size,)
    post = model.norm_placement == "post"

    def linear(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> dict[str, np.ndarray]:
        weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
        return {"weight": weight.T.reshape(*inputs, *outputs), "bias": bias.reshape(outputs)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": named[f"{name}.weight"], "bias": named[f"{name}.bias"]}

    def layer(name: str) -> dict[str, Any]:
        parts = [linear(f"{name}.attention.self.{part}", hidden, split) for part in ("query", "key", "value")]
        inner = named[f"{name}.intermediate.dense.bias"].shape
        return {
            "attention_norm": norm(f"{name}.attention.output.LayerNorm" if post else f"{name}.attention.ln"),
            "attention": {
                "qkv": {
                    "weight": np.stack([part["weight"] for part in parts], 1),
                    "bias": np.stack([part["bias"] for part in parts]),
                },
                "output": linear(f"{name}.attention.output.dense", split, hidden),
            },
            "mlp_norm": norm(f"{name}.output.LayerNorm" if post else f"{name}.ln"),
            "mlp": {
                "up": linear(f"{name}.intermediate.dense", hidden, inner),
                "down": linear(f"{name}.output.dense", inner, hidden),
            },
        }

    layers = [layer(f"bert.encoder.layer.{i}") for i in range(model.num_layers)]
    found = {
        "embedding": padded(config, named["bert.embeddings.word_embeddings.weight"]),
        "positions": named["bert.embeddings.position_embeddings.weight"],
        "token_types": named["bert.embeddings.token_type_embeddings.weight"],
        "stack": {"layers": jax.tree.map(lambda *each: np.stack(each), *layers)},
        "head": {
            "dense": linear("cls.predictions.transform.dense", hidden, hidden),
            "norm": norm("cls.predictions.transform.LayerNorm"),
            # Untied, their output layer has a bias of its own, and the head's is not used.
            "bias": padded(config, named[f"cls.predictions.{'bias' if model.tie_embeddings else 'decoder.bias'}"]),
        },
        "order": {
            "pooler": linear("bert.pooler.dense", hidden, hidden),
            "classifier": linear("cls.seq_relationship", hidden, (2,)),
        },
    }
    found |= {"embedding_norm": norm("bert.embeddings.LayerNorm")} if post else {"final_norm": norm("bert.encoder.ln")}
    if not model.tie_embeddings:
        found["output"] = padded(config, named["cls.predictions.decoder.weight"])
    return found


def their_losses(network, batch) -> tuple[Any, Any, Any, Any]:
    """Logits of both heads, the loss and its two parts."""
    tensors = {name: torch.tensor(array) for name, array in batch.items() if array.dtype != np.uint32}
    long = {
        name: tensors[name].long() for name in ("tokens", "token_types", "padding_mask", "labels", "sentence_order")
    }
    out = network(long["tokens"], attention_mask=long["padding_mask"], token_type_ids=long["token_types"])
    cross_entropy = torch.nn.functional.cross_entropy
    masked = cross_entropy(out.prediction_logits.flatten(0, 1), long["labels"].flatten(), ignore_index=-1)
    order = cross_entropy(out.seq_relationship_logits, long["sentence_order"])
    return out.prediction_logits, out.seq_relationship_logits, masked, order


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        pytest.param(CASES[name], mesh, id=f"{mesh}-{name}", marks=[] if is_chosen else [pytest.mark.exhaustive])
        for name, usual in zip(CASES, ("2x4", "1x1", "1x1", "2x4"), strict=True)
        for mesh, is_chosen in ((mesh, mesh == usual) for mesh in ("1x1", "2x4"))
    ],
)
def test_logits_losses_and_gradients_equal_transformers(settings, mesh):
    config = tiny_config(family="bert", hidden_dropout=0.0, attention_dropout=0.0, **settings)
    network, batch = reference_model(config), host_batch(config, 0)
    logits, order_logits, masked, order = their_losses(network, batch)
    (masked + order).backward()

    def forward(model: Any, batch: Any) -> Any:
        hidden = model(batch["tokens"], batch["token_types"], batch["padding_mask"])
        return model.logits(hidden), model.order(hidden)

    found = computed(config, mesh, as_ours(weights_of(network), config), forward)
    found_logits, found_order = found.outputs
    real = batch["padding_mask"].astype(bool)
    found_logits = found_logits[..., : config.model.vocab_size]
    assert relative(found_logits[real], logits.detach().numpy()[real]) < 1e-4
    assert relative(found_order, order_logits.detach().numpy()) < 1e-4
    losses = {"masked_lm": masked, "sentence_order": order}
    for ours, theirs in ((found.loss, masked + order), *((found.parts[name], losses[name]) for name in losses)):
        assert abs(float(ours) / theirs.item() - 1) < 1e-4
    assert_same_gradients(found.gradients, as_ours(gradients_of(network), config), 1e-4)
