"""A token that another rank has: a model learns to find the one that matters among 4,096, wherever it stands.

Run it without the flags by which other tests compile quickly (docs/context.md), or it takes ten minutes and more.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep
from tests.tiny import program_of

TOKENS, WAYS, BATCH, STEPS, ALONE = 4096, 4, 4, 140, 6
ASKS, NEEDLES, HAY = 0, 16, 4
"""Tokens: the question, those that may be the needle, and the hay around it."""
FIELDS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 1,
    "norm": "rmsnorm",
    "position": "rope",
    "sequence_length": TOKENS,
    "vocab_size": 1 + NEEDLES + HAY,
    "vocab_multiple": 32,
    "global_batch_size": BATCH,
    "microbatch_size": 1,
    "loss_chunk": TOKENS,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "steps": STEPS,
    "warmup_steps": 5,
    "learning_rate": 1e-2,
    "min_learning_rate": 1e-3,
    "init_std": 0.1,
}


def samples(step: int, place: Any = None) -> dict[str, np.ndarray]:
    """Hay, and questions whose answer is the needle that stands before them: one at a place, or in learning some."""
    random = np.random.default_rng(step)
    tokens = random.integers(1 + NEEDLES, 1 + NEEDLES + HAY, (BATCH, TOKENS)).astype(np.int32)
    needles, first = random.integers(1, 1 + NEEDLES, (BATCH, 1)), np.full(BATCH, place or 0)
    asks = random.random((BATCH, TOKENS)) < 1 / 16
    for sample in range(BATCH):
        count = 1 if place else 4 ** random.integers(0, 6)
        places = np.full(1, place) if place else random.integers(0, TOKENS // 2, count)
        tokens[sample, places], asks[sample, places] = needles[sample], False
        first[sample] = places.min()
    asks &= np.arange(TOKENS) > first[:, None]
    asks[:, -1] = True
    tokens[asks] = ASKS
    labels = np.broadcast_to(needles, tokens.shape).astype(np.int32)
    numbers = np.arange(BATCH, dtype=np.uint32) + step * BATCH
    return {"tokens": tokens, "labels": labels, "loss_mask": asks.astype(np.float32), "sample_index": numbers}


def learned(mesh: str, steps: int = STEPS) -> tuple[TrainStep, Any, list[float]]:
    """A program, its parameters after some steps, and the losses of these."""
    program = program_of(mesh, **FIELDS)
    state, losses = program.initialize(0), []
    for step in range(steps):
        state, metrics = program.step(state, global_batch(program.batch_sharding, samples(step), BATCH))
        losses.append(float(metrics["loss"]))
    return program, state.parameters, losses


@pytest.mark.exhaustive
def test_a_needle_is_found_whichever_rank_has_it():
    """Each of the four ranks has it in turn; losses are those of one device on the way."""
    program, parameters, losses = learned(f"data=1,context={WAYS},model=1")
    _, _, alone = learned("1x1", ALONE)
    chunk, found = TOKENS // (2 * WAYS), []
    for owner in range(WAYS):
        batch = global_batch(program.batch_sharding, samples(10_000 + owner, owner * chunk + chunk // 2), BATCH)
        total, weight = program.evaluation(parameters, batch)["loss"]
        found.append(float(jnp.exp(-total / weight)))
    apart = np.abs(np.array(alone) / losses[:ALONE] - 1).max()
    print("losses", losses[::10], "apart from one device", apart, "probability of the needle, by its rank", found)
    assert apart < 1e-5
    assert min(found) > 0.8
