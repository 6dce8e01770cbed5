"""Formulas of gated, grouped and untied decoders, by hand and against published numbers."""

import dataclasses

import pytest

from mtjax import config
from mtjax.analysis import counts, flops, memory, traffic
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import SERVERS
from mtjax.errors import UserError
from mtjax.layout.divisibility import check
from mtjax.layout.layouts import layout_of
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.plan import inference, search

LLAMA3_70B = anatomy_of(config.load("llama3-70b").model)
LAYER = 2 * 8192 * (8192 + 1024) + 3 * 8192 * 28_672
"""Parameters of its products, counted by hand."""


def test_products_of_a_layer_cost_two_flops_per_parameter_and_token() -> None:
    (stack,) = LLAMA3_70B.stacks
    attention = 8192 * 4 * 8192 * 8192
    assert flops.core_flops(stack) == attention
    assert flops.layer_flops(stack) == 8192 * 2 * LAYER + attention
    assert held_of_a_layer(1) == LAYER + 2 * 8192


def held_of_a_layer(ways: int) -> int:
    """Parameters of a layer on a rank."""
    mesh = MeshShape(model=ways)
    return counts.layer_counts(LLAMA3_70B.stacks[0], layout_of(LLAMA3_70B.model, mesh), mesh).all


def test_key_and_value_heads_are_split_or_whole() -> None:
    """8 of them: split over 8 ways, whole on each of 16."""
    key_value = 2 * 8192 * 1024
    assert held_of_a_layer(8) == LAYER / 8 + 2 * 8192
    assert held_of_a_layer(16) == (LAYER - key_value) / 16 + key_value + 2 * 8192
    assert flops.computed_over(LLAMA3_70B, MeshShape(model=8)) is LLAMA3_70B
    assert flops.computed_over(LLAMA3_70B, MeshShape(model=16)).model.num_kv_heads == 16


def test_shared_key_and_value_heads_send_their_gradients() -> None:
    def sent(ways: int) -> list[traffic.Transfer]:
        entries = traffic.transfers(LLAMA3_70B, Plan(MeshShape(data=2, model=ways), 4, 1))
        return [e for e in entries if "replicated key" in e.purpose]

    assert sent(8) == []
    (entry,) = sent(16)
    assert (entry.count, entry.elements, entry.element_bytes) == (2 * 80, 2 * 8192 * 1024, 4)


def test_grouped_queries_shrink_the_cache_eightfold() -> None:
    """70B at 8,192 tokens in 16 bits: 2.68 GB a sequence (2 x 80 x 1024 x 8192 x 2 bytes)."""
    assert inference.cache_bytes(LLAMA3_70B, 1, 8192) == 2 * 80 * 1024 * 8192 * 2
    full = anatomy_of(dataclasses.replace(LLAMA3_70B.model, num_kv_heads=None))
    assert inference.cache_bytes(full, 1, 8192) == 8 * inference.cache_bytes(LLAMA3_70B, 1, 8192)


def test_what_a_layer_keeps() -> None:
    kinds = memory.layer_activations(
        LLAMA3_70B.stacks[0],
        Plan(MeshShape(model=8), 1, 1, dropout=False, flash_attention=True, residuals="megatron"),
    )
    assert kinds["query, key, value"] == 2 * 8192 * (8192 + 2 * 1024) / 8
    assert kinds["MLP"] == 3 * 2 * 8192 * 28_672 / 8


def test_key_and_value_heads_must_fit_the_model_ways() -> None:
    model = dataclasses.replace(LLAMA3_70B.model, num_heads=48, num_kv_heads=12, head_dim=128)
    plan = Plan(MeshShape(model=8), 8, 1)
    with pytest.raises(
        UserError, match="num_kv_heads 12 is neither a multiple nor a divisor of the tensor parallel degree 8"
    ):
        check(model, plan)
    groups = dataclasses.replace(model, family="hybrid", layer_pattern="(M-)x40", ssm_groups=12, ssm_head_dim=128)
    with pytest.raises(UserError, match="ssm_groups 12 is neither a multiple nor a divisor of the tensor parallel"):
        check(groups, plan)
    meshes = list(search.meshes(anatomy_of(model), plan, 8, SERVERS["h100"], search.Space()))
    assert {w.model for w in meshes} == {1, 2, 4}
