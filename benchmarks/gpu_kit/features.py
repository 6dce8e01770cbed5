"""Gradients of one small model for each feature, on the GPU in bfloat16 against float32 on the CPU.

The limit of an error is twice that of the same program on the CPU, as in `numbers`.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gpu_kit.child import Child
from gpu_kit.numbers import FAMILIES, TWICE, config_of, distance, program_on
from mtjax.errors import UserError
from mtjax.layout.attention_kernel import documents_at_most
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep

Tree = Any
WORKERS = 6
"""Number of features whose programs are compiled at the same time."""


@dataclass(frozen=True)
class Feature:
    """A small model, and the settings that the feature consists of."""

    name: str
    fields: dict[str, Any]
    only_gpu: dict[str, Any] = field(default_factory=dict)
    """Settings that are not for the float32 reference on the CPU."""


_LLAMA = FAMILIES["llama"]
_EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_top_k": 2, "expert_size": 256}
_HYBRID: dict[str, Any] = {
    "family": "hybrid",
    "layer_pattern": "M*-M",
    "num_layers": 4,
    "ssm_groups": 2,
    "ssm_head_dim": 32,
}
_LATENT: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
_GEMMA: dict[str, Any] = {"norm_placement": "sandwich", "attention_softcap": 20.0, "head_dim": 128}
_SINKS: dict[str, Any] = {"attention_sinks": True, "attention_window": 64}

FEATURES = (
    Feature("documents in a sample", _LLAMA | {"reset_attention_mask": True, "reset_position_ids": True}),
    Feature(
        "documents in a sample, cuDNN's attention",
        _LLAMA | {"reset_attention_mask": True, "reset_position_ids": True},
        {"attention": "cudnn"},
    ),
    Feature(
        "up to 8 documents in a sample of 2,048 tokens, heads of 128, cuDNN's attention",
        _LLAMA | {"reset_attention_mask": True, "reset_position_ids": True, "sequence_length": 2048, "head_dim": 128},
        {"attention": "cudnn"},
    ),
    Feature("attention in Pallas, with dropout", {"attention_dropout": 0.1}, {"attention": "pallas"}),
    Feature("sliding window", _LLAMA | {"attention_window": 64, "window_layers": "SF"}),
    Feature("dropout", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    Feature("recompute, layers in a loop", {"recompute": "full", "unroll_layers": False}),
    Feature("experts", _LLAMA | _EXPERTS),
    Feature("Mamba-2 beside attention", _HYBRID),
    Feature("gated delta nets beside attention", _HYBRID | {"layer_pattern": "G*-G"}),
    Feature("latent attention", _LLAMA | _LATENT | {"num_kv_heads": None}),
    Feature("soft cap and sandwich norms", _LLAMA | _GEMMA),
    Feature("sinks and windows", _LLAMA | _SINKS),
    Feature("BERT", {"family": "bert"}),
    Feature("T5", {"family": "t5", "position": "relative"}),
    Feature("FP8, tensorwise", _LLAMA, {"fp8": "tensorwise"}),
    Feature("FP8, delayed", _LLAMA, {"fp8": "delayed"}),
    Feature("FP8, rowwise", _LLAMA, {"fp8": "rowwise"}),
)


def run(child: Child) -> dict[str, Any]:
    """Returns each feature's relative error and limit, and `ok` if all hold."""
    features = FEATURES[:: 6 if child.rehearse else 1]
    smaller = {"hidden_size": 64, "sequence_length": 32} if child.rehearse else {}
    found: dict[str, Any] = {"features": []}
    with ThreadPoolExecutor(1 if child.rehearse else WORKERS) as pool:
        for row in pool.map(lambda feature: _row(feature, smaller), features):
            found["features"].append(row)
            child.answer(found)
    found["ok"] = all(row["ok"] for row in found["features"])
    return found


def _row(feature: Feature, smaller: dict[str, Any]) -> dict[str, Any]:
    try:
        return compare(feature, smaller)
    except (UserError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as e:
        return {"feature": feature.name, "error": None, "limit": None, "ok": False, "why": str(e)[:600]}


def compare(feature: Feature, smaller: dict[str, Any]) -> dict[str, Any]:
    """Compares a feature's gradients on the GPU with those on the CPU."""
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    fields = FAMILIES["gpt"] | feature.fields | smaller
    reference = program_on(cpu, config_of(fields | {"compute_dtype": "float32"}))
    loss, exact = gradients(reference, jax.device_get(reference.initialize(0).parameters))
    low = {"compute_dtype": "bfloat16"} | feature.only_gpu
    rounded = program_on(cpu, config_of(fields | low | ({"attention": "xla"} if "attention" in low else {})))
    parameters = jax.device_get(rounded.initialize(0).parameters)  # the reference's, and scales of FP8
    limit = TWICE * distance(_like(exact, gradients(rounded, parameters)[1]), exact)
    program = program_on(gpu, config_of(fields | low))
    their_loss, theirs = gradients(program, parameters)
    error = distance(_like(exact, theirs), exact)
    return {
        "feature": feature.name,
        "error": error,
        "limit": limit,
        "ok": error <= limit,
        "loss": their_loss,
        "loss_on_the_cpu": loss,
        "attention": program.config.model.attention,
    }


def _like(tree: Tree, other: Tree) -> Tree:
    """Returns the leaves of `other` that `tree` has: without the scales of FP8."""
    leaves = dict(jax.tree_util.tree_leaves_with_path(other))
    return jax.tree_util.tree_map_with_path(lambda path, _: leaves[path], tree)


def gradients(program: TrainStep, parameters: Tree) -> tuple[float, Tree]:
    """Computes loss and gradients of the family's random batch, and copies them to the host."""
    from tests.tiny import host_batch

    size = program.config.training.global_batch_size
    arrays = host_batch(program.config, 0)
    if "segment_ids" in arrays:  # 1, 2, 4, ... documents, as many as cuDNN's kernel has statistics for
        place = np.broadcast_to(np.arange(arrays["tokens"].shape[1]), arrays["tokens"].shape)
        count = np.minimum(2 ** np.arange(size), documents_at_most(place.shape[1]))[:, None]
        long = -(-place.shape[1] // count)
        arrays["segment_ids"] = (place // long).astype(np.int32)
        arrays["position_ids"] = (place % long).astype(np.int32)
    batch = global_batch(program.batch_sharding, arrays, size)
    state = program.initialize(0)
    state = dataclasses.replace(state, parameters=jax.device_put(parameters, program.parameter_sharding))
    loss, _, found = program.on_mesh(
        jax.jit(lambda s, b: program.gradients(*program.gradient_inputs(s, b))), state, batch
    )
    return float(loss), jax.device_get(found)
