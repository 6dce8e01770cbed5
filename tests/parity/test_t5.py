"""T5 as Hugging Face's transformers computes it: logits, loss and every gradient, from the same random weights."""

from typing import Any

import jax
import numpy as np
import pytest

from mtjax.config.sizes import decoder_layers, head_dim
from mtjax.models.relative import relative_buckets
from tests.parity.compare import (
    Named,
    assert_same_gradients,
    computed,
    gradients_of,
    next_token_loss,
    padded,
    relative,
    shaken,
    weights_of,
)
from tests.tiny import host_batch, model_logits, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install '.[parity]'")

V1_0 = {"decoder_sequence_length": 8, "relative_buckets": 8, "relative_max_distance": 12}
V1_1 = {"activation": "geglu", "tie_embeddings": False, "decoder_sequence_length": 24, "num_decoder_layers": 3}
V1_1 |= {"num_layers": 1, "head_dim": 6, "mlp_size": 80, "vocab_size": 256, "relative_max_distance": 40}


UMT5 = V1_0 | {"relative_bias_layers": "all", "activation": "geglu", "tie_embeddings": False}
MT5 = V1_0 | {"activation": "geglu", "output_scale": 32**0.5}
"""Tied, and not scaled."""


def reference_model(config) -> Any:
    """transformers' model of a config, without dropout."""
    model = config.model
    kind = "UMT5" if model.relative_bias_layers == "all" else "MT5" if model.output_scale != 1.0 else "T5"
    theirs = getattr(transformers, f"{kind}Config")(
        vocab_size=model.vocab_size,
        d_model=model.hidden_size,
        d_kv=head_dim(model),
        d_ff=model.mlp_size or 4 * model.hidden_size,
        num_layers=model.num_layers,
        num_decoder_layers=decoder_layers(model),
        num_heads=model.num_heads,
        relative_attention_num_buckets=model.relative_buckets,
        relative_attention_max_distance=model.relative_max_distance,
        dropout_rate=0.0,
        layer_norm_epsilon=model.norm_epsilon,
        feed_forward_proj={"relu": "relu", "geglu": "gated-gelu"}[model.activation],
        tie_word_embeddings=model.tie_embeddings,
        decoder_start_token_id=0,
        attn_implementation="eager",
    )
    theirs.tie_word_embeddings = model.tie_embeddings  # its constructor says True whatever it is given

    def make() -> Any:
        network = getattr(transformers, f"{kind}ForConditionalGeneration")(theirs)
        # Version 1.1 has one input table and another for the output; this class ties all four or none.
        network.encoder.embed_tokens = network.decoder.embed_tokens = network.shared
        return network

    return shaken(make, scale=0.3)


def as_ours(named: Named, config) -> dict[str, Any]:
    """transformers' tensors (weights, or their gradients) under our names and in our shapes."""
    model = config.model
    split, hidden = (model.num_heads, head_dim(model)), (model.hidden_size,)

    def weight(name: str, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> np.ndarray:
        return named[f"{name}.weight"].T.reshape(*inputs, *outputs)

    in_layers = model.relative_bias_layers == "all"

    def table(name: str) -> dict[str, Any]:
        return {"relative": {"table": named[f"{name}.layer.0.SelfAttention.relative_attention_bias.weight"]}}

    def attention(name: str) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        return [weight(f"{name}.{part}", hidden, split) for part in "qkv"], {
            "weight": weight(f"{name}.o", split, hidden)
        }

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": named[f"{name}.layer_norm.weight"]}

    def mlp(name: str) -> dict[str, Any]:
        name = f"{name}.DenseReluDense"
        ups = [weight(f"{name}.{up}", hidden, (-1,)) for up in ("wi", "wi_0", "wi_1") if f"{name}.{up}.weight" in named]
        up = ups[0] if len(ups) == 1 else np.stack(ups, 1)
        return {"up": {"weight": up}, "down": {"weight": weight(f"{name}.wo", (-1,), hidden)}}

    def layer(name: str, is_decoder: bool) -> dict[str, Any]:
        parts, output = attention(f"{name}.layer.0.SelfAttention")
        last = f"{name}.layer.{2 if is_decoder else 1}"
        found = {
            "attention_norm": norm(f"{name}.layer.0"),
            "attention": {
                "qkv": {"weight": np.stack(parts, 1)},
                "output": output,
                **(table(name) if in_layers else {}),
            },
            "mlp_norm": norm(last),
            "mlp": mlp(last),
        }
        if not is_decoder:
            return found
        (query, *key_value), output = attention(f"{name}.layer.1.EncDecAttention")
        cross = {"query": {"weight": query}, "key_value": {"weight": np.stack(key_value, 1)}, "output": output}
        return found | {"cross_norm": norm(f"{name}.layer.1"), "cross": cross}

    def half(name: str, num_layers: int) -> dict[str, Any]:
        layers = [layer(f"{name}.block.{i}", name == "decoder") for i in range(num_layers)]
        return {
            **({} if in_layers else table(f"{name}.block.0")),
            "stack": {"layers": jax.tree.map(lambda *each: np.stack(each), *layers)},
            "final_norm": {"scale": named[f"{name}.final_layer_norm.weight"]},
        }

    output = {} if model.tie_embeddings else {"output": padded(config, named["lm_head.weight"])}
    return output | {
        "embedding": padded(config, named["shared.weight"]),
        "encoder": half("encoder", model.num_layers),
        "decoder": half("decoder", decoder_layers(model)),
    }


KINDS = {"1.0": V1_0, "1.1": V1_1, "umt5": UMT5, "mt5": MT5}


@pytest.mark.parametrize(
    ("settings", "mesh"),
    [
        pytest.param(KINDS[name], mesh, id=f"{mesh}-{name}", marks=[] if is_chosen else [pytest.mark.exhaustive])
        for name, usual in zip(KINDS, ("1x1", "2x4", "2x4", "1x1"), strict=True)
        for mesh, is_chosen in ((mesh, mesh == usual) for mesh in ("1x1", "2x4"))
    ],
)
def test_logits_loss_and_gradients_equal_transformers(settings, mesh):
    config = tiny_config(family="t5", hidden_dropout=0.0, attention_dropout=0.0, **settings)
    network, batch = reference_model(config), host_batch(config, 0)
    long = {name: torch.tensor(array).long() for name, array in batch.items() if array.dtype == np.int32}
    logits = network(
        long["encoder_tokens"], attention_mask=long["encoder_mask"], decoder_input_ids=long["decoder_tokens"]
    ).logits
    loss = next_token_loss(logits, batch)
    loss.backward()

    def forward(model: Any, batch: Any) -> Any:
        return model_logits(model, model(batch["encoder_tokens"], batch["decoder_tokens"], batch["encoder_mask"]))

    found = computed(config, mesh, as_ours(weights_of(network), config), forward)
    assert relative(found.outputs[..., : config.model.vocab_size], logits.detach().numpy()) < 1e-4
    assert abs(found.loss / loss.item() - 1) < 1e-4
    assert_same_gradients(found.gradients, as_ours(gradients_of(network), config), 1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 12), (4, 5)])
def test_kinds_of_distance_are_transformers(is_causal, buckets, distance):
    from transformers.models.t5.modeling_t5 import T5Attention

    place = torch.arange(300)
    theirs = T5Attention._relative_position_bucket(
        place[None, :] - place[:, None], bidirectional=not is_causal, num_buckets=buckets, max_distance=distance
    )
    place = np.arange(300)
    back = place[:, None] - place
    ours = relative_buckets(jax.numpy.asarray(back), is_causal=is_causal, num_buckets=buckets, max_distance=distance)
    np.testing.assert_array_equal(ours, theirs.numpy())
