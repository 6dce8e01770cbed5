"""The search against brute force, and what it says when nothing fits."""

import dataclasses
import itertools
import math
import shlex

import pytest

from mtjax import cli, config
from mtjax.analysis import memory, timing
from mtjax.analysis.anatomy import Anatomy, anatomy_of, gpt
from mtjax.analysis.flops import SECONDS_PER_DAY
from mtjax.analysis.hardware import DGX_2H, DGX_H100, SERVERS
from mtjax.commands.train import Options as TrainOptions
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.stages import balanced_layers
from mtjax.plan import search
from mtjax.plan.hints import zero_hint
from mtjax.plan.report import choice_table
from mtjax.plan.search import Space, fitting_plans, gpus_within
from mtjax.plan.search_report import train_command

SHAPE = gpt(6, 1536, 12, 1024, 51_200)
BASE = Plan(MeshShape(), 24, 1)


def test_the_ten_best_differ_in_kind():
    found = sorted(search.search(SHAPE, BASE, 8, DGX_H100).fitting, key=lambda c: c.order)
    shown = search.fastest_kinds(found, 10)
    kinds = [(c.plan.mesh, c.plan.recompute) for c in shown]
    assert len(kinds) == len(set(kinds)) == 10 and shown[0] == found[0]
    for candidate, kind in zip(shown, kinds, strict=True):
        assert candidate == next(c for c in found if (c.plan.mesh, c.plan.recompute) == kind)  # the fastest of its kind


def by_sorting(candidates: list[search.Candidate], most: int, limit: float = math.inf) -> list[search.Candidate]:
    """The fastest candidate of each kind, the fastest kinds first, without lower bounds."""
    kinds: dict[tuple, search.Candidate] = {}
    for candidate in sorted(candidates, key=lambda c: c.order):
        if candidate.time.total <= limit:
            kinds.setdefault(candidate.kind, candidate)
    return list(kinds.values())[:most]


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("zamba2-1.2b", {}),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("llama3-8b", {"fp8": "tensorwise"}), ("nemotron-h-8b", {}))
        ),
        pytest.param("gpt2-1.2b", {}, marks=pytest.mark.exhaustive),
        pytest.param("qwen3-30b-a3b", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_lower_bounds_leave_out_no_plan(preset: str, fields: dict) -> None:
    run = config.replace(config.load(preset), **fields)
    found = search.search(anatomy_of(run.model), Plan.of(run, MeshShape(data=8)), 8, DGX_H100)
    assert all(c.least <= c.time.total for c in (*found.fitting, *found.excessive))
    ten = search.fastest_kinds(found.fitting, 10)
    assert ten == by_sorting(found.fitting, 10)
    limit = ten[-1].time.total
    assert search.fastest_kinds(found.excessive, 5, limit) == by_sorting(found.excessive, 5, limit)


def test_meshes_do_not_depend_on_the_zero_stage_of_a_run() -> None:
    run = config.load("zamba2-1.2b")
    bases = [Plan.of(config.replace(run, zero=zero), MeshShape(data=8)) for zero in (0, 3)]
    first, second = ([*search.meshes(anatomy_of(run.model), base, 8, DGX_H100, Space())] for base in bases)
    assert first == second and any(mesh.stage > 1 for mesh in first)


@pytest.mark.parametrize("fields", [{"num_experts": 8, "family": "llama"}, {"recompute": "full"}])
def test_unrolled_layers_that_are_asked_for_need_not_gain(fields: dict) -> None:
    run = config.replace(config.load("gpt2-small"), zero=1, **fields)
    space = Space(unrolled=(True,))
    found = search.search(anatomy_of(run.model), Plan.of(run, MeshShape(data=8)), 8, DGX_H100, space).fitting
    assert found and all(c.plan.unrolled for c in found)


def shares_of(layers: int, stages: int, chunks: int) -> tuple[int, ...] | None:
    """Layers of each stage: equal, or by one chunk more on those in the middle; at most 1.25 times the mean."""
    if layers % stages == 0:
        return (layers // stages,) * stages if layers % (stages * chunks) == 0 else None
    shares = balanced_layers(layers, stages, chunks)
    return shares if shares and max(shares) <= 1.25 * layers / stages else None


def brute_force(shape: Anatomy, base: Plan, gpus: int, server, limit: float) -> dict[tuple, float]:
    """Every combination by nested loops over all numbers, kept when everything divides and fits."""
    found = {}
    numbers = range(1, gpus + 1)
    for data, stage, model in itertools.product(numbers, numbers, numbers):
        if data * stage * model != gpus or model > server.gpus:
            continue
        if shape.model.num_heads % model or stage > shape.model.num_layers or 51_200 % model:
            continue
        for micro in range(1, base.global_batch_size + 1):
            if base.global_batch_size % (data * micro):
                continue
            for recompute, zero, split, chunks, unrolled in itertools.product(
                ("none", "selective", "full"), range(4), (False, True), range(1, 7), (False, True)
            ):
                if unrolled and (stage > 1 or recompute != "none"):  # scores are stored
                    continue
                if (split and model == 1) or (zero and data == 1) or (chunks > 1 and stage == 1):
                    continue
                per_stage = shares_of(shape.model.num_layers, stage, chunks)
                if per_stage is None:
                    continue
                is_power = micro & (micro - 1) == 0
                if not is_power and micro != base.global_batch_size // data:
                    continue
                schedule = "interleaved" if chunks > 1 else "1f1b"
                plan = Plan(
                    MeshShape(data=data, stage=stage, model=model),
                    base.global_batch_size,
                    micro,
                    recompute=recompute,
                    sequence_parallel=split,
                    zero=zero,
                    pipeline_schedule=schedule,
                    chunks=chunks,
                    layers_per_stage=per_stage if len(set(per_stage)) > 1 else None,
                    unrolled=unrolled,
                )
                if unrolled and gpus > 8 and plan.reduces_in_backward:  # a loop prefetches between servers
                    continue
                if memory.peak_stage_memory(shape, plan).total <= limit:
                    key = (data, stage, model, micro, recompute, split, zero, chunks, unrolled)
                    found[key] = timing.step_time(shape, plan, server).total
    return found


@pytest.mark.parametrize("gpus", [1, 5, 6, 8, 12])
@pytest.mark.parametrize("server", [DGX_H100, DGX_2H], ids=lambda s: s.name)
def test_against_brute_force(gpus, server):
    small = dataclasses.replace(server, gpu=dataclasses.replace(server.gpu, memory=6 * 2**30))
    found = search.search(SHAPE, BASE, gpus, small)
    expected = brute_force(SHAPE, BASE, gpus, small, 0.9 * 6 * 2**30)
    got = {}
    for c in found.fitting:
        p, w = c.plan, c.plan.mesh
        key = (w.data, w.stage, w.model, p.microbatch_size, p.recompute, p.sequence_parallel, p.zero, p.chunks)
        got[*key, p.unrolled] = c.time.total
    assert got == expected
    if expected:
        assert found.best.time.total == min(expected.values())


def test_servers_are_sharding_groups_where_the_network_is_slow_or_zero_divides_no_other_way():
    """ZeRO-3 gathers in each microbatch: over the network, or inside a server. 1,536 is not a multiple of 1,024."""
    space = Space(("full",), (3,), (False,), max_stages=1, usable=0.02)
    cases = ((32, 1, 512, "32x1"), (32, 16, 512, "data=4,shard=8,model=1"), (1024, 1, 4096, "data=8,shard=128,model=1"))
    for ranks, slower, batch, mesh in cases:
        server = dataclasses.replace(DGX_H100, network=DGX_H100.network / slower)
        found = search.search(SHAPE, dataclasses.replace(BASE, global_batch_size=batch), ranks, server, space)
        assert str(found.best.plan.mesh) == mesh


def test_nothing_too_large_is_called_fitting():
    found = search.search(SHAPE, BASE, 8, DGX_2H)
    assert found.fitting
    assert all(c.memory.total <= found.limit for c in found.fitting)
    assert all(c.memory.total > found.limit for c in found.excessive)


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
        fitting_plans(huge, Plan(MeshShape(), 8, 1), 8, DGX_H100)


def test_a_number_of_gpus_that_divides_nothing():
    with pytest.raises(UserError, match=r"7 GPUs form no mesh that divides 12 heads, 6 layers and global batch 24"):
        fitting_plans(SHAPE, BASE, 7, DGX_H100)


def test_a_model_that_fits_nowhere():
    monster = gpt(1, 400_000, 1, 1024, 51_200)
    with pytest.raises(UserError, match="no number of GPUs up to 64 times as many fits"):
        fitting_plans(monster, Plan(MeshShape(), 1, 1), 1, SERVERS["v100"])


def test_rejected_meshes_say_why():
    reasons = {str(w): why for w, why in search.rejections(SHAPE, BASE, 48, DGX_H100)}
    assert "global_batch_size 24 is not divisible by the data parallel degree 48" in reasons["48x1"]
    assert "num_heads 12 is not divisible by the tensor parallel degree 8" in reasons["6x8"]
    assert "exceeds the 8 GPUs of a server" in reasons["4x12"] or "divisible" in reasons["4x12"]


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
    best = fitting_plans(shape, base, 64, DGX_H100, space).best
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


def test_uneven_shares_are_taken_where_nothing_else_fits():
    """Four layers on three stages: one has twice the others' work, more than the search tries at first."""
    shape = gpt(4, 1536, 12, 1024, 51_200)
    server = dataclasses.replace(DGX_H100, gpu=dataclasses.replace(DGX_H100.gpu, memory=3.5 * 2**30))
    base = Plan(MeshShape(), 8, 1)
    assert not search.search(shape, base, 3, server, Space(recomputes=("full",))).fitting
    best = fitting_plans(shape, base, 3, server, Space(recomputes=("full",))).best
    assert best.plan.mesh == MeshShape(stage=3) and best.plan.layers_per_stage == (1, 2, 1)


def test_the_command_is_the_plan():
    """Even where the config has other settings than the plan, which is parsed back from what is printed."""
    run = config.replace(config.load("llama3-70b"), zero=0)
    base = Plan.of(run, MeshShape(data=2, stage=3, model=8))
    plan = dataclasses.replace(
        base,
        microbatch_size=1,
        sequence_parallel=True,
        recompute="none",
        pipeline_schedule="1f1b",
        layers_per_stage=(27, 27, 26),
    )
    for chosen in (plan, dataclasses.replace(plan, sequence_parallel=False, zero=1, recompute="full")):
        words = shlex.split(train_command(chosen, run, "llama3-70b"))
        assert words[:2] == ["mtjax", "train"] and ("--sequence-parallel" in words) == chosen.sequence_parallel
        assert words[-4:] == ["--data", "CORPUS.jsonl", "--tokenizer", "TOKENIZER"]
        parsed = cli.parse(words[2:], "mtjax train", "", TrainOptions).config
        assert Plan.of(parsed, parse_mesh(parsed.parallel.mesh)) == chosen


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_command_offloads_inputs_where_the_plan_keeps_them(recompute):
    run = config.replace(config.load("gpt2-355m"), recompute="full", recompute_offload=True)
    plan = dataclasses.replace(Plan.of(run, MeshShape(data=8)), recompute=recompute)
    words = shlex.split(train_command(plan, run, "gpt2-355m"))
    training = cli.parse(words[2:], "mtjax train", "", TrainOptions).config.training
    assert training.recompute_offload == (recompute == "full")


def test_a_model_of_80_layers_on_48_gpus():
    run = config.load("llama3-70b")
    shape, base = anatomy_of(run.model), Plan.of(run, MeshShape())
    space = Space(recomputes=("full",), zeros=(1,), sequence=(True,), chunks=(1,))
    fitting = {c.plan.mesh: c for c in fitting_plans(shape, base, 48, DGX_H100, space).fitting}
    found = fitting[MeshShape(data=2, stage=3, model=8)]
    assert found.plan.layers_per_stage == (27, 27, 26)
    assert 27 * 3 / 80 <= max(c.plan.mesh.stage * max(c.plan.layers_per_stage) / 80 for c in fitting.values()) <= 1.25


def plan_of(name: str, mesh: MeshShape, **settings) -> tuple[Anatomy, Plan]:
    run = config.load(name)
    return anatomy_of(run.model), dataclasses.replace(Plan.of(run, mesh), **settings)


def test_what_zero_can_not_shard_is_said():
    """No dimension of its layers' parameters is divisible by 48: hidden_size is 2^13, mlp_size 2^12 x 7; the
    vocabulary is."""
    settings = {"zero": 3, "global_batch_size": 768, "microbatch_size": 1, "sequence_parallel": False}
    said = zero_hint(*plan_of("llama3-70b", MeshShape(data=48), **settings)) or ""
    layers = (70_553_706_496 - 2 * 128_256 * 8192) * 16 / 2**30  # float32 weights and gradients, and two moments
    assert "ZeRO-3 shards none of 97.0% of a GPU's parameters" in said and f"{layers:,.2f} GiB" in said
    assert zero_hint(*plan_of("llama3-70b", MeshShape(data=64), **settings)) is None


@pytest.mark.parametrize(("mesh", "stars"), [(MeshShape(data=64, model=8), False), (MeshShape(data=512), True)])
def test_a_star_is_explained_where_there_is_one(mesh, stars):
    chosen = choice_table(*plan_of("gpt2-8.3b", mesh, microbatch_size=1), DGX_H100, 0.9)
    cells = [cell for column in chosen.columns for cell in column.cells]
    assert any("*" in str(cell) for cell in cells) == stars
    assert chosen.caption == ("* does not fit 90.0% of the GPU's memory" if stars else None)
