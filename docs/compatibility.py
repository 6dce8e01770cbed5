"""Features of a run in pairs: which can be combined, by the checks that a run itself makes.

`docs/make_reference.py` writes the result to docs/reference/compatibility.md.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mtjax.config import Config, replace
from mtjax.config.checks import validate
from mtjax.errors import UserError
from mtjax.layout.attention_kernel import PACKED_TOKENS, choose_kernel
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh


@dataclass(frozen=True)
class Feature:
    """A feature, the settings that turn it on, and the smallest mesh that has it."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)


BASE = {
    "family": "llama",
    "num_layers": 8,
    "hidden_size": 64,
    "num_heads": 8,
    "mlp_size": 128,
    "sequence_length": 64,
    "vocab_size": 1024,
    "global_batch_size": 32,
    "microbatch_size": 2,
    "compute_dtype": "bfloat16",
}
"""A model that divides over every mesh below."""

EXPERTS = {"num_experts": 4, "expert_size": 32}
FEATURES = (
    Feature("tensor parallelism", {}, {"model": 2}),
    Feature("sequence parallelism", {"sequence_parallel": True}, {"model": 2}),
    Feature("ZeRO-1", {"zero": 1}, {"data": 2}),
    Feature("ZeRO-2", {"zero": 2}, {"data": 2}),
    Feature("ZeRO-3", {"zero": 3}, {"data": 2}),
    Feature("pipeline parallelism (1F1B)", {"pipeline_schedule": "1f1b"}, {"stage": 2}),
    Feature("pipeline parallelism (interleaved)", {"pipeline_schedule": "interleaved", "chunks": 2}, {"stage": 2}),
    Feature("pipeline parallelism (GPipe)", {"pipeline_schedule": "gpipe"}, {"stage": 2}),
    Feature("context parallelism (ring)", {"context_method": "ring"}, {"context": 2}),
    Feature("context parallelism (gather)", {"context_method": "gather"}, {"context": 2}),
    Feature("mixture of experts", EXPERTS),
    Feature("expert parallelism", EXPERTS, {"expert": 2}),
    Feature("first layers dense", EXPERTS | {"first_dense_layers": 2}),
    Feature("experts in every other layer", EXPERTS | {"moe_every": 2}),
    Feature("expert capacity", EXPERTS | {"capacity_factor": 1.0}),
    Feature("selective recompute", {"recompute": "selective"}),
    Feature("full recompute", {"recompute": "full"}),
    Feature("full recompute in groups", {"recompute": "full", "recompute_num_layers": 2}),
    Feature("inputs offloaded to the host", {"recompute": "full", "recompute_offload": True}),
    Feature("optimizer offloaded to the host", {"offload": "optimizer"}),
    Feature("optimizer and parameters offloaded to the host", {"offload": "optimizer,parameters"}),
    Feature("unrolled layers", {"unroll_layers": True}),
    Feature("gradients reduced in bfloat16", {"grad_reduce_dtype": "bfloat16"}, {"data": 2}),
    Feature("float16 with loss scaling", {"compute_dtype": "float16"}),
    Feature("FP8", {"fp8": "delayed"}),
    Feature("deterministic", {"deterministic": True}),
    Feature("packed documents", {"reset_position_ids": True, "reset_attention_mask": True}),
    Feature("attention dropout", {"attention_dropout": 0.1}),
    Feature("latent attention", {"kv_lora_rank": 16}),
    Feature("LoRA", {"lora_rank": 4}),
    Feature("grouped-query attention", {"num_kv_heads": 2}),
    Feature("hybrid models", {"family": "hybrid", "layer_pattern": "(M*)x4", "ssm_head_dim": 8}),
    Feature("BERT", {"family": "bert"}),
    Feature("T5", {"family": "t5"}),
)


ON_A_GPU = {
    "float16 with loss scaling",
    "unrolled layers",
    "packed documents",
    "FP8",
    "latent attention",
    "mixture of experts, expert parallelism",
    "Llama, grouped-query attention",
    "hybrid models",
    "BERT",
    "T5",
}
"""Features whose gradients were compared on a GPU, an H100 or H200: docs/gpu.md."""

CHECKS: Mapping[str, tuple[str, str]] = {
    "data and tensor parallelism": ("train/test_step.py", "inspect/test_contract.py"),
    "sequence parallelism": ("models/test_joints.py", "inspect/test_contract.py"),
    "ZeRO-1, 2 and 3": ("sharding/test_zero.py", "inspect/test_contract.py"),
    "pipeline parallelism": ("train/test_stages.py", "inspect/test_stage_contract.py"),
    "context parallelism": ("train/test_context.py", "inspect/test_context_contract.py"),
    "mixture of experts, expert parallelism": ("train/test_experts.py", "inspect/test_experts_contract.py"),
    "recompute, offload to the host": ("models/test_recompute.py", "inspect/test_contract.py"),
    "offload of optimizer and parameters": ("train/test_offload.py", "inspect/test_optimizer_contract.py"),
    "unrolled layers": ("models/test_unrolled.py", "inspect/test_stacks.py"),
    "gradients reduced in bfloat16": ("sharding/test_wire.py", "inspect/test_stage_contract.py"),
    "float16 with loss scaling": ("train/test_precision.py", ""),
    "FP8": ("train/test_float8.py", "inspect/test_float8_contract.py"),
    "packed documents": ("sharding/test_flash.py", "inspect/test_context_contract.py"),
    "latent attention": ("parity/test_latent_attention.py", "inspect/test_llama_contract.py"),
    "LoRA": ("models/test_lora.py", "inspect/test_lora_contract.py"),
    "distillation": ("finetune/test_distillation.py", "inspect/test_distillation_contract.py"),
    "Llama, grouped-query attention": ("families/gpt/test_llama.py", "inspect/test_llama_contract.py"),
    "hybrid models": ("families/hybrid/test_model.py", "inspect/test_hybrid_contract.py"),
    "BERT": ("families/bert/test_model.py", "inspect/test_family_contracts.py"),
    "T5": ("families/t5/test_model.py", "inspect/test_family_contracts.py"),
}
"""Feature -> the tests of its numbers on CPUs, and of its program compiled for H100, below tests/."""


def refused() -> Iterator[tuple[Feature, Feature, str]]:
    """Yields the pairs of features that a run refuses, with its message."""
    for one, other in itertools.combinations(FEATURES, 2):
        if not _alternatives(one, other) and (reason := _why_not(one, other)):
            yield one, other, reason


_OF_DOCUMENTS = (
    f"ask for it with --attention cudnn; for {PACKED_TOKENS[0]:,} to {PACKED_TOKENS[-1]:,} tokens, "
    "heads of 64 or 128 and no windows it is the default on Hopper"
)


def without_flash_attention() -> Iterator[tuple[Feature, str]]:
    """Yields the features with which a run has no flash attention on an H100 by default, with the reason."""
    for feature in FEATURES:
        config, mesh = _combined(feature)
        if choose_kernel(config, "gpu", mesh=parse_mesh(mesh))[0] != "cudnn":
            _, reason = choose_kernel(replace(config, attention="cudnn"), "gpu", mesh=parse_mesh(mesh))
            yield (
                feature,
                reason or _OF_DOCUMENTS,
            )


def _alternatives(one: Feature, other: Feature) -> bool:
    """Returns whether two features are values of one setting, or degrees of one axis, and so exclude each other."""
    settings = any(other.settings.get(name, value) != value for name, value in one.settings.items())
    return settings or any(other.mesh.get(axis, degree) != degree for axis, degree in one.mesh.items())


def _combined(*features: Feature) -> tuple[Config, str]:
    settings: dict[str, Any] = dict(BASE)
    axes: dict[str, int] = {"data": 1, "model": 1}
    for feature in features:
        settings |= feature.settings
        axes |= feature.mesh
    mesh = ",".join(f"{axis}={degree}" for axis, degree in axes.items())
    return replace(Config(), **settings, mesh=mesh), mesh


def _why_not(*features: Feature) -> str | None:
    try:
        config, mesh = _combined(*features)
        validate(config)
        check_config(config, parse_mesh(mesh))
    except UserError as e:
        return str(e)
    return None


def page() -> str:
    """Returns the page, as Markdown."""
    names = ", ".join(feature.name for feature in FEATURES)
    by_message: dict[str, list[tuple[str, str]]] = {}
    for one, other, why in refused():
        by_message.setdefault(why, []).append((one.name, other.name))
    rows = "".join(
        f"| {_names(one for one, _ in pairs)} | {_names(other for _, other in pairs)} | {_cell(why)} |\n"
        for why, pairs in by_message.items()
    )
    slow = "".join(f"| {feature.name} | {_cell(why)} |\n" for feature, why in without_flash_attention())
    checks = "".join(
        f"| {name} | `tests/{cpu}` | {f'`tests/{gpu}`' if gpu else 'no'} | {_on_a_gpu(name)} |\n"
        for name, (cpu, gpu) in CHECKS.items()
    )
    return PAGE.format(names=names, rows=rows, slow=slow, checks=checks)


def _on_a_gpu(name: str) -> str:
    return "gradients, one GPU" if name in ON_A_GPU else "no"


def _names(names: Iterable[str]) -> str:
    """Joins names, each once; every pair of a message has one of each side."""
    return ", ".join(dict.fromkeys(names))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


PAGE = """# What can be combined, and how it was checked

<!-- Written by docs/make_reference.py from docs/compatibility.py: edit that, then `make docs`. -->

Every pair of these features was given to the checks with which a run begins: {names}.

They can be combined except for the following pairs, which `mtjax train`, `inspect` and `plan` refuse with this message
(for a small Llama; the numbers are of that model):

| feature | cannot be combined with | message |
|---|---|---|
{rows}
On H100 GPUs flash attention is used except with:

| feature | reason |
|---|---|
{slow}
## How each was checked

GPT and Llama have trained for some steps on one H100 and one H200, GPT in FP8 and hybrid models for 1,000. The
gradients of other features were compared with the CPU's ([results](../gpu.md#results)); no mesh of several GPUs has
run. Tests on
CPUs compare the losses and gradients of a mesh with those of one device, or with another implementation; tests of
compiled programs compile the program for H100 GPUs without one, and compare every collective in it with the contract.

| feature | numbers, on CPUs | program, compiled for H100 | run on a GPU |
|---|---|---|---|
{checks}"""
