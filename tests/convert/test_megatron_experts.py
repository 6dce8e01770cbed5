"""Experts in Megatron-Core's checkpoints: three ways to keep their matrices, ranks that share them, what is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtjax import config
from mtjax.commands.convert import main
from mtjax.convert.megatron_experts import expert_misfits, expert_settings, unread_experts
from mtjax.runtime.checkpoints.weights import find_weights
from tests.convert.hf_folders import LLAMA_CONFIG, llama_shapes, random_tensors, write_folder

torch = pytest.importorskip("torch", reason="needs the extra megatron: pip install '.[megatron]'")
pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")

EXPERTS = 4
MIXTRAL = LLAMA_CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}
ARGUMENTS: dict[str, Any] = {
    "num_layers": 4,
    "num_experts": 8,
    "ffn_hidden_size": 64,
    "add_bias_linear": False,
    "moe_router_topk": 4,
}


def run(source: str, target: str, *options: str) -> int:
    return main(["--from", source, "--to", target, *options])


def prints(folder: Path) -> dict[str, int]:
    return find_weights(folder).metadata["fingerprints"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A Mixtral's random weights, and a folder with them: as they are, as ours, as two expert-parallel ranks'."""
    folder = tmp_path_factory.mktemp("experts")
    shapes = llama_shapes(MIXTRAL)
    for name, shape in [item for item in shapes.items() if ".mlp." in item[0]]:
        del shapes[name]
        layer, which = (
            name.split(".mlp.")[0],
            {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name.split(".")[-2]],
        )
        shapes[f"{layer}.block_sparse_moe.gate.weight"] = (EXPERTS, MIXTRAL["hidden_size"])
        shapes |= {f"{layer}.block_sparse_moe.experts.{i}.{which}.weight": shape for i in range(EXPERTS)}
    tensors = random_tensors(shapes, "float16")
    write_folder(folder / "hf", tensors, MIXTRAL)
    assert run(f"hf:{folder / 'hf'}", f"mtjax:{folder / 'ours'}", "--vocab-multiple", "256") == 0
    core = ("--tensor", "2", "--expert", "2", "--transformer-impl", "transformer_engine")
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{folder / 'theirs'}", *core) == 0
    return folder, tensors


def rows(tensors: dict[str, np.ndarray], layer: int, expert: int, rank: int) -> np.ndarray:
    """The first matrix of an expert on one of two tensor-parallel ranks."""
    theirs = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
    return np.concatenate([np.split(tensors[f"{theirs}.{name}.weight"], 2)[rank] for name in ("w1", "w3")])


def test_a_rank_has_its_experts_and_all_else(reference: tuple[Path, dict[str, np.ndarray]]):
    folder, tensors = reference
    for rank in range(2):
        for expert in range(EXPERTS):
            path = folder / f"theirs/release/mp_rank_{rank:02}_{expert // 2:03}/model_optim_rng.pt"
            content = torch.load(path, weights_only=False)
            assert (content["args"].num_experts, content["args"].expert_model_parallel_size) == (EXPERTS, 2)
            name = f"decoder.layers.1.mlp.experts.local_experts.{expert % 2}.linear_fc1.weight"
            np.testing.assert_array_equal(content["model"][name].numpy(), rows(tensors, 1, expert, rank))
            router = content["model"]["decoder.layers.1.mlp.router.weight"]
            np.testing.assert_array_equal(router.numpy(), tensors["model.layers.1.block_sparse_moe.gate.weight"])
            assert "decoder.layers.1.pre_mlp_layernorm.weight" in content["model"]


def one_module(model: dict[str, Any]) -> None:
    """As TEGroupedMLP names them."""
    for name in [name for name in model if ".local_experts." in name]:
        before, after = name.split(".local_experts.")
        number, module, kind = after.split(".")
        model[f"{before}.{module}.{kind}{number}"] = model.pop(name)


def one_tensor(model: dict[str, Any]) -> None:
    """As GroupedMLP keeps them: what it views as [experts, hidden, inner] and [experts, inner, hidden]."""
    for layer in range(MIXTRAL["num_hidden_layers"]):
        before = f"decoder.layers.{layer}.mlp.experts"
        for number in (1, 2):
            names = [f"{before}.local_experts.{i}.linear_fc{number}.weight" for i in range(EXPERTS // 2)]
            stacked = torch.stack([model.pop(name).T for name in names])
            hidden = MIXTRAL["hidden_size"]
            model[f"{before}.weight{number}"] = stacked.reshape((hidden, -1) if number == 1 else (-1, hidden))


@pytest.mark.parametrize("change", [lambda model: None, one_module, one_tensor])
def test_all_ways_to_keep_experts_are_the_same_model(
    reference: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, change: Callable[[dict[str, Any]], None]
):
    folder, _ = reference
    for path in (folder / "theirs").rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        change(content["model"])
        target = tmp_path / "changed" / path.parent.name / path.name
        target.parent.mkdir(parents=True)
        torch.save(content, target)
    assert run(f"megatron:{tmp_path / 'changed'}", f"mtjax:{tmp_path / 'ours'}", "--vocab-multiple", "256") == 0
    assert prints(tmp_path / "ours") == prints(folder / "ours")
    assert find_weights(tmp_path / "ours").config.model.num_experts == EXPERTS


def test_experts_of_one_module_are_written(reference: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    folder, tensors = reference
    options = ("--tensor", "2", "--grouped-experts", "--pipeline", "2", "--expert", "2")
    assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'theirs'}", *options) == 0
    content = torch.load(tmp_path / "theirs/release/mp_rank_01_001_001/model_optim_rng.pt", weights_only=False)
    assert content["args"].moe_grouped_gemm
    found = content["model"]["decoder.layers.0.mlp.experts.linear_fc1.weight1"]
    np.testing.assert_array_equal(found.numpy(), rows(tensors, 1, 3, 1))


def test_biases_of_routers_stay_float32(reference: tuple[Path, dict[str, np.ndarray]], tmp_path: Path):
    folder, _ = reference
    bias = 1 + torch.arange(EXPERTS) / 10_000  # float16 has no such steps
    for path in (folder / "theirs").rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        content["args"].moe_router_score_function, content["args"].moe_router_enable_expert_bias = "sigmoid", True
        content["model"] |= {f"decoder.layers.{i}.mlp.router.expert_bias": bias + i for i in range(2)}
        target = tmp_path / "biased" / path.parent.name / path.name
        target.parent.mkdir(parents=True)
        torch.save(content, target)
    assert run(f"megatron:{tmp_path / 'biased'}", f"mtjax:{tmp_path / 'ours'}", "--vocab-multiple", "256") == 0
    assert run(f"mtjax:{tmp_path / 'ours'}", f"megatron:{tmp_path / 'back'}") == 0
    model = torch.load(next((tmp_path / "back").rglob("*.pt")), weights_only=False)["model"]
    found = model["decoder.layers.1.mlp.router.expert_bias"]
    assert found.dtype == torch.float32 and torch.equal(found, bias + 1)
    assert model["decoder.layers.1.mlp.router.weight"].dtype == torch.float16


def test_ranks_that_do_not_fit_are_one_sentence(
    reference: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, _ = reference
    for path in (folder / "theirs").rglob("*.pt"):
        content = torch.load(path, weights_only=False)
        if path.parent.name == "mp_rank_01_001":
            content["model"]["decoder.layers.0.self_attention.linear_proj.weight"] += 1
        target = tmp_path / "changed" / path.parent.name / path.name
        target.parent.mkdir(parents=True)
        torch.save(content, target)
    place = f"megatron:{tmp_path / 'changed'}"
    assert run(place, f"mtjax:{tmp_path / 'never'}") == 2
    assert "linear_proj.weight must be replicated on expert-parallel ranks, but they differ" in capsys.readouterr().err
    (tmp_path / "changed/mp_rank_01_001/model_optim_rng.pt").unlink()
    (tmp_path / "changed/mp_rank_01_001").rmdir()
    assert run(place, f"mtjax:{tmp_path / 'never'}") == 2
    assert "is missing mp_rank_ 01_000_001 of 2 x 1 x 2 (tensor x pipeline x expert)" in capsys.readouterr().err


def test_what_does_not_divide_is_said(
    reference: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, _ = reference
    for options, said in {
        ("--expert", "3"): "--expert 3 does not divide the model's 4 experts",
        (
            "--grouped-experts",
            "--transformer-impl",
            "local",
        ): "--grouped-experts requires --transformer-impl transformer_engine",
        ("--transformer-impl", "legacy"): "not support 4 experts; use --transformer-impl transformer_engine or local",
    }.items():
        assert run(f"mtjax:{folder / 'ours'}", f"megatron:{tmp_path / 'never'}", *options) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"moe_router_score_function": "sqrtsoftplus"}, "moe_router_score_function is 'sqrtsoftplus'"),
        ({"moe_expert_capacity_factor": 1.5}, "moe_expert_capacity_factor is 1.5"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type is 'sinkhorn'"),
        ({"moe_layer_freq": [1, 0, 1, 1]}, "moe_layer_freq is [1, 0, 1, 1]"),
        ({"add_bias_linear": True}, "experts have no biases in mtjax, and add_bias_linear is True"),
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size is 1"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 2}, "groups of experts scored by their highest 2"),
    ],
)
def test_what_mtjax_does_not_have_is_said(arguments: dict[str, Any], said: str):
    assert unread_experts(ARGUMENTS) == []
    (wrong,) = unread_experts(ARGUMENTS | arguments)
    assert said in wrong


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bias": True}, "bias true with experts that have no biases"),
        ({"capacity_factor": 1.5}, "capacity_factor 1.5: its capacity is per microbatch"),
        ({"router_bias": True}, "router_score softmax with router_bias"),
        ({"expert_bias": True}, "expert_bias"),
        ({"router_score": "sigmoid", "router_normalize": False}, "router_score sigmoid without router_normalize"),
        ({"experts_top_k": 1}, "experts_top_k 1 with router_normalize"),
        (
            {"expert_groups": 4, "expert_groups_top_k": 2, "experts_top_k": 4},
            "groups of experts scored by their highest 2",
        ),
    ],
)
def test_what_megatron_does_not_have_is_said(settings: dict[str, Any], said: str):
    model = config.replace(config.load("llama-tiny"), num_experts=8).model
    assert expert_misfits(model, is_legacy=False) == []
    (wrong,) = expert_misfits(config.replace(config.Config(model=model), **settings).model, is_legacy=False)
    assert said in wrong


def test_arguments_of_losses_and_layers_are_read():
    several = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"], "moe_aux_loss_coeff": [0.01, 0.02]}
    found = expert_settings(ARGUMENTS | several | {"moe_layer_freq": [0, 0, 1, 1]})
    assert (found["first_dense_layers"], found["expert_size"]) == (2, 64)
    assert expert_settings(ARGUMENTS | {"moe_layer_freq": [0, 1, 0, 1]})["moe_every"] == 2
    assert found["router_aux_loss"] == pytest.approx(0.03)
    assert expert_settings(ARGUMENTS | {"moe_aux_loss_coeff": 0.5})["router_aux_loss"] == 0
