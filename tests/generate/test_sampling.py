"""Token frequencies match probabilities that numpy computes in float64, with all logits processors, on any mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtjax.generate.sampling import IN_PROMPT, LogitsParams, SamplingBatch, sample_tokens, score_tokens
from mtjax.layout.layouts import TENSOR_RULES
from mtjax.sharding.axes import spec, use_rules
from mtjax.sharding.vocab import OutputOptions
from tests.tiny import mesh_of

RULES = dataclasses.replace(TENSOR_RULES, batch=()).restricted_to(("data", "model"))
VOCAB, PADDED, WIDTH, DRAWS = 21, 32, 8, 20_000
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.standard_normal(WIDTH).astype(np.float32)
TABLE = RANDOM.standard_normal((PADDED, WIDTH)).astype(np.float32)
COUNTS = np.zeros(PADDED, np.int32)
COUNTS[[2, 3, 5]] = IN_PROMPT, IN_PROMPT + 2, 1


def probabilities(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0, presence=0.0, frequency=0.0):
    """Computes the probabilities with all logits processors, unsharded."""
    logits = (TABLE[:VOCAB].astype(np.float64) @ HIDDEN).copy()
    times = COUNTS[:VOCAB] & (IN_PROMPT - 1)
    known = COUNTS[:VOCAB] > 0
    logits[known] = np.where(logits > 0, logits / repetition, logits * repetition)[known]
    logits -= presence * (times > 0) + frequency * times
    logits /= temperature
    if top_k:
        logits[logits < np.sort(logits)[-min(top_k, VOCAB)]] = -np.inf
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def drawn(mesh: str, rows: int, **wanted: float) -> np.ndarray:
    """Samples one token for each row, with different seeds."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}
    settings |= {"presence": 0.0, "frequency": 0.0} | wanted
    arrays = {
        name: np.full(rows, value, np.int32 if name == "top_k" else np.float32) for name, value in settings.items()
    }
    seeds = np.stack([np.zeros(rows), np.arange(rows)], 1).astype(np.uint32)
    draws = SamplingBatch(LogitsParams(**arrays), seeds, np.full(rows, 3, np.int32), np.zeros(rows, bool))
    with jax.set_mesh(mesh_of(mesh)), use_rules(RULES):
        return np.asarray(_compiled(np.tile(HIDDEN, (rows, 1)), TABLE, np.tile(COUNTS, (rows, 1)), draws))


@jax.jit
def _compiled(hidden, table, counts, draws):
    place = lambda a, *names: jax.sharding.reshard(jnp.asarray(a), spec(*names))  # noqa: E731
    table, counts = place(table, "vocab", "embed"), place(counts, None, "vocab")
    return sample_tokens(hidden, table, counts, draws, OutputOptions(VOCAB)).token


SETTINGS = [
    {},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 1000, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "repetition": 1.4, "presence": 0.5, "frequency": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_token_frequencies_match_probabilities(settings) -> None:
    tokens = drawn("1x4", DRAWS, **settings)
    expected = probabilities(**settings) * DRAWS
    seen = np.bincount(tokens, minlength=VOCAB)
    assert len(seen) == VOCAB and not seen[expected == 0].any()
    possible = expected > 0
    chi_squared = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert freedom >= 3
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom)  # 4 standard deviations above the mean


def test_samples_do_not_depend_on_the_mesh() -> None:
    np.testing.assert_array_equal(drawn("1x4", 500, top_p=0.9), drawn("1x1", 500, top_p=0.9))
    assert (drawn("1x4", 500, temperature=0.0) == probabilities().argmax()).all()


def test_logprobs_are_those_of_unprocessed_logits() -> None:
    tokens = np.arange(VOCAB, dtype=np.int32)

    @jax.jit
    def score(hidden, table):
        return score_tokens(hidden, jax.sharding.reshard(table, spec("vocab", "embed")), tokens, OutputOptions(VOCAB))

    with jax.set_mesh(mesh_of("1x4")), use_rules(RULES):
        scores = score(np.tile(HIDDEN, (VOCAB, 1)), TABLE)
    expected = np.log(probabilities())
    np.testing.assert_allclose(scores.logprob, expected, atol=1e-5)
    few = scores.top_ids.shape[1]
    assert np.asarray(scores.top_ids)[0].tolist() == np.argsort(-expected)[:few].tolist()
    first = np.asarray(scores.top_ids)[:, 0]
    assert scores.logprob[first[0]] == scores.top_logprobs[0, 0]  # the very number: lm-eval compares for equality
