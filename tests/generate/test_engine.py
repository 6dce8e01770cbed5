"""Engine: texts do not depend on mesh, batch or other requests; collectives and memory of a decode step."""

import dataclasses
import math
import re
import threading
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.errors import UserError
from mtjax.generate import sampling
from mtjax.generate.decoder import GenerationPrograms
from mtjax.generate.engine import Engine, QueueFull
from mtjax.generate.inspected import inspect_decoding
from mtjax.generate.request import Request, Sampling, Token
from mtjax.generate.sampling import MOST_LIKELY, SampledTokens
from mtjax.inspect.compiled import memory_of
from mtjax.inspect.targets import find_target
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.axes import use_rules
from tests.tiny import (
    LATENT,
    VOCAB,
    drawn_parameters,
    final_hidden,
    initial_state,
    mesh_of,
    model_logits,
    program_of,
    tiny_config,
)

LLAMA = {
    "family": "llama",
    "num_kv_heads": 2,
    "position": "rope",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
    "scaled_init": False,
}
ATTENTION = LLAMA | {
    "attention_bias": "qkv",
    "attention_scale": 0.7,
    "attention_softcap": 1.5,
    "attention_sinks": True,
    "qk_norm": True,
    "qk_norm_scope": "width",
    "qkv_clip": 1.2,
    "attention_scale_beta": 0.5,
    "rope_original_length": 3,
}
LATENTS = {
    "family": "llama",
    "scaled_init": False,
    "q_lora_rank": 28,
    **LATENT,
    "attention_softcap": 1.5,
    "attention_scale_beta": 0.5,
    "rope_original_length": 3,
    "attention_window": 9,
    "window_layers": "SF",
    "rope_layers": "RN",
}
WINDOWS = {"attention_window": 9, "window_layers": "SF"}
FAMILIES = {"gpt": {}, "llama": LLAMA, "attention": ATTENTION, "latents": LATENTS, "windows": WINDOWS}
PROMPTS = [np.random.default_rng(n).integers(0, VOCAB, n).tolist() for n in (3, 21, 5, 1, 9)]


@cache
def decoder_of(family: str, mesh: str, dtype: str = "float32") -> GenerationPrograms:
    """Builds a decoder with random weights that are large enough for varied texts."""
    config = tiny_config(init_std=0.3, sequence_length=64, compute_dtype=dtype, **FAMILIES[family])
    placed = ShardedModel(config, mesh_of(mesh))
    return GenerationPrograms(placed, drawn_parameters(placed))


def engine_of(family: str, mesh: str, sequences: int = 4, shortest: int = 64) -> Engine:
    return Engine(
        decoder_of(family, mesh), sequences, chunks=(8, 16), prefill_tokens_per_step=8, min_cache_length=shortest
    )


def texts(engine: Engine, prompts: list[list[int]], sampling: Sampling, seeds=None, **options) -> list[list[Token]]:
    results: list[list[Token]] = [[] for _ in prompts]
    for i, (prompt, out) in enumerate(zip(prompts, results, strict=True)):
        own = dataclasses.replace(sampling, seed=i if seeds is None else seeds[i])
        engine.submit(Request(tuple(prompt), own, on_token=lambda t, out=out: out.append(t), **options))
    engine.run()
    return results


def ids(results: list[list[Token]]) -> list[list[int]]:
    return [[token.id for token in out] for out in results]


WARPED = Sampling(24, temperature=1.5, top_k=40, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.2)


@pytest.mark.parametrize("family", [pytest.param("gpt", marks=pytest.mark.long), "llama"])
def test_texts_depend_neither_on_the_mesh_nor_on_the_batch(family: str) -> None:
    alone = [ids(texts(engine_of(family, "1x1", 1), [prompt], WARPED, [i]))[0] for i, prompt in enumerate(PROMPTS)]
    assert len({tuple(out) for out in alone}) == len(PROMPTS) and len({i for out in alone for i in out}) > 40
    assert ids(texts(engine_of(family, "1x1"), PROMPTS, WARPED)) == alone
    assert ids(texts(engine_of(family, "2x4"), PROMPTS, WARPED)) == alone
    again = ids(texts(engine_of(family, "1x1"), [PROMPTS[1]] * 2, WARPED, [1, 7]))
    assert again[0] == alone[1] != again[1]


@pytest.mark.parametrize("family", [pytest.param("gpt", marks=pytest.mark.exhaustive), "llama"])
def test_decode_logprobs_equal_prefill_logprobs(family: str) -> None:
    """Compares each token's log-probability with that of the same tokens as a prompt, in other chunks."""
    engine = engine_of(family, "2x4")
    (out,) = texts(engine, [PROMPTS[2]], Sampling(30), logprobs=True)
    scores: list[Token] = []
    full_text = (*PROMPTS[2], *(token.id for token in out))
    engine.submit(Request(full_text, Sampling(1), logprobs=True, echo=True, on_prompt=scores.extend))
    engine.run()
    assert [token.id for token in scores] == list(full_text) and scores[0].logprob is None
    read = scores[len(PROMPTS[2]) :]
    np.testing.assert_allclose([t.logprob for t in out], [t.logprob for t in read], atol=2e-5)
    assert all(next(iter(token.top_logprobs)) == token.id for token in out)  # greedy
    assert all(token.top_logprobs[token.id] == token.logprob for token in out)


@pytest.mark.parametrize("kind", ["attention", pytest.param("latents", marks=pytest.mark.long)])
def test_attention_to_a_cache_is_that_of_training(kind: str) -> None:
    """With everything that attention may do to queries, keys and scores."""
    (out,) = texts(engine_of(kind, "2x4"), [PROMPTS[1]], Sampling(12), logprobs=True)
    placed = decoder_of(kind, "1x1").sharded_model
    tokens = np.array([[*PROMPTS[1], *(token.id for token in out)]])
    with jax.set_mesh(placed.mesh), use_rules(placed.layout.rules.with_replicated_activations):
        model = placed.inference_model(drawn_parameters(placed))
        logits = jax.jit(lambda tokens: model_logits(model, final_hidden(model, tokens)))(tokens)[0, :, :VOCAB]
    known = np.asarray(jax.nn.log_softmax(np.asarray(logits)))[
        np.arange(len(PROMPTS[1]) - 1, tokens.size - 1), tokens[0, len(PROMPTS[1]) :]
    ]
    np.testing.assert_allclose([token.logprob for token in out], known, atol=1e-4)


@pytest.mark.long
def test_bfloat16_logprobs_are_close_to_float32() -> None:
    results: list[list[Token]] = [[], []]
    for dtype, out in zip(("float32", "bfloat16"), results, strict=True):
        decoder = decoder_of("llama", "1x4", dtype)
        assert {a.dtype.name for a in jax.tree.leaves(decoder.empty(1, 16)[0])} == {dtype}
        engine = Engine(decoder, 1, chunks=(16,), min_cache_length=32)
        engine.submit(Request(tuple(PROMPTS[1][:16]), Sampling(1), logprobs=True, echo=True, on_prompt=out.extend))
        engine.run()
    float32, bfloat16 = ([token.logprob for token in out[1:]] for out in results)
    np.testing.assert_allclose(float32, bfloat16, atol=0.6)
    assert np.abs(np.subtract(float32, bfloat16)).max() > 1e-3  # the dtypes did differ


def test_requests_join_and_leave() -> None:
    engine = engine_of("gpt", "1x1", 2, shortest=16)
    results: dict[str, list[int]] = {}
    ends: list[tuple[str, str]] = []

    def ask(name: str, prompt: list[int], most: int, **options) -> Request:
        out = results.setdefault(name, [])
        listener = {"on_token": lambda t: out.append(t.id), "on_end": lambda why: ends.append((name, why))}
        request = Request(tuple(prompt), Sampling(most), **(listener | options))
        engine.submit(request)
        return request

    ask("long", PROMPTS[0], 40)
    ask("to the end of the context", PROMPTS[1], 1000)
    third = ask("never begins", PROMPTS[2], 5)
    engine.step()
    assert engine.load == (1, 2)
    engine.cancel(third)
    leaving = ask("leaves", PROMPTS[3], 40)
    while len(results["leaves"]) < 3:
        engine.step()
    engine.cancel(leaving)
    ask("stops itself", PROMPTS[4], 9, on_token=lambda token: True)
    engine.run()
    assert engine.load == (0, 0) and len(ends) == 5
    assert dict(ends) == {
        "long": "length",
        "to the end of the context": "length",
        "never begins": "cancelled",
        "leaves": "cancelled",
        "stops itself": "stop",
    }
    assert len(results["to the end of the context"]) == 64 - len(PROMPTS[1])
    expected = ids(texts(engine_of("gpt", "1x1", 1), [PROMPTS[0]], Sampling(40)))[0]
    assert results["long"] == expected
    stopped = ids(texts(engine, [PROMPTS[0]], Sampling(40), stop_ids=frozenset(expected[5:6])))[0]
    assert stopped == expected[: expected.index(expected[5])]


def test_prefix_cache() -> None:
    """Reuses chunks of 16 tokens: from an ended, a running, and a simultaneously submitted sequence."""
    common = np.random.default_rng(9).integers(0, VOCAB, 35).tolist()
    prompts = [[*common, 1, 2], [*common, 3], common[:20], common[:16], [*common[:31], 5, 6], common[:4]]
    sampling = Sampling(12, temperature=1.5, presence_penalty=1.5)
    alone = [ids(texts(engine_of("gpt", "1x1", 1), [prompt], sampling, [i]))[0] for i, prompt in enumerate(prompts)]
    assert len({tuple(out) for out in alone}) == len(prompts)
    engine = engine_of("gpt", "1x1", 2)
    assert ids(texts(engine, prompts[:2], sampling, [0, 1])) == alone[:2]
    assert engine.reused == 32
    assert ids(texts(engine, prompts[2:], sampling, [2, 3, 4, 5])) == alone[2:]
    assert engine.reused == 32 + 16 + 0 + 16 + 0
    counted = Sampling(12, repetition_penalty=1.5)
    expected = texts(engine_of("gpt", "1x1", 1), prompts[:1], counted, [0])
    assert ids(texts(engine, prompts[:1], counted, [0])) == ids(expected) and engine.reused == 64


def test_a_prefix_is_reused_as_long_as_windows_have_its_end() -> None:
    """Of 9 tokens. 32 tokens can be continued where at most one was written behind them: the continuation reads the
    last 8 of them, and slot 33 takes that of the 24th."""
    common = np.random.default_rng(9).integers(0, VOCAB, 34).tolist()
    prompts = [common[:33], [*common[:32], 7, 5], [*common[:32], 4], common]
    sampling = Sampling(1)
    alone = [ids(texts(engine_of("windows", "1x1", 1), [prompt], Sampling(12), [0]))[0] for prompt in prompts]
    engine = engine_of("windows", "1x1", 1)
    assert {layer["attention"].keys.shape[2] for layer in engine.decoder.empty(1, 64)[0]} == {9, 64}
    texts(engine, prompts[:1], sampling)
    assert ids(texts(engine, prompts[1:2], Sampling(12), [0])) == alone[1:2] and engine.reused == 32
    assert ids(texts(engine, prompts[2:3], Sampling(12), [0])) == alone[2:3] and engine.reused == 32
    texts(engine, prompts[3:], sampling)
    assert ids(texts(engine, prompts[2:3], Sampling(12), [0])) == alone[2:3] and engine.reused == 32


def test_engine_thread_serves_other_threads() -> None:
    engine, stopped = engine_of("gpt", "1x1", 2), threading.Event()
    engine._most_waiting = 3
    worker = threading.Thread(target=engine.run, args=(stopped,))
    ended = threading.Semaphore(0)
    requests = [Request((1, 2), Sampling(4), on_end=lambda why: ended.release()) for _ in range(4)]
    for request in requests[:3]:
        engine.submit(request)
    with pytest.raises(QueueFull, match="queue is full with 3 waiting requests"):
        engine.submit(requests[3])
    worker.start()
    for _ in range(3):
        assert ended.acquire(timeout=300)
    engine.submit(requests[3])
    assert ended.acquire(timeout=300)
    stopped.set()
    engine.wake()
    worker.join(timeout=300)
    assert not worker.is_alive()


def test_invalid_prompts_are_rejected() -> None:
    engine = engine_of("gpt", "1x1", 2)
    for prompt, why in (((), "no tokens"), ((1,) * 64, "context length is 64"), ((3, VOCAB), "ids from 0 to 249")):
        with pytest.raises(UserError, match=why):
            engine.submit(Request(prompt))


def test_decode_step_meets_its_contract_and_updates_the_cache_in_place() -> None:
    sequences, length = 4, 64
    config = tiny_config(sequence_length=64, mesh="1x4", **ATTENTION)
    report = inspect_decoding(config, find_target("cpu"), sequences, length)
    assert report.verdict.holds and not report.verdict.tolerated, report.verdict.violations
    assert {collective.kind for collective in report.collectives} == {"all-reduce"}
    assert max(c.elements for c in report.collectives) == sequences * MOST_LIKELY * 4  # never a vocabulary
    alone = memory_of(decoder_of("llama", "1x1").lower_decode(sequences, length).compile())
    for memory, heads in ((alone, 2), (report.memory, 1)):
        cache = config.model.num_layers * 2 * sequences * heads * length * 4 * 4
        assert memory.aliased >= cache > memory.temporaries


def test_decode_step_copies_neither_cache_nor_matrices() -> None:
    """XLA tends to copy a cache of one sequence, and to transpose matrices on CPUs."""
    config, compiled = tiny_config(), decoder_of("gpt", "1x1").lower_decode(1, 64).compile()
    copied = re.findall(r"= \w+\[([\d,]*)\]\S* (?:copy|transpose)\(", compiled.as_text())
    smallest_matrix = config.model.hidden_size**2
    assert max(math.prod(map(int, filter(None, shape.split(",")))) for shape in copied) < smallest_matrix


@pytest.mark.aot
def test_decode_step_on_gpus_meets_its_contract() -> None:
    config = tiny_config(sequence_length=64, mesh="1x8", hidden_size=64, compute_dtype="bfloat16", **LLAMA)
    report = inspect_decoding(config, find_target("h100x8"), 8, 64)
    assert report.verdict.holds, report.verdict.violations


def test_gathered_logits_violate_the_contract(monkeypatch) -> None:
    def gathered(shards: Any, token: Any, with_logprobs: Any) -> SampledTokens:
        logits = shards.all_gather(shards.logits_BV)
        return SampledTokens(token, logits[:, 0], token[:, None], logits[:, :1])

    monkeypatch.setattr(sampling, "_report_if_requested", gathered)
    config = tiny_config(sequence_length=64, mesh="1x2", num_layers=1)
    verdict = inspect_decoding(config, find_target("cpu"), 2, 16).verdict
    assert "1 extra all-reduce over model in sampling: f32[2,256] - the logits, unsharded" in "; ".join(
        verdict.violations
    )
    assert any(note.startswith("1 of 1 all-reduce over model missing in sampling") for note in verdict.violations)


def test_training_is_compiled_as_before() -> None:
    """A decoder does not change the program of a train step."""
    program = program_of("1x1")
    before = program.lower_step().as_text()
    placed = ShardedModel(program.config, mesh_of("1x1"))
    decoder = GenerationPrograms(placed, initial_state(program).parameters)
    assert ids(texts(Engine(decoder, 1, chunks=(8,), min_cache_length=16), [[1, 2, 3]], Sampling(2)))
    assert program.lower_step().as_text() == before
