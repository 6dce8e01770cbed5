"""The search against brute force, and what it says when nothing fits."""

import dataclasses
import itertools

import pytest

from mtjax import config
from mtjax.errors import UserError
from mtjax.plan import search
from mtjax.plan.search import Space, best_plan, gpus_within
from mtjax.plan.search_report import of_different_kinds, train_command
from mtjax.theory import memory, timing
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.families.registry import anatomy_of, gpt
from mtjax.theory.flops import SECONDS_PER_DAY
from mtjax.theory.hardware import DGX_2H, DGX_H100, SERVERS
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plans import Plan

SHAPE = gpt(6, 1536, 12, 1024, 51_200)
BASE = Plan(MeshShape(), 24, 1)


def test_the_ten_best_differ_in_kind():
    found = search.search(SHAPE, BASE, 8, DGX_H100).fitting
    shown = of_different_kinds(found)
    kinds = [(c.plan.mesh, c.plan.recompute) for c in shown]
    assert len(kinds) == len(set(kinds)) == 10 and shown[0] == found[0]
    for candidate, kind in zip(shown, kinds, strict=True):
        assert candidate == next(c for c in found if (c.plan.mesh, c.plan.recompute) == kind)  # the fastest of its kind


def brute_force(shape: Anatomy, base: Plan, gpus: int, server, limit: float) -> dict[tuple, float]:
    """Every combination by nested loops over all numbers, kept when everything divides and fits."""
    found = {}
    numbers = range(1, gpus + 1)
    for data, stage, model in itertools.product(numbers, numbers, numbers):
        if data * stage * model != gpus or model > server.gpus:
            continue
        if shape.model.num_heads % model or shape.model.num_layers % stage or 51_200 % model:
            continue
        for micro in range(1, base.global_batch_size + 1):
            if base.global_batch_size % (data * micro):
                continue
            for recompute, zero, split, chunks in itertools.product(
                ("none", "selective", "full"), range(4), (False, True), range(1, 7)
            ):
                if (split and model == 1) or (zero and data == 1) or (chunks > 1 and stage == 1):
                    continue
                if shape.model.num_layers % (stage * chunks):
                    continue
                is_power = micro & (micro - 1) == 0
                if not is_power and micro != base.global_batch_size // data:
                    continue
                schedule = "interleaved" if chunks > 1 else "1f1b"
                plan = Plan(
                    MeshShape(data=data, stage=stage, model=model),
                    base.global_batch_size,
                    micro,
                    recompute,
                    split,
                    zero,
                    schedule,
                    chunks,
                )
                if memory.fullest_stage(shape, plan).total <= limit:
                    key = (data, stage, model, micro, recompute, split, zero, chunks)
                    found[key] = timing.step_time(shape, plan, server).total
    return found


@pytest.mark.parametrize("gpus", [1, 6, 8, 12])
@pytest.mark.parametrize("server", [DGX_H100, DGX_2H], ids=lambda s: s.name)
def test_against_brute_force(gpus, server):
    small = dataclasses.replace(server, gpu=dataclasses.replace(server.gpu, memory=6 * 2**30))
    found = search.search(SHAPE, BASE, gpus, small)
    expected = brute_force(SHAPE, BASE, gpus, small, 0.9 * 6 * 2**30)
    got = {}
    for c in found.fitting:
        p, w = c.plan, c.plan.mesh
        key = (w.data, w.stage, w.model, p.microbatch_size, p.recompute, p.sequence_parallel, p.zero, p.chunks)
        got[key] = c.time.total
    assert got == expected
    if expected:
        assert found.best.time.total == min(expected.values())


def test_nothing_too_large_is_called_fitting():
    found = search.search(SHAPE, BASE, 8, DGX_2H)
    assert found.fitting
    assert all(c.memory.total <= found.limit for c in found.fitting)
    assert all(c.memory.total > found.limit for c in found.too_large)


def test_days_find_the_fewest_gpus():
    tokens, days = 2e9, 0.25
    found = gpus_within(SHAPE, BASE, tokens, days, DGX_H100)
    steps = -(-tokens // (24 * 1024))
    assert found.time.total * steps <= days * SECONDS_PER_DAY
    for fewer in range(1, found.plan.mesh.size):
        if fewer > DGX_H100.gpus and fewer % DGX_H100.gpus:
            continue
        others = search.search(SHAPE, BASE, fewer, DGX_H100).fitting
        assert all(c.time.total * steps > days * SECONDS_PER_DAY for c in others)


def test_too_few_days_name_the_fastest():
    with pytest.raises(UserError, match=r"no plan reads 1e\+13 tokens within 0.01 days.* the largest takes"):
        gpus_within(SHAPE, BASE, 1e13, 0.01, DGX_H100)


def test_a_model_that_does_not_fit_names_the_nearest_that_does():
    huge = gpt(24, 12_288, 96, 2048, 51_200)
    with pytest.raises(
        UserError, match=r"no plan for 8 GPUs fits 71.2 GiB each: the smallest.*the nearest plan that fits"
    ):
        best_plan(huge, Plan(MeshShape(), 8, 1), 8, DGX_H100)


def test_a_number_of_gpus_that_divides_nothing():
    with pytest.raises(UserError, match=r"7 GPUs form no mesh that divides 12 heads, 6 layers and global batch 24"):
        best_plan(SHAPE, BASE, 7, DGX_H100)


def test_a_model_that_fits_nowhere():
    monster = gpt(1, 400_000, 1, 1024, 51_200)
    with pytest.raises(UserError, match="no number of GPUs up to 64 times as many fits"):
        best_plan(monster, Plan(MeshShape(), 1, 1), 1, SERVERS["v100"])


def test_rejected_meshes_say_why():
    reasons = {str(w): why for w, why in search.rejections(SHAPE, BASE, 48, DGX_H100)}
    assert "global_batch_size 24 does not divide over 48 data ways" in reasons["48x1"]
    assert "num_heads 12 does not divide over 8 model ways" in reasons["6x8"]
    assert "would leave a server of 8" in reasons["4x12"] or "divide" in reasons["4x12"]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_command_has_the_plans_recompute(recompute):
    plan = dataclasses.replace(BASE, recompute=recompute)
    assert f"--recompute {recompute}" in train_command(plan, config.load("gpt2-small"), "gpt2-small")


def test_space_is_respected():
    space = Space(recomputes=("full",), zeros=(0,), sequence=(False,), max_stages=1)
    found = search.search(SHAPE, BASE, 8, DGX_H100, space)
    assert found.fitting
    assert {c.plan.recompute for c in found.fitting} == {"full"}


def test_ranks_share_long_samples_where_that_is_faster():
    run = config.replace(config.load("llama3-8b"), vocab_size=128_256, sequence_length=32_768, global_batch_size=8)
    shape, base = anatomy_of(run.model), Plan.of(run, MeshShape())
    space = Space(recomputes=("full",), zeros=(0, 1), max_stages=1)
    best = best_plan(shape, base, 64, DGX_H100, space).best
    ways = {plan.plan.mesh.context for plan in search.search(shape, base, 64, DGX_H100, space).fitting}
    assert ways == {1, 2, 4, 8}  # at least 4,096 tokens for each
    alone = [mesh for mesh in search.meshes(shape, base, 64, DGX_H100, space) if mesh.context == 1]
    plans = [plan for mesh in alone for plan in search.variants(shape, base, mesh, space)]
    assert best.plan.mesh.context > 1
    assert best.time.total < min(timing.step_time(shape, plan, DGX_H100).total for plan in plans)
    assert f"--mesh {best.plan.mesh}" in train_command(best.plan, run, "llama3-8b")


@pytest.mark.parametrize("tokens", [1024, 8191])
def test_ranks_do_not_share_short_samples(tokens):
    run = config.replace(config.load("llama3-8b"), vocab_size=128_256, sequence_length=tokens, global_batch_size=8)
    found = search.meshes(anatomy_of(run.model), Plan.of(run, MeshShape()), 16, DGX_H100, Space())
    assert {mesh.context for mesh in found} == {1}
