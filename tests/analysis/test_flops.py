"""The formulas against published numbers and worked examples."""

import dataclasses
import math

import pytest

from mtjax import config
from mtjax.analysis import counts, flops
from mtjax.analysis.anatomy import anatomy_of, gpt
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from tests.counted import rank_parameters

GPT_345M = gpt(24, 1024, 16, 1024, 50_304)


def test_megatron_counts_gpt_345m_without_biases_and_positions():
    assert counts.megatron_parameters(GPT_345M) == 353_601_536


def test_the_real_gpt_345m_has_biases_and_positions():
    assert counts.parameters(GPT_345M) == 354_871_296


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "billions"),
    [(1536, 16, 40, 1.2), (1920, 20, 54, 2.5), (2304, 24, 64, 4.2), (3072, 32, 72, 8.3)],
)
def test_table_1_parameter_counts(hidden, heads, layers, billions):
    shape = gpt(layers, hidden, heads, 1024, 51_200)
    assert round(counts.parameters(shape) / 1e9, 1) == billions


@pytest.mark.parametrize(
    ("hidden", "heads", "layers", "millions"), [(1024, 16, 24, 355), (1920, 20, 54, 2500), (3072, 24, 72, 8300)]
)
def test_table_2_parameter_counts(hidden, heads, layers, millions):
    shape = gpt(layers, hidden, heads, 1024, 51_200)
    assert counts.parameters(shape) == pytest.approx(millions * 1e6, rel=0.005)


def test_closed_form_of_the_parameters():
    l, h, vocab, s = 24, 1024, 50_304, 1024  # noqa: E741 - the symbols of the formula
    closed = 12 * l * h**2 * (1 + 13 / (12 * h) + (vocab + s) / (12 * l * h)) + 2 * h
    assert counts.parameters(GPT_345M) == pytest.approx(closed, rel=1e-15)


def test_closed_forms_of_the_flops():
    l, h, vocab, s, batch = 24, 1024, 50_304, 1024, 8  # noqa: E741 - the symbols of the formula

    model = 72 * batch * s * l * h**2 * (1 + s / (6 * h) + vocab / (12 * l * h))
    full = 96 * batch * s * l * h**2 * (1 + s / (6 * h) + vocab / (16 * l * h))
    compiled = 88 * batch * s * l * h**2 + 16 * batch * s**2 * l * h + 8 * batch * h * s * vocab
    kept_logits = compiled - 2 * batch * h * s * vocab
    plan = Plan(MeshShape(), batch, 1, recompute="full", loss_chunk=s // 2)
    one_chunk = dataclasses.replace(plan, loss_chunk=s)
    assert batch * flops.model_flops(GPT_345M) == pytest.approx(model, rel=1e-12)
    assert batch * flops.hardware_flops(GPT_345M, "full") == pytest.approx(full, rel=1e-12)
    assert batch * flops.compiled_flops(GPT_345M, plan) == pytest.approx(compiled, rel=1e-12)
    assert batch * flops.compiled_flops(GPT_345M, one_chunk) == pytest.approx(kept_logits, rel=1e-12)


def test_causal_attention_halves_the_attention_term_only():
    l, h, s = 24, 1024, 1024  # noqa: E741 - the symbols of the formula
    whole = flops.model_flops(GPT_345M)
    assert whole - flops.model_flops(GPT_345M, causal=True) == pytest.approx(6 * s * s * l * h)


def test_windows_leave_the_pairs_within_them():
    """Of 12 of 24 layers: counted one by one, of scores and of what they weight, forward and twice that backward."""
    fields = dataclasses.replace(GPT_345M.model, attention_window=256, window_layers="SF")
    windowed, s = anatomy_of(fields), 1024
    pairs = [sum(min(i + 1, most) for i in range(s)) for most in (256, s)]
    removed = 12 * 3 * 4 * 1024 * (pairs[1] - pairs[0])
    found = flops.model_flops(GPT_345M, causal=True) - flops.model_flops(windowed, causal=True)
    assert found == pytest.approx(removed, rel=2e-3)
    assert flops.model_flops(windowed) == flops.model_flops(GPT_345M)


def test_windows_of_hybrid_models_are_those_of_layers_with_attention():
    """Of eight layers two have attention, and by their numbers, 3 and 7, a window."""
    model = dataclasses.replace(config.load("nemotron-h-8b").model, num_layers=8, layer_pattern="(M-M*)x2")
    windowed = dataclasses.replace(model, attention_window=1024, window_layers="FFFS")
    (share,) = {part.scores.visible for stack in anatomy_of(windowed).stacks for part in stack.parts if part.scores}
    window = 1024 / model.sequence_length
    assert share == window - window**2 / 2


def test_attention_that_looks_both_ways_has_no_causal_half():
    bert = anatomy_of(config.load("bert-base").model)
    assert flops.model_flops(bert, causal=True) == flops.model_flops(bert)


def test_selective_recompute_adds_the_attention_core_once():
    none = flops.hardware_flops(GPT_345M, "none")
    selective = flops.hardware_flops(GPT_345M, "selective")
    assert none == flops.model_flops(GPT_345M)
    assert selective - none == pytest.approx(24 * 4 * 1024 * 1024 * 1024)


@pytest.mark.parametrize(
    ("parameters", "tokens", "days", "gpus", "with_recompute"),
    [(175e9, 300e9, 23, 1057, 1110), (65.2e9, 1.4e12, 21, 2012, 2113), (13e9, 1e12, 15, 402, 422)],
)
def test_gpus_of_the_sizing_article(parameters, tokens, days, gpus, with_recompute):
    """Within one GPU, and two where 5% are computed again."""
    sustained = 300e12 * 0.5
    assert flops.training_days(parameters, tokens, gpus, sustained) == pytest.approx(days, rel=1 / gpus)
    again = flops.training_days(parameters, tokens, with_recompute, sustained, 6 * 1.05)
    assert again == pytest.approx(days, rel=2 / with_recompute)


def test_days_of_a_trillion_parameters():
    per_token = 8
    half = flops.training_days(1.008e12, 450e9, 3072, 0.5 * 312e12, per_token)
    measured = flops.training_days(1.008e12, 450e9, 3072, 163e12, per_token)
    assert round(half, 1) == 87.6
    assert round(measured, 1) == 83.9


def test_amdahl():
    speedup = flops.amdahl_speedup(0.0005, 512)
    assert round(speedup, 1) == 407.8
    assert round(speedup / 512, 3) == 0.796
    assert flops.amdahl_speedup(0, 512) == 512
    assert flops.amdahl_speedup(1, 512) == 1


def test_parameters_per_rank_split_what_the_paper_splits():
    one, eight = rank_parameters(GPT_345M, 1), rank_parameters(GPT_345M, 8)
    replicated = 24 * 6 * 1024 + (1024 + 2) * 1024
    assert one == counts.parameters(GPT_345M)
    assert eight == (one - replicated) // 8 + replicated


def test_utilisation_and_cost():
    assert flops.utilization(1e15, 2, 10, 1e14) == pytest.approx(0.5)
    assert flops.cost(8, 2, 2.5) == 8 * 48 * 2.5
    assert flops.steps_for_tokens(1e6, 8, 1024) == math.ceil(1e6 / 8192)


def test_the_anatomy_of_a_config_pads_the_vocabulary():
    padded = anatomy_of(config.load("gpt2-8.3b").model)
    assert padded.weights == gpt(72, 3072, 32, 1024, 51_200).weights
