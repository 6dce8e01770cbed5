"""Experts beside those of transformers: the block of each model type, Mixtral's balance loss and gradients, DeepSeek's
routers."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.config import validate
from mtjax.models.layer_context import LayerContext
from mtjax.models.mixers.experts import Router
from mtjax.models.routers import LOAD, ROUTER_AUX_LOSS, Padding
from mtjax.sharding.axes import use_rules
from tests.models.test_experts import RULES, SOFTMAX, apply, mixer_of
from tests.tiny import mesh_of, tiny_config

torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
transformers = pytest.importorskip(
    "transformers", minversion="5", reason="needs the extra parity: pip install '.[parity]'"
)

BLOCKS = {
    "mixtral": ("MixtralSparseMoeBlock", {"intermediate_size": 20}, {}),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
        {"router_normalize": False, "shared_expert_size": 12, "shared_expert_gate": True},
    ),
    "qwen3_moe": ("Qwen3MoeSparseMoeBlock", {"moe_intermediate_size": 20, "norm_topk_prob": True}, {}),
    "olmoe": (
        "OlmoeSparseMoeBlock",
        {"intermediate_size": 20, "norm_topk_prob": False},
        {"router_normalize": False},
    ),
    "granitemoe": ("GraniteMoeMoE", {"intermediate_size": 20}, {}),
    "deepseek_v2": (
        "DeepseekV2Moe",
        {"moe_intermediate_size": 20, "n_shared_experts": 2, "topk_method": "greedy", "routed_scaling_factor": 1.5},
        {"router_normalize": False, "router_scale": 1.5, "shared_expert_size": 40},
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        {
            "moe_intermediate_size": 20,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 2.5,
        },
        {
            "router_score": "sigmoid",
            "router_bias": True,
            "router_normalize": False,
            "router_scale": 2.5,
            "shared_expert_size": 20,
            "expert_groups": 4,
            "expert_groups_top_k": 2,
        },
    ),
    "gpt_oss": (
        "GptOssMLP",
        {"intermediate_size": 20},
        {"router_linear_bias": True, "expert_bias": True, "activation": "swiglu_clamped"},
    ),
}
"""Model type -> its block of experts, and settings of theirs and of ours besides sizes: 8 experts, 3 of each token."""


def parameters_of_block(theirs):
    """Our parameters with a block's values."""
    alternates = "experts.gate_up_proj_bias" in theirs  # gpt-oss: gate and up in turn, and matrices [in, out]

    def up(matrix):
        """[..., 2 inner, ...] -> [..., 2, inner], gate first."""
        parts = matrix.reshape(*matrix.shape[:-1], -1, 2).swapaxes(-1, -2)
        return parts if alternates else matrix.reshape(*matrix.shape[:-1], 2, -1)

    def turned(name):
        return theirs[name] if alternates else theirs[name].swapaxes(-1, -2)

    gate, shared = "router" if "router.weight" in theirs else "gate", "shared_experts"
    shared = shared if f"{shared}.up_proj.weight" in theirs else "shared_expert"
    found = {
        "router": {"weight": theirs[f"{gate}.weight"].T},
        "up": {"weight": up(turned("experts.gate_up_proj"))},
        "down": {"weight": turned("experts.down_proj")},
    }
    if alternates:
        found["router"]["linear_bias"] = theirs["router.bias"]
        found["up"]["bias"], found["down"]["bias"] = (
            up(theirs["experts.gate_up_proj_bias"]),
            theirs["experts.down_proj_bias"],
        )
    if "gate.e_score_correction_bias" in theirs:
        found["router"]["bias"] = theirs["gate.e_score_correction_bias"]
    if f"{shared}.up_proj.weight" in theirs:
        both = [theirs[f"{shared}.{name}_proj.weight"].T for name in ("gate", "up")]
        found["shared"] = {
            "up": {"weight": np.stack(both, 1)},
            "down": {"weight": theirs[f"{shared}.down_proj.weight"].T},
        }
    if "shared_expert_gate.weight" in theirs:
        found["shared_gate"] = {"weight": theirs["shared_expert_gate.weight"].T}
    return found


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_experts_are_those_of_transformers(kind):
    name, settings, ours = BLOCKS[kind]
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    count = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
    count = {key: value for key, value in count.items() if key != "num_experts" or kind in ("qwen2_moe", "olmoe")}
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_experts_per_tok": 3, **count}
    config = transformers.AutoConfig.for_model(kind, **sizes, **settings)
    block, random = getattr(modeling, name)(config).eval(), np.random.default_rng(5)
    weights = {key: random.normal(size=value.shape).astype(np.float32) for key, value in block.state_dict().items()}
    assert all(8 in value.shape for key, value in weights.items() if "experts." in key and "shared" not in key)
    block.load_state_dict({key: torch.tensor(value) for key, value in weights.items()})
    x = random.normal(size=(2, 24, 16)).astype(np.float32)
    with torch.no_grad():
        known = block(torch.tensor(x))
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of({"num_experts": 8, "experts_top_k": 3, "expert_size": 20, **ours})
        loaded = parameters_of_block(weights)
        assert jax.tree.map(np.shape, loaded) == jax.tree.map(np.shape, parameters)
        placed = jax.tree.map(lambda value, like: jax.device_put(value, like.sharding), loaded, parameters)
        out, _ = jax.jit(lambda p, x: apply(static, p, x))(placed, x)
    known = (known[0] if isinstance(known, tuple) else known).numpy()
    np.testing.assert_allclose(out, known, atol=2e-5 * np.abs(known).max())


CHOSEN = 2
"""Experts of a token, by which transformers does not divide its balance loss."""

pytestmark = pytest.mark.torch


def test_output_balance_loss_and_gradients_are_mixtrals():
    """Of one sample, over whose tokens transformers takes its balance loss too."""
    from transformers.models.mixtral import modeling_mixtral

    x, of_out = np.random.default_rng(0).normal(size=(2, 1, 24, 16)).astype(np.float32)
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of(SOFTMAX)

        def loss(p, x):
            out, report = apply(static, p, x)
            return (out * of_out).sum() + 3 * CHOSEN * report[ROUTER_AUX_LOSS].sum(), (out, report)

        (of_p, of_x), (out, report) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(parameters, x)
    p = jax.tree.map(np.array, parameters)
    count, width, inner = p["down"]["weight"].shape[0], x.shape[-1], p["down"]["weight"].shape[1]
    theirs = modeling_mixtral.MixtralSparseMoeBlock(
        transformers.MixtralConfig(
            hidden_size=width, intermediate_size=inner, num_local_experts=count, num_experts_per_tok=2
        )
    )

    def as_theirs(tree):
        up = np.asarray(tree["up"]["weight"]).transpose(0, 2, 3, 1).reshape(count, 2 * inner, width)
        down = np.asarray(tree["down"]["weight"]).transpose(0, 2, 1)
        return {
            "gate.weight": np.asarray(tree["router"]["weight"]).T,
            "experts.gate_up_proj": up,
            "experts.down_proj": down,
        }

    theirs.load_state_dict({name: torch.tensor(value) for name, value in as_theirs(p).items()})
    read = torch.tensor(x, requires_grad=True)
    known = theirs(read)
    logits, _, chosen = theirs.gate(read)
    balance = modeling_mixtral.load_balancing_loss_func((logits,), count, 2)
    ((known * torch.tensor(of_out)).sum() + 3 * balance).backward()

    def close(found, value, name):
        np.testing.assert_allclose(found, value, atol=1e-5 * np.abs(value).max(), err_msg=name)

    close(out, known.detach().numpy(), "output")
    close(CHOSEN * report[ROUTER_AUX_LOSS][0], balance.item(), "balance loss")
    np.testing.assert_array_equal(report[LOAD][0], np.bincount(chosen.numpy().ravel(), minlength=count))
    close(of_x, read.grad.numpy(), "gradient of the stream")
    for name, value in as_theirs(of_p).items():
        close(value, theirs.get_parameter(name).grad.numpy(), name)


def test_balance_loss_and_load_of_padded_text_are_mixtrals():
    """With an attention mask, as transformers leaves padding out."""
    from transformers.models.mixtral import modeling_mixtral

    x = np.random.default_rng(4).normal(size=(1, 24, 16)).astype(np.float32)
    is_text = (np.arange(24) < 17)[None]
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        static, parameters = mixer_of(SOFTMAX)
        context = LayerContext(padding=Padding(jnp.asarray(is_text), jnp.asarray([17], jnp.int32)))

        def loss(p):
            report = apply(static, p, x, context)[1]
            return report[ROUTER_AUX_LOSS].sum(), report

        gradients, report = jax.jit(jax.grad(loss, has_aux=True))(parameters)
    count = static[0].num_experts
    weight = torch.tensor(np.asarray(parameters["router"]["weight"]), requires_grad=True)
    logits = torch.tensor(x[0]) @ weight
    mask = torch.tensor(is_text.astype(np.int64))
    known = modeling_mixtral.load_balancing_loss_func((logits,), count, CHOSEN, mask)
    known.backward()
    np.testing.assert_allclose(CHOSEN * report[ROUTER_AUX_LOSS][0], known.item(), rtol=1e-5)
    chosen = logits.softmax(-1).topk(CHOSEN).indices.numpy()[is_text[0]]
    np.testing.assert_array_equal(report[LOAD][0], np.bincount(chosen.ravel(), minlength=count))
    theirs = weight.grad.numpy() / CHOSEN
    np.testing.assert_allclose(gradients["router"]["weight"], theirs, atol=1e-5 * np.abs(theirs).max())


GROUPS = {"num_experts": 24, "experts_top_k": 5, "expert_groups": 6, "expert_groups_top_k": 3, "router_scale": 2.5}
SIGMOID = {"router_score": "sigmoid", "router_bias": True}
THEIRS = {
    "num_local_experts": 24,
    "num_experts_per_tok": 5,
    "n_group": 6,
    "topk_group": 3,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "hidden_size": 16,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Dots1", SIGMOID),
        ("DeepseekV3", SIGMOID),
        ("Glm4Moe", SIGMOID),
        ("DeepseekV2", {"router_normalize": False}),
    ],
)
def test_groups_experts_and_weights_are_those_of_deepseeks_routers(name, settings):
    config = tiny_config(family="llama", hidden_size=16, init_std=0.4, **GROUPS, **settings)
    validate(config)
    x = np.random.default_rng(1).normal(size=(2, 32, 16)).astype(np.float32)
    bias = np.random.default_rng(2).normal(size=24).astype(np.float32) / 5
    with jax.set_mesh(mesh_of("1x1")), use_rules(RULES):
        router = Router(config.model, key=jax.random.key(1))
        if router.bias is not None:
            router.bias[...] = bias
        chosen, gates, _ = jax.jit(lambda x: router(x, LayerContext()))(x)
    folder = {"Dots1": "dots1", "DeepseekV3": "deepseek_v3", "Glm4Moe": "glm4_moe", "DeepseekV2": "deepseek_v2"}[name]
    modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    theirs = getattr(modeling, f"{name}TopkRouter")(modeling_config(name))
    weights = {"weight": np.asarray(router.weight[...]).T, "e_score_correction_bias": bias}
    kept = {key: torch.tensor(value) for key, value in weights.items() if key in theirs.state_dict()}
    assert ("e_score_correction_bias" in kept) == config.model.router_bias
    theirs.load_state_dict(kept)
    with torch.no_grad():
        _, known_gates, known = theirs(torch.tensor(x))
    order, known_order = np.argsort(chosen, -1), np.argsort(known.numpy(), -1)
    ours = np.take_along_axis(np.asarray(chosen), order, -1).reshape(-1, 5)
    np.testing.assert_array_equal(ours, np.take_along_axis(known.numpy(), known_order, -1))
    ours = np.take_along_axis(np.asarray(gates), order, -1).reshape(-1, 5)
    np.testing.assert_allclose(ours, np.take_along_axis(known_gates.numpy(), known_order, -1), rtol=1e-5)


def modeling_config(name):
    extra = {"topk_method": "group_limited_greedy", "n_routed_experts": 24} if name == "DeepseekV2" else {}
    return getattr(transformers, f"{name}Config")(**THEIRS, **extra)
