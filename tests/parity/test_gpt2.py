"""GPT-2 as Hugging Face's transformers computes it: logits, loss and every gradient, from the same random weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.sharding.axes import use_rules
from mtjax.train.step import make_program
from tests.tiny import batch_of, host_batch, mesh_of, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install 'mtjax[parity]'")
transformers = pytest.importorskip("transformers", reason="needs the extra parity: pip install 'mtjax[parity]'")

SHAPES = [
    {},
    {"num_layers": 3, "hidden_size": 48, "num_heads": 8, "mlp_size": 80, "vocab_size": 256},
]


def reference_model(config) -> Any:
    """transformers' model of a config, with weights large enough for every part to matter, and no dropout."""
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
    torch.manual_seed(0)
    network = transformers.GPT2LMHeadModel(theirs)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


def as_ours(named: dict[str, np.ndarray], config) -> dict[str, Any]:
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
    table = named["transformer.wte.weight"]
    return {
        "embedding": np.pad(table, [(0, 256 - len(table)), (0, 0)]),
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


def relative(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("shape", SHAPES, ids=["padded vocabulary", "odd sizes"])
@pytest.mark.parametrize("mesh", ["1x1", "2x4"])
def test_logits_loss_and_gradients_equal_transformers(shape, mesh):
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0, **shape)
    network = reference_model(config)
    batch = host_batch(config, 0)
    tokens, labels = (torch.tensor(batch[name], dtype=torch.long) for name in ("tokens", "labels"))
    mask = torch.tensor(batch["loss_mask"])
    logits = network(tokens).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    loss = (losses * mask.flatten()).sum() / mask.sum()
    loss.backward()

    program = make_program(config, mesh_of(mesh))
    weights = as_ours({n: p.detach().numpy() for n, p in network.named_parameters()}, config)
    parameters = jax.tree.map(
        lambda array, sharding: jax.device_put(jnp.asarray(array), sharding),
        weights,
        program.state_sharding.parameters,
    )
    placed = batch_of(program, 0)

    def our_logits(parameters, tokens):
        with use_rules(program.layout.rules):
            model = program.model(parameters)
            return model.logits(model(tokens))

    with jax.set_mesh(program.mesh):
        found_logits = np.asarray(jax.jit(our_logits)(parameters, placed["tokens"]))
        found_loss, _, gradients = jax.jit(lambda p, b: program.gradients(p, b, None))(parameters, placed)

    assert relative(found_logits[..., : config.model.vocab_size], logits.detach().numpy()) < 1e-4
    assert abs(float(found_loss) / loss.item() - 1) < 1e-4
    expected = as_ours({n: p.grad.numpy() for n, p in network.named_parameters()}, config)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        theirs = expected
        for key in path:
            theirs = theirs[key.key]
        assert relative(gradient, theirs) < 1e-4, jax.tree_util.keystr(path)
