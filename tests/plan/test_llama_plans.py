"""Formulas of gated, grouped and untied decoders, by hand and against published numbers."""

import dataclasses

import pytest

from mtjax import config
from mtjax.errors import UserError
from mtjax.plan import formulas, inference, memory, plans, search, traffic
from mtjax.theory.flops import Shape
from mtjax.theory.hardware import SERVERS
from mtjax.theory.plans import Plan, Ways

LLAMA3_70B = Shape.of(config.load("llama3-70b").model)
LAYER = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28_672
"""Parameters of its products, counted by hand."""


def test_products_of_a_layer_cost_two_flops_per_parameter_and_token() -> None:
    attention = formulas.attention_core_flops_per_token(LLAMA3_70B)
    assert attention == 4 * 8192 * 8192
    assert formulas.layer_flops_per_token(LLAMA3_70B) == 2 * LAYER + attention
    assert formulas.layer_parameters(LLAMA3_70B) == LAYER + 2 * 8192


def test_key_and_value_heads_are_split_or_whole() -> None:
    """8 of them: split over 8 ways, whole on each of 16."""
    key_value = 2 * 8192 * 1024
    assert formulas.layer_parameters_per_rank(LLAMA3_70B, 8) == LAYER / 8 + 2 * 8192
    assert formulas.layer_parameters_per_rank(LLAMA3_70B, 16) == (LAYER - key_value) / 16 + key_value + 2 * 8192
    assert LLAMA3_70B.computed_over(8) is LLAMA3_70B
    assert LLAMA3_70B.computed_over(16).kv_size == 16 * 128


def test_shared_key_and_value_heads_send_their_gradients() -> None:
    def sent(ways: int) -> list[traffic.Collective]:
        entries = traffic.collectives(LLAMA3_70B, Plan(Ways(2, 1, ways), 4, 1))
        return [e for e in entries if "shared" in e.purpose]

    assert sent(8) == []
    (entry,) = sent(16)
    assert (entry.count, entry.elements, entry.element_bytes) == (2 * 80, 2 * 8192 * 1024, 4)


def test_grouped_queries_shrink_the_cache_eightfold() -> None:
    """70B at 8,192 tokens in 16 bits: 2.68 GB a sequence (2 x 80 x 1024 x 8192 x 2 bytes)."""
    assert inference.cache_bytes(LLAMA3_70B, 1, 8192) == 2 * 80 * 1024 * 8192 * 2
    full = dataclasses.replace(LLAMA3_70B, num_kv_heads=None)
    assert inference.cache_bytes(full, 1, 8192) == 8 * inference.cache_bytes(LLAMA3_70B, 1, 8192)


def test_what_a_layer_keeps() -> None:
    kinds = memory.layer_activations(LLAMA3_70B, 1, 8, dropout=False, flash_attention=True)
    assert kinds["query, key, value"] == 2 * 8192 * (8192 + 2 * 1024) / 8
    assert kinds["MLP"] == 3 * 2 * 8192 * 28_672 / 8


def test_key_and_value_heads_must_fit_the_model_ways() -> None:
    shape = dataclasses.replace(LLAMA3_70B, num_heads=48, num_kv_heads=12, mlp_size=28_672)
    with pytest.raises(UserError, match="num_kv_heads 12 is neither a multiple nor a divisor of 8 model ways"):
        plans.check(shape, Plan(Ways(1, 1, 8), 8, 1))
    meshes = list(search.meshes(shape, 8, 8, SERVERS["h100"], search.Space()))
    assert {w.model for w in meshes} == {1, 2, 4}
