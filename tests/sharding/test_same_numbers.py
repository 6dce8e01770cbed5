"""Every feature on every kind of mesh: gradients, their norm, losses by name and an update are those of one device.

The suite's cases are here and where `assert_same` is called; all pairs of a feature and a mesh are exhaustive.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from mtjax.config.checks import validate
from mtjax.errors import UserError
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh
from tests.same_numbers import assert_same
from tests.tiny import LATENT, program_of, tiny_config

PLAIN: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_layers": 4, "clip_grad_norm": 0.1}
"""Gradients are clipped, so their norm decides the update."""
EXPERTS: dict[str, Any] = {"family": "llama", "num_experts": 8, "mlp_size": 48, "num_kv_heads": 8, "init_std": 0.1}
EXPERTS |= {"router_aux_loss": 0.02, "router_z_loss": 1e-3}
BIASED = EXPERTS | {"router_score": "sigmoid", "router_bias": True, "router_bias_update_rate": 0.05}
TEACHER = {"teacher": "a test", "teacher_weight": 0.7, "teacher_temperature": 3.0, "teacher_width": 24}
HYBRID: dict[str, Any] = {"family": "hybrid", "layer_pattern": "(M-M*)x4", "num_layers": 16, "mlp_size": 40}
HYBRID |= {"ssm_heads": 8, "ssm_head_dim": 6, "ssm_state": 10, "ssm_groups": 2, "ssm_chunk": 4, "ssm_conv": 3}
RETRO: dict[str, Any] = {"family": "retro", "retro_chunk": 4, "retro_first": 2}
RETRO |= {"num_layers": 3, "retro_every": 1, "retro_encoder_layers": 1, "retro_encoder_dropout": 0.0, "init_std": 0.1}
ROWS = {"task": "chat", "reset_attention_mask": True, "reset_position_ids": True}
FEATURES: Mapping[str, dict[str, Any]] = {
    "GPT": {},
    "untied tables": {"tie_embeddings": False},
    "Llama, grouped queries": {"family": "llama", "num_kv_heads": 2},
    "latent attention": {"family": "llama", "q_lora_rank": 28, **LATENT},
    "sinks": {"family": "llama", "num_kv_heads": 4, "attention_sinks": True},
    "BERT": {"family": "bert"},
    "T5": {"family": "t5", "num_decoder_layers": 4},
    "Retro": RETRO,
    "Retro, rows with passages": RETRO | ROWS,
    "Retro, encoder frozen": RETRO | ROWS | {"retro_frozen": "encoder"},
    "Retro, decoder frozen": RETRO | {"retro_frozen": "decoder"},
    "classes": {"family": "bert", "head": "classification", "num_labels": 3},
    "a number": {"family": "llama", "head": "regression"},
    "choices": {"family": "bert", "head": "choices", "num_labels": 2, "microbatch_size": 2},
    "spans": {"family": "bert", "head": "spans", "num_labels": 2},
    "router losses": EXPERTS,
    "router biases": BIASED,
    "capacity": EXPERTS | {"capacity_factor": 0.75},
    "experts with padding": EXPERTS | {"task": "chat"},
    "experts in every other layer": EXPERTS | {"moe_every": 2},
    "LoRA": {"family": "llama", "lora_rank": 4, "lora_alpha": 32.0},
    "LoRA under a head": {"family": "bert", "head": "classification", "num_labels": 3, "lora_rank": 4},
    "distillation": {"family": "llama", "task": "chat", **TEACHER},
    "distillation of classes": {"family": "bert", "head": "classification", "num_labels": 3} | TEACHER,
    "packed documents": {"family": "llama", "reset_attention_mask": True, "reset_position_ids": True},
    "multi-token prediction": {"family": "llama", "mtp_num_layers": 2},
    "sliding windows": {"family": "llama", "attention_window": 6, "window_layers": "SF", "norm_placement": "sandwich"},
    "Mamba-2": HYBRID,
    "unrolled layers": {"family": "llama", "unroll_layers": True},
}
MICRO = {"microbatch_size": 2}
MESHES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "data": ("4x1", {}),
    "ZeRO-1": ("4x1", {"zero": 1}),
    "ZeRO-2": ("4x1", {"zero": 2, "microbatch_size": 1}),
    "ZeRO-3": ("4x1", {"zero": 3}),
    "groups": (
        "data=2,shard=2,model=2",
        {"zero": 3, "microbatch_size": 1, "recompute": "full", "sequence_parallel": True},
    ),
    "groups of experts": ("data=2,shard=2,expert=2", {"zero": 3}),
    "groups of tokens": ("data=2,shard=2,context=2", {"zero": 1, "microbatch_size": 1}),
    "2D": ("2x4", {"zero": 3, "tensor_layout": "2d"}),
    "2.5D": (
        "data=2,shard=2,model=2",
        {"zero": 3, "tensor_layout": "2d", "microbatch_size": 1, "recompute": "full"},
    ),
    "groups on stages": ("data=2,stage=2,shard=2", MICRO | {"zero": 2}),
    "tensor": ("1x4", {}),
    "tensor and sequence": ("2x4", {"sequence_parallel": True, "recompute": "full", "zero": 2}),
    "1F1B": ("2x2x2", MICRO),
    "interleaved": ("1x2x2", MICRO | {"pipeline_schedule": "interleaved", "chunks": 2, "sequence_parallel": True}),
    "GPipe": ("2x2x1", MICRO | {"pipeline_schedule": "gpipe", "zero": 3, "recompute": "full"}),
    "ring": ("data=2,context=2,model=2", {"context_method": "ring", "zero": 1}),
    "all-gather": ("data=2,context=2,model=1", {"context_method": "all-gather"}),
    "experts, all-gather": ("data=2,expert=2,model=2", {"expert_dispatch": "all-gather"}),
    "experts, all-to-all": ("data=2,expert=2,model=2", {"expert_dispatch": "all-to-all", "sequence_parallel": True}),
}
COVERING = [("Llama, grouped queries", "groups"), ("router losses", "groups of experts")]
"""Those that no other test of the suite compiles."""
LONG = [
    ("GPT", "2D"),
    ("Llama, grouped queries", "2.5D"),
    ("Retro, encoder frozen", "tensor and sequence"),
    ("GPT", "groups of tokens"),
]
LONG += [("sinks", "groups on stages"), ("distillation", "tensor and sequence")]


def is_allowed(feature: str, mesh: str) -> bool:
    """Whether a run takes this feature on this mesh (docs/reference/compatibility.md says why not)."""
    shape, settings = MESHES[mesh]
    try:
        config = tiny_config(**PLAIN | FEATURES[feature] | settings, mesh=shape)
        validate(config)
        check_config(config, parse_mesh(shape))
    except UserError:
        return False
    return "expert" not in shape or bool(config.model.num_experts)


PRODUCT = [
    pytest.param(*pair, marks=pytest.mark.exhaustive)
    for pair in itertools.product(FEATURES, MESHES)
    if pair not in COVERING + LONG
]


@pytest.mark.parametrize(
    ("feature", "mesh"), [*COVERING, *(pytest.param(*pair, marks=pytest.mark.long) for pair in LONG), *PRODUCT]
)
def test_a_step_is_that_of_one_device(feature: str, mesh: str) -> None:
    if not is_allowed(feature, mesh):  # asked here, as it takes two seconds of all pairs
        pytest.skip("no run takes this feature on this mesh")
    model = PLAIN | FEATURES[feature]
    shape, settings = MESHES[mesh]
    assert_same(program_of(shape, **model | settings), program_of("1x1", **model))
