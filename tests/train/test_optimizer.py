import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mtjax.config import Optimizer
from mtjax.train.optimizer import make_optimizer, make_schedule
from tests.tiny import program_of, records_like, tiny_config


def test_schedule_is_the_papers():
    """Warmup over 3k steps, one cosine cycle over the remaining 297k, floor 1e-5 (section 4.2)."""
    rate = make_schedule(Optimizer(), steps=300_000)
    assert float(rate(0)) == pytest.approx(1.5e-4 / 3000)
    assert float(rate(2999)) == pytest.approx(1.5e-4)
    half = 3000 + 297_000 // 2
    assert float(rate(half)) == pytest.approx((1.5e-4 + 1e-5) / 2, rel=1e-4)
    for step in (3000, 50_000, 299_000):
        cosine = 1e-5 + (1.5e-4 - 1e-5) * (1 + np.cos(np.pi * (step - 3000) / 297_000)) / 2
        assert float(rate(step)) == pytest.approx(cosine, rel=1e-5)
    assert float(rate(300_000)) == float(rate(400_000)) == pytest.approx(1e-5)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_short_warmups(warmup):
    rate = make_schedule(Optimizer(learning_rate=1.0, min_learning_rate=0.0, warmup_steps=warmup), steps=10)
    rates = [float(rate(step)) for step in range(11)]
    np.testing.assert_allclose(rates[:warmup], [(k + 1) / max(warmup, 1) for k in range(warmup)], rtol=1e-6)
    assert rates[warmup] == 1.0 and rates[10] == pytest.approx(0.0, abs=1e-7)
    assert all(a >= b for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


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


@pytest.mark.parametrize("size", [1.0, 0.01, 0.0], ids=["clipped", "not clipped", "zero"])
def test_update_is_clipped_adamw_with_decoupled_decay(size):
    """Against the update written out in float64: Loshchilov and Hutter, algorithm 2."""
    config = tiny_config(learning_rate=0.1, min_learning_rate=0.1, warmup_steps=0, weight_decay=0.5, clip_grad_norm=1.0)
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
