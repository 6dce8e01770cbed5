"""Prompts of models with recurrent states begin from snapshots: texts and log-probabilities are those without reuse."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.analysis.anatomy import anatomy_of
from mtjax.config.storage import check_snapshots
from mtjax.errors import UserError
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine
from mtjax.generate.request import Request, Sampling, Token
from mtjax.models.sharded_model import ShardedModel
from mtjax.plan.inference import decoding_memory
from mtjax.sharding.axes import use_rules
from tests.families.hybrid.test_model import QWEN3_NEXT, SHARED, SIZES
from tests.tiny import VOCAB, drawn_parameters, final_hidden, mesh_of, model_logits, tiny_config

CHUNK = 16
SETTINGS: dict[str, dict[str, Any]] = {
    "HM": {"attention_output_scale": 0.9, "ssm_output_scale": 0.7},
    "MZz": SHARED,
    "G*": QWEN3_NEXT,
    "GE*E": QWEN3_NEXT | {"num_experts": 4, "expert_size": 20},
    "M*M*": {"attention_window": 9, "window_layers": "SFFS"},
}


@cache
def decoder_of(pattern: str, mesh: str, dtype: str) -> GenerationPrograms:
    sizes = SIZES | SETTINGS.get(pattern, {}) | {"family": "hybrid", "layer_pattern": pattern}
    config = tiny_config(**sizes, num_layers=len(pattern), init_std=0.3, sequence_length=96, compute_dtype=dtype)
    placed = ShardedModel(config, mesh_of(mesh))
    return GenerationPrograms(placed, drawn_parameters(placed))


def engine_of(
    pattern: str = "M*", mesh: str = "1x2", *, sequences: int = 2, snapshots: int | None = None, **options: Any
) -> Engine:
    sizes: dict[str, Any] = {"chunks": (CHUNK,), "prefill_tokens_per_step": 8, "min_cache_length": 96}
    settings: dict[str, Any] = sizes | {"dtype": "float32"} | options
    decoder = decoder_of(pattern, mesh, settings.pop("dtype"))
    return Engine(decoder, sequences, **settings, state_snapshots=snapshots)


def texts(engine: Engine, *prompts: list[int], most: int = 6, **options: Any) -> list[list[Token]]:
    results: list[list[Token]] = [[] for _ in prompts]
    for prompt, out in zip(prompts, results, strict=True):
        engine.submit(Request(tuple(prompt), Sampling(most), logprobs=True, on_token=listener(out), **options))
    engine.run()
    return results


def listener(out: list[Token]) -> Any:
    return out.append  # None, which does not end the text


def reused(engine: Engine, *prompts: list[int], **options: Any) -> tuple[list[list[Token]], int]:
    """Returns texts, and how many tokens of their prompts were reused."""
    before = engine.reused
    return texts(engine, *prompts, **options), engine.reused - before


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


SYSTEM = tokens(0, 35)
"""Two chunks, and three tokens."""
EVERY = [
    ("M*", "1x2", {}),
    pytest.param("MG", "1x1", {}, marks=pytest.mark.exhaustive),
    pytest.param("M*G-", "1x2", {"dtype": "bfloat16"}, marks=pytest.mark.long),
    pytest.param("HM", "2x2", {"chunks": (8, 16)}, marks=pytest.mark.exhaustive),
    pytest.param("MZz", "1x2", {}, marks=pytest.mark.long),
    pytest.param("G*", "1x4", {}, marks=pytest.mark.exhaustive),
    pytest.param("GE*E", "1x2", {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("pattern", "mesh", "options"), EVERY)
def test_texts_are_those_without_reuse(pattern: str, mesh: str, options: dict[str, Any]) -> None:
    """To the bit: a conversation that goes on, prompts that depart from it, and from a text that is still written."""
    first = SYSTEM + tokens(1, 20)
    prompts = [first, first + tokens(2, 20), SYSTEM + tokens(3, 4), SYSTEM + tokens(4, 9), SYSTEM[:20], SYSTEM]
    plain, engine = (engine_of(pattern, mesh, snapshots=number, **options) for number in (0, None))
    alone = [texts(plain, prompt)[0] for prompt in prompts]
    assert plain.reused == 0 and len({tuple(token.id for token in out) for out in alone}) == len(prompts)
    counts = []
    for prompt, out in zip(prompts, alone, strict=True):
        (again,), count = reused(engine, prompt)
        assert again == out
        counts.append(count)
    assert counts == [0, 48, 32, 32, 16, 32]
    # Two at a time in another engine: the second begins while the first is written.
    both, count = reused(engine_of(pattern, mesh, **options), prompts[0], prompts[2])
    assert both == [alone[0], alone[2]] and count == 32


@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [
        ("M*", "1x2"),
        pytest.param("MG", "1x2", marks=pytest.mark.exhaustive),
        pytest.param("MZz", "1x1", marks=pytest.mark.long),  # adapters beside matrices that are stored transposed
    ],
)
def test_log_probabilities_are_those_of_training(pattern: str, mesh: str) -> None:
    """Of a text that began from a snapshot, with one pass of the model that is trained."""
    engine, prompt = engine_of(pattern, mesh), SYSTEM + tokens(5, 6)
    texts(engine, SYSTEM + tokens(6, 3))
    (out,), count = reused(engine, prompt)
    assert count == 32
    placed, row = engine.decoder.sharded_model, np.array([[*prompt, *(token.id for token in out)]])
    with jax.set_mesh(placed.mesh), use_rules(placed.layout.rules.with_replicated_activations):
        model: Any = placed.inference_model(drawn_parameters(placed))
        logits = jax.jit(lambda row: model_logits(model, final_hidden(model, row)))(row)
    logits = np.asarray(logits)[0, :, :VOCAB].astype(np.float64)
    known = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    at = np.arange(len(prompt) - 1, row.size - 1)
    written: Any = [token.logprob for token in out]
    np.testing.assert_allclose(written, known[at, row[0, len(prompt) :]], atol=1e-4)


def test_other_prompts_are_not_mixed_up() -> None:
    """A prompt that differs in a token before a snapshot does not begin from it."""
    engine, plain = engine_of(), engine_of(snapshots=0)
    for at, count in ((0, 0), (15, 0), (16, 16), (31, 16), (32, 32)):
        texts(engine, SYSTEM)
        other = [*SYSTEM[:at], (SYSTEM[at] + 1) % VOCAB, *SYSTEM[at + 1 :]]
        assert reused(engine, other) == (texts(plain, other), count), at


def test_cancelled_prompts_leave_their_snapshots() -> None:
    engine, plain = engine_of(), engine_of(snapshots=0)
    ends: list[str] = []
    request = Request(tuple(SYSTEM), Sampling(4), on_end=ends.append)
    engine.submit(request)
    engine.step()
    engine.cancel(request)
    other = SYSTEM[:18]
    assert reused(engine, other) == (texts(plain, other), 16) and ends == ["cancelled"]


@pytest.mark.long
def test_prompts_that_are_scored_or_counted() -> None:
    """They begin at their first token, and leave no snapshots."""
    engine, plain = engine_of(), engine_of(snapshots=0)
    counted = Sampling(6, repetition_penalty=1.5)
    for options in ({"echo": True}, {"sampling": counted}):
        assert reused(engine, SYSTEM) == (texts(plain, SYSTEM), 0 if "echo" in options else 32)
        out: list[Token] = []
        settings: dict[str, Any] = {"sampling": Sampling(6), "on_token": listener(out)} | options
        request = Request(tuple(SYSTEM), **settings)
        before = engine.reused
        engine.submit(request)
        engine.run()
        assert engine.reused == before and len(out) == 6
    fresh = engine_of()
    texts(fresh, SYSTEM, echo=True)
    assert reused(fresh, SYSTEM) == (texts(plain, SYSTEM), 0)


@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [
        ("M*", "1x2"),
        pytest.param("G*", "1x4", marks=pytest.mark.exhaustive),  # two groups on four ranks
        pytest.param("HM", "2x2", marks=pytest.mark.exhaustive),
        pytest.param("MZz", "1x2", marks=pytest.mark.long),
    ],
)
def test_memory_of_snapshots_is_planned(pattern: str, mesh: str) -> None:
    engine = engine_of(pattern, mesh)
    texts(engine, SYSTEM)
    states = [snapshot.states for snapshot in engine._prefixes._snapshots]
    held = sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(states))
    anatomy, degree = anatomy_of(engine.decoder.config.model), int(mesh[-1])
    assert decoding_memory(anatomy, degree, 2, 96, 4, snapshots=len(states)).snapshots == held > 0


@pytest.mark.long
def test_shrinking_the_cache_drops_what_it_cuts_off() -> None:
    engine, plain = (engine_of(snapshots=number, min_cache_length=16) for number in (8, 0))
    texts(engine, long := tokens(15, 80))
    texts(engine, tokens(16, 3), most=2)
    assert [len(each) for each in engine._prefixes._snapshots] == [16]
    assert reused(engine, long) == (texts(plain, long), 16)


@pytest.mark.long
def test_windows_beside_states() -> None:
    """A snapshot is of use as long as windows of 9 tokens have the last ones before it."""
    engine, plain = (engine_of("M*M*", sequences=1, snapshots=number) for number in (None, 0))
    texts(engine, SYSTEM[:33], most=1)
    other = [*SYSTEM[:32], 7, 5]
    assert reused(engine, other, most=12) == (texts(plain, other, most=12), 32)
    again = [*SYSTEM[:32], 4]
    assert reused(engine, again, most=12) == (texts(plain, again, most=12), 0)


def test_snapshots_of_a_model_without_states_are_refused() -> None:
    check_snapshots(tiny_config().model, None)
    with pytest.raises(UserError, match="--state-snapshots 3 needs a model with recurrent states .*a gpt has none"):
        check_snapshots(tiny_config().model, 3)
