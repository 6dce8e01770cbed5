"""A mixture of experts beside every expert on every token: numpy's float64, and gradients by jax of plain products."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mtjax.config import validate
from mtjax.config.sizes import expert_capacity
from mtjax.errors import UserError
from mtjax.layout.layouts import TENSOR_RULES
from mtjax.models.kernels import grouped
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.experts import Experts
from mtjax.models.routers import LOAD, LOST, ROUTER_AUX_LOSS, Z_LOSS, Padding
from mtjax.sharding.axes import use_rules
from tests.tiny import mesh_of, tiny_config

RULES = TENSOR_RULES.restricted_to(("data", "model")).with_replicated_activations
SOFTMAX: dict[str, Any] = {"num_experts": 6, "experts_top_k": 2, "expert_size": 20}
DEEPSEEK: dict[str, Any] = {
    "num_experts": 8,
    "experts_top_k": 3,
    "expert_size": 12,
    "router_score": "sigmoid",
    "router_bias": True,
    "router_scale": 2.5,
    "shared_expert_size": 16,
    "activation": "gelu",
}
"""All that DeepSeek's routers do but choosing groups, and experts without gates."""
GROUPS: dict[str, Any] = DEEPSEEK | {
    "num_experts": 12,
    "expert_groups": 4,
    "expert_groups_top_k": 2,
    "experts_top_k": 4,
}
"""4 of the 6 experts of 2 groups of 3: often not the best 4 of all, nor those of the groups with the best expert."""
BIASED: dict[str, Any] = SOFTMAX | {
    "router_linear_bias": True,
    "expert_bias": True,
    "shared_expert_size": 16,
    "shared_expert_gate": True,
    "activation": "swiglu_clamped",
}
"""gpt-oss's biases and activation, and Qwen2-MoE's gate of the shared expert."""
CAPACITY: dict[str, Any] = {"num_experts": 4, "capacity_factor": 0.75}
PLAIN: dict[str, Any] = {"num_experts": 4, "experts_top_k": 1, "router_normalize": False}


def mixer_of(settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A mixer's graph and its parameters, none of them 0; to be called with a mesh and rules in force."""
    config = tiny_config(family="llama", hidden_size=16, init_std=0.4, **settings)
    validate(config)
    mixer = Experts(config.model, output_std=0.4, key=jax.random.key(1))
    if mixer.router.bias is not None:
        mixer.router.bias[...] = jnp.linspace(-0.3, 0.3, config.model.num_experts)
    for number, layer in enumerate((mixer.up, mixer.down)):
        if layer.bias is not None:
            layer.bias[...] = 3 * jax.random.normal(jax.random.key(number), layer.bias.shape)
    if mixer.router.linear_bias is not None:
        mixer.router.linear_bias[...] = jnp.linspace(-1, 1, config.model.num_experts)
    graph, state = nnx.split(mixer)
    return (config.model, graph, state), nnx.to_pure_dict(state)


def apply(static: Any, parameters: Any, x: Any, context: LayerContext = LayerContext()) -> tuple[Any, Any]:  # noqa: B008
    """What the mixer adds to the stream, and its report."""
    _, graph, state = static
    nnx.replace_by_pure_dict(state, parameters)
    return nnx.merge(graph, state)(x, context, None)


def dense(model: Any, p: Any, x: Any, xp: Any) -> tuple[Any, Any]:
    """Every expert on every token, weighted by gates that are 0 for those not chosen; by numpy or by jax."""

    def act(hidden: Any) -> Any:
        if model.activation == "swiglu_clamped":
            gate, up = xp.minimum(hidden[..., 0, :], 7), xp.clip(hidden[..., 1, :], -7, 7)
            return (up + 1) * gate / (1 + xp.exp(-1.702 * gate))
        if model.activation == "swiglu":
            return hidden[..., 0, :] / (1 + xp.exp(-hidden[..., 0, :])) * hidden[..., 1, :]
        return 0.5 * hidden * (1 + xp.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))

    logits = x @ p["router"]["weight"] + p["router"].get("linear_bias", 0)
    exps = xp.exp(logits)
    scores = exps / exps.sum(-1, keepdims=True) if model.router_score == "softmax" else 1 / (1 + xp.exp(-logits))
    ranked = scores + p["router"].get("bias", 0)
    if model.expert_groups > 1:
        inside = xp.sort(ranked.reshape(*ranked.shape[:-1], model.expert_groups, -1), -1)
        best = inside[..., -1] + (inside[..., -2] if model.router_score == "sigmoid" else 0)
        is_kept = best >= xp.sort(best, -1)[..., -model.expert_groups_top_k, None]
        ranked = xp.where(xp.repeat(is_kept, inside.shape[-1], -1), ranked, -1)
    last = xp.sort(ranked, -1)[..., -model.experts_top_k, None]
    hot = (ranked >= last) * 1.0
    gates = scores * hot
    if model.router_normalize:
        gates = gates / gates.sum(-1, keepdims=True)
    load, report = hot.sum(1), {}
    if (capacity := expert_capacity(model, x.shape[1])) is not None:
        is_taken = hot.cumsum(1) <= capacity
        gates, report = gates * is_taken, {LOST: (hot * ~is_taken).sum((1, 2))}
    out = 0
    for e in range(model.num_experts):
        bias = p["up"]["bias"][e] if "bias" in p["up"] else 0
        hidden = act(xp.tensordot(x, p["up"]["weight"][e], 1) + bias)
        bias = p["down"]["bias"][e] if "bias" in p["down"] else 0
        out += model.router_scale * gates[..., e : e + 1] * (hidden @ p["down"]["weight"][e] + bias)
    if "shared" in p:
        shared = act(xp.tensordot(x, p["shared"]["up"]["weight"], 1)) @ p["shared"]["down"]["weight"]
        out += shared / (1 + xp.exp(-(x @ p["shared_gate"]["weight"]))) if "shared_gate" in p else shared
    share = (scores / scores.sum(-1, keepdims=True)).mean(1)
    balance = model.num_experts * (hot.mean(1) / model.experts_top_k * share).sum(-1)
    return out, {ROUTER_AUX_LOSS: balance, Z_LOSS: (xp.log(exps.sum(-1)) ** 2).mean(1), LOAD: load, **report}


@pytest.mark.parametrize(
    "settings",
    [
        SOFTMAX,
        GROUPS,
        BIASED,
        pytest.param(DEEPSEEK, marks=pytest.mark.long),
        pytest.param(PLAIN, marks=pytest.mark.long),
        pytest.param(CAPACITY, marks=pytest.mark.long),
    ],
    ids=["softmax", "groups", "biases", "deepseek", "switch", "capacity"],
)
def test_output_report_and_gradients_are_those_of_every_expert_on_every_token(settings, monkeypatch):
    monkeypatch.setattr(grouped, "SHORTEST", 4)  # several blocks of an expert, the last not full
    random = np.random.default_rng(0)
    x, of_out, of_sample = (random.normal(size=size).astype(np.float32) for size in ((3, 16, 16), (3, 16, 16), (3,)))
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of(settings)

        def loss(run: Any, p: Any, x: Any) -> tuple[Any, Any]:
            out, report = run(p, x)
            return (out * of_out).sum() + ((report[ROUTER_AUX_LOSS] + report[Z_LOSS]) * of_sample).sum(), (out, report)

        ours = jax.jit(jax.grad(partial(loss, partial(apply, static)), argnums=(0, 1), has_aux=True))
        gradients, (out, report) = ours(parameters, x)
    numbers = jax.tree.map(np.asarray, parameters)
    plain = jax.jit(jax.grad(partial(loss, partial(dense, static[0], xp=jnp)), argnums=(0, 1), has_aux=True))
    known_gradients, _ = plain(numbers, x)
    numbers = jax.tree.map(np.float64, numbers)
    known, known_report = dense(static[0], numbers, x.astype(np.float64), np)
    np.testing.assert_allclose(out, known, atol=1e-5 * np.abs(known).max())
    assert set(report) == set(known_report)
    assert known_report.get(LOST, np.ones(1)).sum() > 0
    for name, value in known_report.items():
        np.testing.assert_allclose(report[name], value, rtol=1e-5, err_msg=name)
    for (path, value), (_, found) in zip(
        jax.tree_util.tree_leaves_with_path(known_gradients),
        jax.tree_util.tree_leaves_with_path(gradients),
        strict=True,
    ):
        np.testing.assert_allclose(found, value, atol=1e-5 * np.abs(value).max(), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "settings",
    [DEEPSEEK | {"capacity_factor": 0.5}, pytest.param(SOFTMAX, marks=pytest.mark.long)],
    ids=["deepseek with a capacity", "softmax"],
)
def test_padding_counts_nowhere(settings):
    """What a padded sample reports, and what its text gets, is that of the text alone, by numpy's float64; wherever the
    padding stands, whatever it is, and however much there is of it."""
    random = np.random.default_rng(3)
    lengths, size = (5, 12, 16), 16
    is_text = np.zeros((3, size), bool)
    for sample, length in enumerate(lengths):
        is_text[sample, random.permutation(size)[:length]] = True
    x, of_out = random.normal(size=(2, 3, size, 16)).astype(np.float32)
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of(settings)
        context = LayerContext(padding=Padding(jnp.asarray(is_text), jnp.asarray(lengths, jnp.int32)))

        def loss(p: Any, x: Any) -> tuple[Any, Any]:
            out, report = apply(static, p, x, context)
            text_only = jnp.where(is_text[..., None], out * of_out, 0).sum()
            return text_only + report[ROUTER_AUX_LOSS].sum() + report[Z_LOSS].sum(), (out, report)

        (of_p, of_x), (out, report) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(parameters, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((of_p, of_x)))
    assert not np.asarray(of_x)[~is_text].any()
    numbers = jax.tree.map(np.float64, parameters)
    for sample, text in enumerate(is_text):
        known, known_report = dense(static[0], numbers, x[sample, text][None].astype(np.float64), np)
        np.testing.assert_allclose(out[sample, text], known[0], atol=1e-5 * np.abs(known).max())
        assert set(report) == set(known_report)
        for name, value in known_report.items():
            np.testing.assert_allclose(report[name][sample], value[0], rtol=1e-5, err_msg=name)
    assert "capacity_factor" not in settings or np.asarray(report[LOST]).sum() > 0


def test_blocks_are_as_long_as_an_experts_share_lets_them_be():
    rows = grouped.Blocks("swiglu", 8).rows
    assert [rows(pairs) for pairs in (16, 8 * 8 * 64, 8 * 8 * 65, 10**9)] == [8, 64, 64, 1024]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": 4, "experts_top_k": 5}, "experts_top_k 5 is above num_experts 4"),
        (
            {"num_experts": 4, "family": "bert"},
            "num_experts only works with the families gpt, llama and hybrid, and family is bert",
        ),
        (
            {"num_experts": 4, "family": "t5"},
            "num_experts only works with the families gpt, llama and hybrid, and family is t5",
        ),
        (
            {"num_experts": 4, "lora_rank": 2, "router_bias": True, "router_bias_update_rate": 0.1},
            "router_bias_update_rate is 0.1, and lora_rank 2 freezes routers",
        ),
        (
            {"num_experts": 4, "lora_rank": 2, "lora_dropout": 0.1},
            "lora_dropout is 0.1, and adapters of experts have no dropout",
        ),
        ({"num_experts": 4, "router_bias_update_rate": 0.1}, "router_bias_update_rate is 0.1, and there are no biases"),
        ({"num_experts": 6, "expert_groups": 4}, "num_experts 6 is not divisible by expert_groups 4; .* are 3 and 6"),
        ({"num_experts": 4, "expert_groups_top_k": 2}, "expert_groups_top_k 2 is above expert_groups 1"),
        (
            {"num_experts": 8, "expert_groups": 4, "experts_top_k": 3},
            "experts_top_k 3 is above the 2 experts of expert_groups_top_k 1: set expert_groups_top_k to 2 or more",
        ),
        (
            {"num_experts": 4, "expert_groups": 4, "expert_groups_top_k": 2, "router_score": "sigmoid"},
            "expert_groups 4 of 4 experts have one each",
        ),
        ({"num_experts": 4, "first_dense_layers": 2}, "first_dense_layers 2 leaves none of num_layers 2 with experts"),
        (
            {"num_experts": 4, "first_dense_layers": 1, "recompute": "full", "recompute_method": "block"},
            "block needs identical layers, and first_dense_layers is 1: use uniform",
        ),
        (
            {
                "num_experts": 4,
                "num_layers": 5,
                "first_dense_layers": 2,
                "recompute": "full",
                "recompute_num_layers": 2,
            },
            "num_layers - first_dense_layers 3 is not a multiple of recompute_num_layers 2",
        ),
        (
            {"num_experts": 4, "moe_every": 3, "num_layers": 4},
            "num_layers 4 is not a multiple of moe_every 3; .* 2 and 4",
        ),
        (
            {"num_experts": 4, "moe_every": 2, "first_dense_layers": 1},
            "moe_every 2 and first_dense_layers 1 both select the layers with experts: remove one",
        ),
        (
            {"num_experts": 4, "moe_every": 2, "num_layers": 4, "recompute": "full", "recompute_num_layers": 2},
            "moe_every is 2, .* remove recompute_num_layers 2",
        ),
        ({"moe_every": 2}, "moe_every is 2, and num_experts is 0"),
        ({"expert_bias": True}, "expert_bias is True, and num_experts is 0"),
        ({"num_experts": 4, "shared_expert_gate": True}, "shared_expert_gate is True, and shared_expert_size is 0"),
        (
            {"num_experts": 4, "expert_bias": True, "capacity_factor": 1.5},
            "expert_bias is True, and capacity_factor is 1.5",
        ),
        ({"expert_groups": 2}, "expert_groups is 2, and num_experts is 0"),
        ({"expert_dispatch": "all-to-all"}, "expert_dispatch is all-to-all, and num_experts is 0"),
        (
            {"num_experts": 4, "expert_dispatch": "all-to-all", "capacity_factor": 1.5},
            "expert_dispatch is all-to-all, and capacity_factor 1.5 already limits the tokens of each expert",
        ),
        ({"router_aux_loss": 0.5}, "router_aux_loss is 0.5, and num_experts is 0"),
    ],
)
def test_what_experts_do_not_go_with_is_one_sentence(settings, message):
    with pytest.raises(UserError, match=message):
        validate(tiny_config(**settings))
