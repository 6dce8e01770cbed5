"""A model small enough for any test, batches for it, and meshes over the virtual devices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mtjax.config import Config, replace
from mtjax.config.sizes import decoder_length, most_masked
from mtjax.families.bert.model import BERT
from mtjax.families.gpt.model import GPT
from mtjax.families.retro.model import Retro
from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import parse_mesh
from mtjax.models.language_model import run_sections
from mtjax.models.logits import full_logits
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.device_mesh import make_mesh
from mtjax.sharding.global_batch import global_batch
from mtjax.sharding.gradients import Accumulate, ManualRegion, distributed_gradients
from mtjax.sharding.param_specs import param_specs
from mtjax.sharding.zero import StepReduction
from mtjax.train.first_scales import FirstScales
from mtjax.train.step import State, TrainStep, make_train_step

VOCAB = 250
LATENT: dict[str, Any] = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
"""Latent attention in which no two widths are equal."""

MODERNBERT: dict[str, Any] = {
    "family": "bert",
    "position": "rope",
    "activation": "geglu_exact",
    "bias": False,
    "norm_bias": False,
    "embedding_norm": True,
    "first_attention_norm": False,
    "attention_window": 5,
    "window_layers": "FS",
    "rope_local_theta": 1000.0,
    "head_bias": False,
    "num_token_types": 0,
    "sentence_order": False,
}
"""An encoder with what distinguishes ModernBERT from BERT."""


def tiny_config(**fields: Any) -> Config:
    """2 layers, 8 heads of 4, sequence 16, a padded vocabulary of 256, batches of 8, float32, with dropout."""
    base = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 8,
        "sequence_length": 16,
        "vocab_size": VOCAB,
        "vocab_multiple": 256,
        "global_batch_size": 8,
        "compute_dtype": "float32",
        "loss_chunk": 40,
        "steps": 20,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "initial_learning_rate": 5e-3,  # the first update changes something: a warmup from 0 would hide errors in it
    }
    return replace(Config(), **(base | fields))


def mesh_of(text: str) -> Mesh:
    """A mesh over the first virtual devices."""
    return make_mesh(parse_mesh(text), jax.devices())


def records_like(axes: Any, parameters: Any, mesh: str = "1x1") -> Any:
    """Records of parameters with these logical names in the tensor layout."""
    return param_specs(axes, parameters, TENSOR, parse_mesh(mesh), "float32")


def drawn_parameters(placed: ShardedModel, seed: int = 0) -> Any:
    """The initial parameters of a run with this seed, each shard drawn on its device."""
    return placed.on_mesh(jax.jit(placed.draw, out_shardings=placed.parameter_sharding), jax.random.key(seed))


def model_logits(model: Any, hidden: jax.Array) -> jax.Array:
    """The logits of entire samples from a model's final hidden states; BERT's head has a transformation of these."""
    return model.logits(hidden) if isinstance(model, BERT) else full_logits(model, hidden)


def final_hidden(model: Any, tokens: Any, position_ids: Any = None, segment_ids: Any = None) -> jax.Array:
    """A decoder's final hidden states, as the output table reads them."""
    batch = {"tokens": tokens, "position_ids": position_ids, "segment_ids": segment_ids}
    return model.final_hidden(run_sections(model, batch, None)[0].x)


@dataclass(frozen=True)
class Whole:
    """A function of parameters and batch, a sum of losses, as a model that nothing cuts."""

    function: Callable[[Any, Any], jax.Array]

    sections: tuple[tuple[str, ...], ...] = ()

    def loss_sums(self, parameters: Any, microbatch: Any) -> dict[str, jax.Array]:
        return {"loss": self.function(parameters, microbatch)}

    def _uncut(self, *arguments: Any, **named: Any) -> Any:
        raise NotImplementedError

    boundary = embed = forward_layers = head_losses = _uncut


def gradients_like(
    loss_sum: Callable[[Any, Any], jax.Array], axes: Any, parameters: Any, batch: Any, mesh: str
) -> tuple[Any, Any]:
    """Losses and gradients of one microbatch, for parameters with these logical names in the tensor layout."""
    records = records_like(axes, parameters, mesh)
    region = ManualRegion(parse_mesh(mesh), TENSOR.rules, records)
    reduction = StepReduction(records, zero=0, num_microbatches=1)
    gradients_of = distributed_gradients(Whole(loss_sum), batch, region, Accumulate(1), reduction)
    return gradients_of(parameters, region.shard_batch(batch))


def program_of(mesh: str, **fields: Any) -> TrainStep:
    """The program of a tiny config, compiled once for all tests that ask for this config, in whatever words."""
    return _program(mesh, tiny_config(**fields))


@cache
def _program(mesh: str, config: Config) -> TrainStep:
    return make_train_step(config, mesh_of(mesh))


forget_programs = _program.cache_clear


def host_batch(config: Config, step: int) -> dict[str, np.ndarray]:
    """Random tokens of one step, as the config's family reads them; the same for every mesh."""
    size = config.training.global_batch_size
    kinds = {"bert": bert_batch, "t5": t5_batch, "retro": retro_batch}
    batch = kinds.get(config.model.family, gpt_batch)(config, np.random.default_rng(step))
    return batch | {"sample_index": np.arange(step * size, (step + 1) * size, dtype=np.uint32)}


def gpt_batch(config: Config, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Next tokens, a fifth of them masked; with documents of four tokens on average where these are kept apart, and of
    random length where samples have padding, whose tokens are as random as the others."""
    size, length = config.training.global_batch_size, config.model.sequence_length
    text = random.integers(0, config.model.vocab_size, (size, length + 1)).astype(np.int32)
    batch = {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (random.random((size, length)) < 0.8).astype(np.float32),
    }
    if config.data.reset_attention_mask:
        begins = random.random((size, length)) < 0.25
        first = np.maximum.accumulate(np.where(begins, np.arange(length), 0), axis=1)
        batch["segment_ids"] = begins.cumsum(axis=1).astype(np.int32)
        batch["position_ids"] = (np.arange(length) - first).astype(np.int32)
    is_text = np.arange(length) < random.integers(length // 4, length + 1, (size, 1))
    if (names := GPT.batch_arrays(config)).keys() >= {"padding_mask"}:
        batch["padding_mask"] = is_text.astype(np.int32)
        batch["loss_mask"] *= is_text
    return {name: batch[name] for name in names}


def retro_batch(config: Config, random: np.random.Generator) -> dict[str, np.ndarray]:
    """A GPT's, and neighbours of random tokens, which half of the tokens read where rows are packed."""
    batch, size = gpt_batch(config, random), config.training.global_batch_size
    wanted = {name: (size, *array.shape) for name, array in Retro.batch_arrays(config).items() if name not in batch}
    tops = {"neighbours": config.model.vocab_size, "reads_neighbours": 2}
    return batch | {name: random.integers(0, tops[name], shape).astype(np.int32) for name, shape in wanted.items()}


def bert_batch(config: Config, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Two sentences and padding, each of random length; one token to guess, or as many as there may be."""
    size, length = config.training.global_batch_size, config.model.sequence_length
    place = np.arange(length)[None]
    real = random.integers(length // 2, length + 1, (size, 1))
    wanted = random.integers(1, most_masked(length) + 1, (size, 1))
    order = random.permuted(np.broadcast_to(place, (size, length)), axis=1)
    guessed = np.where(place < real, order, length).argsort(axis=1).argsort(axis=1) < wanted
    text = random.integers(0, config.model.vocab_size, (size, length))
    batch = {
        "tokens": np.where(place < real, text, 0).astype(np.int32),
        "token_types": ((place >= real // 2) & (place < real)).astype(np.int32),
        "padding_mask": (place < real).astype(np.int32),
        "labels": np.where(guessed, random.integers(0, config.model.vocab_size, (size, length)), -1).astype(np.int32),
        "loss_mask": guessed.astype(np.float32),
        "sentence_order": random.integers(0, 2, size).astype(np.int32),
    }
    return {name: batch[name] for name in BERT.batch_arrays(config)}


def batch_of(program: TrainStep, step: int) -> dict[str, jax.Array]:
    """`host_batch` on the program's mesh."""
    size = program.config.training.global_batch_size
    return global_batch(program.batch_sharding, host_batch(program.config, step), size)


def initial_state(program: TrainStep) -> State:
    """Seed 0's, on the program's mesh. The first program of a model makes it; the others are spared compiling that, for
    initial parameters do not depend on the mesh (see `tests/families/gpt/test_model.py`)."""
    like = program.abstract_state
    kinds = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(like))
    model = replace(program.config, hidden_dropout=0.0, attention_dropout=0.0).model
    key = model, kinds, jax.tree.structure(like), tuple(program.layer_orders.items())
    if key not in _initial_states:
        _initial_states[key] = jax.tree.map(np.array, program.initialize(0))
    return jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), _initial_states[key], like)


_initial_states: dict[Any, Any] = {}


def step_gradients(program: TrainStep, state: State, batch: dict[str, jax.Array]) -> tuple[jax.Array, Any, Any]:
    """The loss of a step, its losses by name, and its gradients."""
    run = jax.jit(lambda state, batch: program.gradients(*program.gradient_inputs(state, batch)))
    return program.on_mesh(run, state, batch)


def run_steps(program: TrainStep, steps: int, state: State | None = None) -> tuple[State, list[dict[str, float]]]:
    """Steps from `state`, or from seed 0; the last state and every step's metrics."""
    state = state or initial_state(program)
    metrics, with_first_scales = [], FirstScales(program, print)
    for step in range(int(state.step), int(state.step) + steps):
        batch = batch_of(program, step)
        state, results = program.step(with_first_scales(state, batch), batch)
        metrics.append({name: float(value) for name, value in results.items() if not value.ndim})
    return state, metrics


def t5_batch(config: Config, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Text and what the decoder writes, each of random length."""
    size, reads, writes = config.training.global_batch_size, config.model.sequence_length, decoder_length(config.model)
    read, written = (random.integers(n // 2, n + 1, (size, 1)) for n in (reads, writes))
    text = random.integers(0, config.model.vocab_size, (size, writes + 1)).astype(np.int32)
    return {
        "encoder_tokens": random.integers(0, config.model.vocab_size, (size, reads)).astype(np.int32),
        "encoder_mask": (np.arange(reads) < read).astype(np.int32),
        "decoder_tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (np.arange(writes) < written).astype(np.float32),
    }


def num_carried(scan: Any) -> int:
    """How many of a scan's results its iterations pass on; the others it stacks."""
    inner = scan.params["jaxpr"].out_avals
    return sum(v.aval.shape == own.shape for v, own in zip(scan.outvars, inner, strict=True))
