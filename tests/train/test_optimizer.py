import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtjax.layout.layouts import is_decayed
from mtjax.train.optimizer import make_optimizer
from tests.tiny import program_of, records_like, tiny_config


def test_only_matrices_decay():
    decayed = {record.name: record.is_matrix for record in jax.tree.leaves(program_of("1x1").records)}
    assert decayed == {
        "embedding": True,
        "positions": True,
        "final_norm.bias": False,
        "final_norm.scale": False,
        "stack.layers.attention.output.bias": False,
        "stack.layers.attention.output.weight": True,
        "stack.layers.attention.qkv.bias": False,
        "stack.layers.attention.qkv.weight": True,
        "stack.layers.attention_norm.bias": False,
        "stack.layers.attention_norm.scale": False,
        "stack.layers.mlp.down.bias": False,
        "stack.layers.mlp.down.weight": True,
        "stack.layers.mlp.up.bias": False,
        "stack.layers.mlp.up.weight": True,
        "stack.layers.mlp_norm.bias": False,
        "stack.layers.mlp_norm.scale": False,
    }


@pytest.mark.parametrize(
    "settings",
    [
        {"family": "llama", "num_kv_heads": 4, "num_experts": 4, "shared_expert_size": 16, "router_score": "sigmoid"}
        | {"router_bias": True, "qk_norm": True, "mlp_size": 48}
        | {"router_linear_bias": True, "expert_bias": True, "shared_expert_gate": True},
        {"family": "bert"},
        {"family": "t5", "decoder_sequence_length": 8},
        {"family": "gpt", "lora_rank": 2},
    ],
    ids=["experts", "bert", "t5", "lora"],
)
def test_what_has_two_dimensions_and_is_no_bias_decays(settings):
    """Megatron's rule, by the dimensions that a parameter has in a layer."""
    for record in jax.tree.leaves(program_of("1x1", **settings).records):
        has_two = len(record.layer_logical_axes) > 1 and not record.name.endswith(".bias")
        assert is_decayed(record.logical_axes) == has_two, record.name


def test_a_table_of_relative_positions_decays():
    """Its update without a gradient is minus the rate times the decay."""
    config = tiny_config(learning_rate=0.1, min_learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    parameters = {"table": jnp.ones((8, 4))}
    optimizer = make_optimizer(config, records_like({"table": ("buckets", "heads")}, parameters))
    updates, _ = optimizer.update({"table": jnp.zeros((8, 4))}, optimizer.init(parameters), parameters)
    np.testing.assert_allclose(updates["table"], -0.05, rtol=1e-6)


@pytest.mark.parametrize("size", [1.0, 0.01, 0.0], ids=["clipped", "not clipped", "zero"])
def test_update_is_clipped_adamw_with_decoupled_decay(size):
    """Against the update written out in float64: Loshchilov and Hutter, algorithm 2."""
    config = tiny_config(
        learning_rate=0.1,
        min_learning_rate=0.1,
        initial_learning_rate=0.0,
        warmup_steps=0,
        weight_decay=0.5,
        clip_grad_norm=1.0,
    )
    axes = {"weight": ("embed", "mlp"), "scale": ("layers", "embed")}
    random = np.random.default_rng(0)
    parameters = {name: random.normal(size=(3, 4)) for name in axes}
    optimizer = make_optimizer(config, records_like(axes, parameters))
    state = optimizer.init(jax.tree.map(jnp.float32, parameters))
    mean = {name: np.zeros((3, 4)) for name in axes}
    square = {name: np.zeros((3, 4)) for name in axes}
    for step in range(1, 4):
        gradients = {name: size * random.normal(size=(3, 4)) for name in axes}
        single = jax.tree.map(jnp.float32, (gradients, parameters))
        updates, state = optimizer.update(single[0], state, single[1])
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            gradient = gradient / max(norm, 1.0)
            mean[name] = 0.9 * mean[name] + 0.1 * gradient
            square[name] = 0.999 * square[name] + 0.001 * gradient**2
            adam = mean[name] / (1 - 0.9**step) / (np.sqrt(square[name] / (1 - 0.999**step)) + 1e-8)
            decay = 0.5 * parameters[name] if name == "weight" else 0.0
            np.testing.assert_allclose(updates[name], -0.1 * (adam + decay), rtol=1e-4, atol=1e-6)
        parameters = optax.apply_updates(parameters, jax.tree.map(np.asarray, updates))


def test_weight_decay_that_grows_is_of_its_step():
    """The updates of parameters that get no gradient are minus the rate times the decay of that step."""
    settings = {"start_weight_decay": 0.1, "weight_decay": 0.5, "weight_decay_style": "linear", "steps": 4}
    config = tiny_config(learning_rate=0.1, min_learning_rate=0.1, warmup_steps=0, **settings)
    parameters = {"weight": jnp.ones((3, 4)), "scale": jnp.ones(3)}
    optimizer = make_optimizer(config, records_like({"weight": ("embed", "mlp"), "scale": ("embed",)}, parameters))
    state = optimizer.init(parameters)
    for decay in (0.1, 0.2, 0.3, 0.4, 0.5, 0.5):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, parameters), state, parameters)
        np.testing.assert_allclose(updates["weight"], -0.1 * decay, rtol=1e-6)
        np.testing.assert_array_equal(updates["scale"], 0.0)


@pytest.mark.parametrize("growth", [{}, {"start_weight_decay": 0.0, "weight_decay_style": "cosine"}])
def test_the_state_is_that_of_older_checkpoints(growth):
    """Adam's count and moments, and the schedule's count, by their places; no more where the weight decay grows."""
    parameters = {"weight": jnp.ones((3, 4))}
    records = records_like({"weight": ("embed", "mlp")}, parameters)
    state = make_optimizer(tiny_config(**growth), records).init(parameters)
    constant = make_optimizer(tiny_config(), records).init(parameters)
    assert jax.tree.structure(state) == jax.tree.structure(constant)
    paths = jax.tree_util.tree_leaves_with_path(state)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [
        "[1][0].count",
        "[1][0].mu['weight']",
        "[1][0].nu['weight']",
        "[1][2].count",
    ]
