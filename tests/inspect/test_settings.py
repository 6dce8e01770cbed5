"""Each setting of a decoder's layers in a program for H100s: parameters, FLOPs, bytes and contract are the formulas'.

Settings whose effects add up share a program.
"""

import dataclasses
import re
from typing import Any

import pytest

from mtjax import config
from mtjax.analysis.memory import LAYER_INPUTS, layer_activations, stage_memory
from mtjax.config import Config, Model
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.verify import compare
from tests.inspect.steps import needs_aot

LAYERS = 6
SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "num_heads": 8,
    "num_layers": LAYERS,
    "sequence_length": 512,
    "vocab_size": 8192,
    "global_batch_size": 8,
    "microbatch_size": 2,
    "mesh": "2x2",
    "recompute": "none",
    "attention": "xla",
    "unroll_layers": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LLAMA: dict[str, Any] = {"family": "llama"}
ROTATED: dict[str, Any] = {"family": "gpt", "position": "rope", "tie_embeddings": False}
SPLIT: dict[str, Any] = {"sequence_parallel": True}
EVERY_SECOND: dict[str, Any] = {"attention_window": 128, "window_layers": "SF"}
LONGROPE: dict[str, Any] = {
    "rope_scaling": "longrope",
    "rope_original_length": 256,
    "rope_short_factors": (1.0,) * 32,
    "rope_long_factors": (2.0,) * 32,
    "rope_attention_factor": 1.1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 128,
    "q_lora_rank": 192,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
}
ROUTED: dict[str, Any] = {
    "num_experts": 8,
    "expert_size": 256,
    "experts_top_k": 3,
    "shared_expert_size": 512,
    "first_dense_layers": 1,
    "router_score": "sigmoid",
    "expert_groups": 4,
    "expert_groups_top_k": 2,
    "router_bias": True,
    "router_scale": 2.5,
}
ROWS: dict[str, dict[str, Any]] = {
    "biases of queries, keys and values, grouped heads, windows in the last layers, Llama 3's scaling": {
        **LLAMA,
        "attention_bias": "qkv",
        "num_kv_heads": 2,
        "head_dim": 48,
        "attention_window": 128,
        "window_layers": "FFFFSS",
        "rope_scaling": "llama3",
        "rope_original_length": 256,
        "zero": 1,
        **SPLIT,
    },
    "norms of outputs and of the width, YaRN": {
        **LLAMA,
        "norm_placement": "output",
        "qk_norm": True,
        "qk_norm_scope": "width",
        "rope_scaling": "yarn",
        "rope_original_length": 256,
        "rope_truncate": False,
        "zero": 1,
        **SPLIT,
    },
    "sandwich norms of 1 + w, soft caps, norms of heads, two bases of RoPE": {
        **LLAMA,
        "norm_placement": "sandwich",
        "norm_weight": "offset",
        "attention_scale": 0.1,
        "attention_softcap": 50.0,
        "output_softcap": 30.0,
        "activation": "geglu",
        "tie_embeddings": True,
        "embedding_scale": 22.6,
        "qk_norm": True,
        "attention_window": 128,
        "window_layers": "SSF",
        "rope_local_theta": 1000.0,
        "rope_theta": 1e6,
        "rope_scaling": "linear",
        "num_kv_heads": 4,
    },
    "parallel with one norm without bias, a norm for each head, layers without RoPE": {
        **ROTATED,
        "norm_bias": False,
        "bias": False,
        "activation": "swiglu",
        "parallel_residual": "one_norm",
        "qk_norm": True,
        "qk_norm_scope": "each_head",
        "qk_norm_kind": "layernorm",
        "qk_norm_bias": True,
        "output_scale": 0.0625,
        "rope_layers": "RRN",
        "zero": 1,
        **SPLIT,
    },
    "parallel with one norm, all biases, one key and value, half of a head rotated": {
        **ROTATED,
        "rope_fraction": 0.5,
        "parallel_residual": "one_norm",
        "output_bias": True,
        "num_kv_heads": 1,
        "recompute": "full",
    },
    "parallel with two norms, exact GELU, biases of the MLP alone": {
        **ROTATED,
        "rope_fraction": 0.25,
        "parallel_residual": "two_norms",
        "activation": "gelu_exact",
        "attention_bias": "none",
        "mlp_bias": True,
        **SPLIT,
    },
    "ALiBi, a norm of the embeddings, clipped": {
        "family": "gpt",
        "position": "alibi",
        "embedding_norm": True,
        "qkv_clip": 0.3,
        "recompute": "selective",
    },
    "scaled ALiBi, norms without weights, biases of attention's outputs": {
        "family": "gpt",
        "position": "alibi",
        "alibi_scaled": True,
        "norm_weight": "none",
        "bias": False,
        "attention_bias": "output",
        **SPLIT,
    },
    "post-norms, tables of another width, ReLU": {
        "family": "gpt",
        "norm_placement": "post",
        "embedding_size": 256,
        "activation": "relu",
    },
    "LayerNorm of 1 + w, squared ReLU": {
        **ROTATED,
        "norm_weight": "offset",
        "activation": "relu2",
        "zero": 1,
        **SPLIT,
    },
    "multipliers, biases of gated MLPs, dynamic scaling": {
        **LLAMA,
        "residual_scale": 0.3,
        "embedding_scale": 3.0,
        "attention_scale": 0.7,
        "output_scale": 0.14,
        "attention_bias": "all",
        "mlp_bias": True,
        "activation": "geglu_exact",
        "rope_scaling": "dynamic",
        "rope_original_length": 256,
        **SPLIT,
    },
    "longrope, a window in all layers, norms of heads after RoPE": {
        **LLAMA,
        **LONGROPE,
        "attention_window": 128,
        "qk_norm": True,
        "qk_norm_after_rope": True,
        "attention_scale_beta": 0.1,
        "zero": 1,
        **SPLIT,
    },
    "sinks, biases of routers and experts, clamped gates": {
        **LLAMA,
        **EVERY_SECOND,
        "attention_sinks": True,
        "attention_bias": "all",
        "activation": "swiglu_clamped",
        "num_experts": 4,
        "expert_size": 512,
        "router_linear_bias": True,
        "expert_bias": True,
        "num_kv_heads": 2,
    },
    "latent attention, DeepSeek's routing, shared experts": {**LLAMA, **LATENT, **ROUTED, "zero": 1, **SPLIT},
    "tokens ahead": {**LLAMA, "mtp_num_layers": 1, "attention_bias": "qkv", "num_kv_heads": 4, "recompute": "full"},
    "experts in every second layer, a gate of the shared expert": {
        **LLAMA,
        "num_experts": 4,
        "expert_size": 256,
        "moe_every": 2,
        "shared_expert_size": 512,
        "shared_expert_gate": True,
        "router_normalize": False,
        "recompute": "full",
    },
}
"""What layers differ in, by the settings that a row has in addition to `SIZES`."""


def run_of(name: str) -> Config:
    """Returns the config of a row."""
    return config.replace(Config(), **SIZES | ROWS[name])


def saved_by_a_layer(report: Report) -> float:
    """Returns the bytes that an iteration of the forward loop over layers stacks for the backward pass:
    of what the loop's body returns, all but what it passes on unchanged."""
    computations = report.step.module.computations
    instructions = [i for c in computations.values() for i in c.instructions]
    (loop,) = (i for i in instructions if i.opcode == "while" and i.op_name.endswith("/jvp(layers)/while"))
    body = computations[re.findall(r"body=%?([\w.-]+)", loop.attributes)[0]]
    returned = [body.by_name[name] for name in body.instructions[-1].operands]
    written = [a for i in returned if i.opcode != "get-tuple-element" for a in i.arrays if len(a.dims) > 1]
    stacks = [(a, size) for a in written for size in (LAYERS, LAYERS - 1) if size in a.dims]
    return sum(a.bytes / size for a, size in stacks)


def saved_as_planned(report: Report) -> float:
    """Returns the bytes that a layer saves by formula."""
    (stack,), plan = report.step.anatomy.stacks, report.step.plan
    planned = stage_memory(report.step.anatomy, plan).activations
    return sum(planned.get(kind, 0.0) for kind in (LAYER_INPUTS, *layer_activations(stack, plan))) / LAYERS


OTHER_FAMILIES = (
    r"ssm_|block_|retro_|relative_|decoder_|num_decoder|mlp_(gate|output)_scale|attention_output_|layer_pattern"
)
OTHER_FAMILIES += r"|num_token_types|sentence_order|head_bias|pooler_|first_attention_norm"
NOT_OF_LAYERS = (
    r"lora_|head$|num_labels|init_std|scaled_init|vocab_multiple|mtp_loss|router_(bias_update|aux|z_|jitter)|capacity"
)
ALIKE = r"rope_(factor|low_|high_|beta_)|norm_epsilon|norm$|mlp_size"
"""Numbers that change no program's shape; and `norm`, which follows from the family."""


def test_every_setting_of_layers_has_a_row() -> None:
    given = {name for settings in (SIZES, *ROWS.values()) for name in settings}
    others = re.compile(f"({OTHER_FAMILIES}|{NOT_OF_LAYERS}|{ALIKE})")
    assert [f.name for f in dataclasses.fields(Model) if f.name not in given and not others.match(f.name)] == []


IN_TEST_ALL = ("sandwich", "post-norms", "sinks", "latent attention")
"""Beginnings of rows whose collectives or saved arrays no other contract of `make test-all` has: sandwich norms have
those of outputs, and norms of the width are in tests/inspect/test_llama_contract.py."""


@needs_aot
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name.startswith(IN_TEST_ALL) else pytest.mark.exhaustive)
        for name in ROWS
    ],
)
def test_programs_for_h100_are_as_planned(name: str) -> None:
    report = inspect(run_of(name), find_target("h100x8"))
    assert report.verdict.violations == ()
    checks = {check.name: check for check in compare(report)}
    for exact in ("parameters", "weights", "FLOPs of a step"):
        assert checks[exact].formula == checks[exact].program, exact
    assert checks["optimizer"].program - checks["optimizer"].formula == 8  # Adam's step counter, and the step's
    assert checks["peak"].error == pytest.approx(0, abs=0.05), checks
    for axis in ("tensor", "data"):
        assert checks[f"sent, {axis} parallel"].error == pytest.approx(0, abs=0.001)
    if len(report.step.anatomy.stacks) == 1:
        assert saved_by_a_layer(report) == pytest.approx(saved_as_planned(report), rel=1e-5)
