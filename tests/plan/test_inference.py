"""Inference by formula: worked by hand."""

import pytest

from mtjax.plan import inference
from mtjax.theory import counts, flops
from mtjax.theory.families.registry import gpt
from mtjax.theory.hardware import DGX_H100

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
