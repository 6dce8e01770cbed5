"""Inference by formula: worked by hand."""

from dataclasses import replace
from typing import Any

import jax
import pytest

from mtjax import config
from mtjax.analysis import counts, flops
from mtjax.analysis.anatomy import anatomy_of, gpt
from mtjax.analysis.hardware import DGX_H100
from mtjax.config.storage import Storage
from mtjax.generate.inspected import inspect_decoding
from mtjax.inspect.targets import find_target
from mtjax.plan import inference

XL = gpt(48, 1600, 25, 1024, 51_200)


def test_two_flops_per_parameter():
    parameters = counts.parameters(XL) - 1024 * 1600
    assert inference.flops_per_token(XL) == 2 * parameters
    assert inference.flops_per_token(XL, 1000) - 2 * parameters == 4 * 1000 * 48 * 1600
    forward = flops.forward_flops(XL) / 1024
    assert inference.flops_per_token(XL) == pytest.approx(forward - 48 * 4 * 1024 * 1600, rel=2e-3)


def test_weights_by_precision():
    parameters = counts.parameters(XL)
    sizes = [inference.weight_bytes(XL, p) for p in ("float32", "bfloat16", "int8", "int4")]
    assert sizes == [4 * parameters, 2 * parameters, parameters, parameters / 2]


def test_cache_grows_with_batch_and_length():
    assert inference.cache_bytes(XL, 1, 1) == 2 * 48 * 1600 * 2
    assert inference.cache_bytes(XL, 8, 1024) == 8 * 1024 * inference.cache_bytes(XL, 1, 1)


def test_decoding_reads_the_weights_once_per_token():
    speed = inference.generation(XL, DGX_H100, 1, 1, 0)
    assert speed.token_seconds > inference.weight_bytes(XL, "bfloat16") / DGX_H100.gpu.bandwidth
    assert inference.generation(XL, DGX_H100, 2, 1, 0).token_seconds == pytest.approx(speed.token_seconds / 2)
    crowded = inference.generation(XL, DGX_H100, 1, 4096, 16)
    assert crowded.token_seconds > 3 * speed.token_seconds


WINDOW: dict[str, Any] = {"attention_window": 300, "window_layers": "SF"}


def test_a_window_keeps_and_reads_its_tokens_alone() -> None:
    model = config.replace(config.load("gpt2-355m"), vocab_size=50_257).model
    plain, windowed = anatomy_of(model), anatomy_of(replace(model, **WINDOW))
    whole, half = (inference.cache_bytes(anatomy, 3, 1000) for anatomy in (plain, windowed))
    assert half == whole / 2 * (1 + 300 / 1000)
    assert inference.cache_bytes(windowed, 3, 300) == inference.cache_bytes(plain, 3, 300)
    fewer = inference.flops_per_token(plain, 1000) - inference.flops_per_token(windowed, 1000)
    assert fewer == 12 * 4 * 1024 * 700
    caches = (inference.decoding_memory(anatomy, 2, 3, 1000).cache for anatomy in (windowed, plain))
    assert next(caches) / next(caches) == 0.65


COMPILED = [
    ("cpu", "gpt2-355m", 64, 256, {"mesh": "1x4"}),
    pytest.param("cpu", "llama3-8b", 8, 1024, {"mesh": "1x8", "num_kv_heads": 4} | WINDOW, marks=pytest.mark.long),
    pytest.param("h100x8", "gpt2-355m", 8, 1024, {"mesh": "1x8"}, marks=[pytest.mark.aot, pytest.mark.exhaustive]),
    pytest.param("h100x8 int8", "gpt2-355m", 8, 1024, {"mesh": "1x4"}, marks=pytest.mark.aot),
    pytest.param(
        "h100x8 int8",
        "llama3-8b",
        8,
        1024,
        {"mesh": "1x8", "num_kv_heads": 4},
        marks=[pytest.mark.aot, pytest.mark.exhaustive],
    ),
    pytest.param("h100x8 fp8", "gpt2-355m", 8, 1024, {"mesh": "1x4"}, marks=pytest.mark.aot),
    pytest.param("h100x8 cache", "gpt2-355m", 64, 1024, {"mesh": "1x4"}, marks=pytest.mark.aot),
    pytest.param("h100x8 int4", "llama3-8b", 8, 1024, {"mesh": "1x8", "num_kv_heads": 4}, marks=pytest.mark.aot),
    pytest.param("h100x8", "llama2-70b", 32, 4096, {"mesh": "1x8"}, marks=[pytest.mark.aot, pytest.mark.exhaustive]),
]


@pytest.mark.parametrize(("target", "name", "sequences", "context", "settings"), COMPILED)
def test_memory_is_that_of_compiled_programs(target: str, name: str, sequences: int, context: int, settings) -> None:
    """Within 5%, with a layer or two: deeper models have less beside weights and cache."""
    target, _, weights = target.partition(" ")
    storage = Storage(cache_dtype="int8") if weights == "cache" else Storage(weights or None)
    assert len(jax.devices()) >= 8  # in use: their number is fixed
    dtype, element = ("float32", 4) if target == "cpu" else ("bfloat16", 2)
    sizes = {"num_layers": 2, "vocab_size": 50_257, "compute_dtype": dtype, "attention": "xla"}
    run = config.replace(config.load(name), **(sizes | settings))
    report = inspect_decoding(run, find_target(target), sequences, context, storage)
    assert report.verdict.holds, report.verdict.violations
    sizes = (report.mesh.model, sequences, context, element)
    formula = inference.decoding_memory(anatomy_of(report.config.model), *sizes, storage=storage)
    assert formula.total == pytest.approx(report.memory.peak, rel=0.05)
    assert formula.weights + formula.cache == pytest.approx(report.memory.arguments, rel=0.03)
