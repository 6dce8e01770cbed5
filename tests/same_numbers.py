"""One step on a mesh against the same step on one device: which features, on which meshes, and whether they agree.

`assert_same` compares, and notes what it has compared; with `--same-numbers FILE` pytest writes the notes of all tests
that passed, from which docs/same_numbers.py makes docs/reference/same-numbers.md.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np

from mtjax.config import Config
from mtjax.layout.stages import order_of
from mtjax.models.routers import LOAD, LOST, ROUTER_AUX_LOSS, Z_LOSS
from mtjax.models.sharded_model import ShardedModel
from mtjax.models.teacher import HARD, SOFT
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep
from tests.tiny import host_batch, initial_state

FEATURES: Mapping[str, Callable[[Config], Any]] = {
    "GPT": lambda c: c.model.family == "gpt",
    "Llama": lambda c: c.model.family == "llama",
    "BERT": lambda c: c.model.family == "bert",
    "T5": lambda c: c.model.family == "t5",
    "Retro": lambda c: c.model.family == "retro",
    "Retro, rows with passages": lambda c: c.model.family == "retro" and c.finetuning.task == "chat",
    "Retro, encoder frozen": lambda c: c.model.retro_frozen == "encoder",
    "Retro, decoder frozen": lambda c: c.model.retro_frozen == "decoder",
    "head: classes": lambda c: c.model.head == "classification",
    "head: a number": lambda c: c.model.head == "regression",
    "head: choices": lambda c: c.model.head == "choices",
    "head: spans": lambda c: c.model.head == "spans",
    "grouped-query attention": lambda c: c.model.num_kv_heads not in (None, c.model.num_heads),
    "latent attention": lambda c: c.model.kv_lora_rank,
    "attention sinks": lambda c: c.model.attention_sinks,
    "experts, auxiliary and z losses": lambda c: (
        c.model.num_experts and c.model.router_aux_loss and c.model.router_z_loss
    ),
    "experts, sigmoid router with biases": lambda c: c.model.num_experts and c.model.router_bias,
    "experts, capacity": lambda c: c.model.num_experts and c.model.capacity_factor is not None,
    "experts, samples with padding": lambda c: c.model.num_experts and c.finetuning.task == "chat",
    "experts in some layers": lambda c: c.model.first_dense_layers or c.model.moe_every > 1,
    "LoRA, the rest frozen": lambda c: c.model.lora_rank,
    "distillation": lambda c: c.finetuning.teacher is not None,
    "packed documents": lambda c: c.data.reset_attention_mask,
    "multi-token prediction": lambda c: c.model.mtp_num_layers,
    "sliding windows": lambda c: c.model.attention_window,
    "Mamba-2 beside attention": lambda c: c.model.family == "hybrid",
    "tied tables": lambda c: c.model.head == "language" and c.model.tie_embeddings,
    "untied tables": lambda c: c.model.head == "language" and not c.model.tie_embeddings,
    "dropout": lambda c: c.model.hidden_dropout or c.model.attention_dropout,
    "gradient accumulation": lambda c: c.training.microbatch_size,
    "recompute": lambda c: c.training.recompute != "none",
    "unrolled layers": lambda c: c.training.unroll_layers,
}
MESHES: Mapping[str, Callable[[Config, Mapping[str, int]], Any]] = {
    "data": lambda c, m: m["data"] > 1 and not c.parallel.zero,
    "ZeRO-1": lambda c, m: m["data"] > 1 == m["shard"] and c.parallel.zero == 1,
    "ZeRO-2": lambda c, m: m["data"] > 1 == m["shard"] and c.parallel.zero == 2,
    "ZeRO-3": lambda c, m: m["data"] > 1 == m["shard"] and c.parallel.zero == 3,
    "groups, ZeRO-1": lambda c, m: m["shard"] > 1 and c.parallel.zero == 1,
    "groups, ZeRO-2": lambda c, m: m["shard"] > 1 and c.parallel.zero == 2,
    "groups, ZeRO-3": lambda c, m: m["shard"] > 1 and c.parallel.zero == 3,
    "tensor": lambda c, m: m["model"] > 1 and not c.parallel.sequence_parallel and c.parallel.tensor_layout == "1d",
    "tensor and sequence": lambda c, m: m["model"] > 1 and c.parallel.sequence_parallel,
    "2D": lambda c, m: c.parallel.tensor_layout == "2d",
    "1F1B": lambda c, m: m["stage"] > 1 and c.parallel.pipeline_schedule == "1f1b",
    "interleaved": lambda c, m: m["stage"] > 1 and c.parallel.pipeline_schedule == "interleaved",
    "GPipe": lambda c, m: m["stage"] > 1 and c.parallel.pipeline_schedule == "gpipe",
    "ring": lambda c, m: m["context"] > 1 and c.parallel.context_method == "ring",
    "all-gather": lambda c, m: m["context"] > 1 and c.parallel.context_method == "all-gather",
    "experts, all-gather": lambda c, m: m["expert"] > 1 and c.parallel.expert_dispatch == "all-gather",
    "experts, all-to-all": lambda c, m: m["expert"] > 1 and c.parallel.expert_dispatch == "all-to-all",
}
LOSSES = ("loss", "masked_lm", "sentence_order", HARD, SOFT, ROUTER_AUX_LOSS, Z_LOSS, LOAD, LOST, "tokens")
LOSSES += ("mtp_1_loss", "mtp_2_loss", "grad_norm", "learning_rate")
BATCHES = ("uneven", "one sample alone")
"""Batches that are compared: with tokens at random, so that ranks have different numbers of them; and with tokens in
the second half of the last sample alone, so that all other ranks have none."""
TOLERANCE = 1e-5
ROUNDING = float(np.finfo(np.float32).eps)
GRADIENT, UPDATE, INITIAL, MOMENT = "gradient of ", "update of ", "initial ", ".mu."

compared: list[dict[str, list[str]]] = []
"""Features and meshes of the programs that the running test has compared, for conftest.py."""


def by_name(placed: ShardedModel, tree: Any) -> dict[str, np.ndarray]:
    """Arrays by dotted names, their layers in their own order."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name, array = jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(leaf)
        if order := order_of(name, placed.layer_orders):
            array = array[[order.flat.index(number) for number in range(1 + max(order.flat))]]
        named[name] = array
    return named


def full_batch(program: TrainStep, kind: str) -> dict[str, np.ndarray]:
    """A batch for any program, on the host: of text, of rows with labels, and with what a teacher adds."""
    config, random = program.config, np.random.default_rng(7)
    shapes = program.abstract_step_batch()
    size, length = config.training.global_batch_size, config.model.sequence_length
    lengths = random.integers(length // 4, length + 1, (size, 1))
    is_text = (np.arange(length) < lengths).astype(np.int32)
    batch = host_batch(config, 0) if config.model.head == "language" else rows(config, random, is_text)
    for name, shape in shapes.items():
        if name not in batch:
            batch[name] = random.normal(size=shape.shape).astype(shape.dtype)
    if kind == BATCHES[1]:
        weights = "loss_mask" if "loss_mask" in batch else "weight"
        alone = np.zeros_like(batch[weights])
        alone[-1:] = batch[weights][-1:]
        if alone.ndim > 1 and alone[-1, alone.shape[1] // 2 :].any():
            alone[:, : alone.shape[1] // 2] = 0
        if config.model.head == "choices":
            alone[-config.model.num_labels :] = 1
        batch[weights] = alone
    return batch


def rows(config: Config, random: np.random.Generator, is_text: np.ndarray) -> dict[str, np.ndarray]:
    """Texts of different lengths with labels, of different weights."""
    model, size = config.model, len(is_text)
    labels = {
        "regression": random.normal(size=size).astype(np.float32),
        "choices": np.repeat(random.integers(0, model.num_labels, size // model.num_labels), model.num_labels),
        "spans": random.integers(0, 3, (size, 2)),
    }.get(model.head, random.integers(0, model.num_labels, size))
    weight = random.uniform(0.5, 2.0, size).astype(np.float32)
    batch = {
        "tokens": np.where(is_text, random.integers(2, model.vocab_size, is_text.shape), 0).astype(np.int32),
        "token_types": (np.cumsum(is_text, 1) > 2).astype(np.int32) * is_text,
        "padding_mask": is_text,
        "label": labels if labels.dtype == np.float32 else labels.astype(np.int32),
        "weight": np.repeat(weight[:: model.num_labels], model.num_labels) if model.head == "choices" else weight,
        "sample_index": np.arange(size, dtype=np.uint32),
    }
    return batch if model.family == "bert" else {name: a for name, a in batch.items() if name != "token_types"}


@cache
def numbers(program: TrainStep, kind: str) -> dict[str, np.ndarray]:
    """Losses by name, the norm, gradients (Adam's moments after one step, clipped) and what the update makes."""
    shapes, host = program.abstract_step_batch(), full_batch(program, kind)
    size = program.config.training.global_batch_size
    tables = {name for name, shape in shapes.items() if shape.shape[:1] != (size,)}
    batch = global_batch(program.batch_sharding, {n: host[n] for n in shapes if n not in tables}, size)
    batch |= {name: jax.device_put(host[name], shapes[name].sharding) for name in tables}
    before = by_name(program, initial_state(program).parameters)
    state, metrics = program.step(initial_state(program), batch)
    found = {name: np.asarray(metrics[name]) for name in LOSSES if name in metrics}
    moments = {n.partition(MOMENT)[2]: a for n, a in by_name(program, state.optimizer).items() if MOMENT in n}
    found |= {f"{GRADIENT}{name}": array for name, array in moments.items()}
    after = by_name(program, state.parameters)
    found |= {f"{UPDATE}{name}": after[name] - value for name, value in before.items()}
    return found | {f"{INITIAL}{name}": value for name, value in before.items()}


def assert_same(program: TrainStep, one: TrainStep) -> None:
    """Compares a step on a mesh with the same step of a program for one device, for both batches."""
    for kind in BATCHES:
        found, known = numbers(program, kind), numbers(one, kind)
        assert found.keys() == known.keys()
        for name, value in known.items():
            label, tolerance = f"{name} ({kind}, {program.config.parallel.mesh})", TOLERANCE * _scale(name, known)
            if name.startswith(UPDATE):
                moment = known.get(f"{GRADIENT}{name.removeprefix(UPDATE)}")
                if moment is None:  # frozen
                    assert not value.any() and not found[name].any(), label
                    continue
                tolerance = tolerance + _of_adam(one.config, moment, known)
                # The update is the difference of two parameters in float32.
                tolerance = tolerance + ROUNDING * np.abs(known[f"{INITIAL}{name.removeprefix(UPDATE)}"])
            wrong = ~(np.abs(found[name] - value) <= tolerance)  # a NaN is wrong, too
            assert not wrong.any(), f"{label}: {found[name][wrong][:5]} instead of {value[wrong][:5]}"
    compared.append(features_of(program))


def _scale(name: str, known: Mapping[str, np.ndarray]) -> float:
    """What a difference is relative to: the largest element; of a gradient at least what rounding in float32 leaves of
    terms as large as all gradients together, because some cancel to that, such as those of a key's bias."""
    largest = float(np.abs(known[name]).max())
    if not name.startswith(GRADIENT):
        return largest
    return max(largest, ROUNDING / TOLERANCE * _norm(known))


def _of_adam(config: Config, moment: np.ndarray, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """How much a gradient's tolerated difference may change its first update, lr g / (|g| + epsilon): Adam divides
    rounding noise by its own size, so an element that is noise may be updated either way."""
    gradient, epsilon = np.abs(moment) / (1 - config.optimizer.beta1), config.optimizer.epsilon
    noise = TOLERANCE * gradient.max() + ROUNDING * _norm(known) / (1 - config.optimizer.beta1)
    slope = epsilon / (np.maximum(gradient - noise, 0) + epsilon) ** 2
    return known["learning_rate"] * np.where(gradient <= noise, 2.0, np.minimum(noise * slope, 2.0))


def _norm(known: Mapping[str, np.ndarray]) -> float:
    return float(np.sqrt(sum(np.square(array).sum() for name, array in known.items() if name.startswith(GRADIENT))))


def features_of(program: TrainStep) -> dict[str, list[str]]:
    """Which features a program has, and what its mesh divides: the cells of the table that it is in."""
    config, ways = program.config, vars(program.mesh_shape)
    return {
        "features": [name for name, is_in in FEATURES.items() if is_in(config)],
        "meshes": [name for name, is_in in MESHES.items() if is_in(config, ways)],
    }
