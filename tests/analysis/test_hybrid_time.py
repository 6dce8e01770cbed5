"""Time of a hybrid model's layers by formula, beside compiled programs: the rows of `benchmarks/hybrid.py`, and gated
delta nets.

The formula's kernels were read off other programs, and off the row with context parallelism; of the others it has only
sizes. Of gated delta nets' they were read off the row of one device.
"""

import json
from pathlib import Path

import pytest

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.copies import copies_in_turn
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.layer_time import layer_seconds
from mtjax.analysis.machine import Machine
from mtjax.analysis.software import MTJAX
from mtjax.analysis.timing import least_seconds, step_time
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "hybrid.json").read_text())["results"]
PLAIN = {"sequence_parallel": False, "zero": 0, "recompute": "none", "global_batch_size": 1, "microbatch_size": 1}


@pytest.mark.parametrize("row", RESULTS, ids=lambda row: f"{row['mesh']} {row['sequence_length']} {row['settings']}")
def test_layers_take_as_long_as_those_of_compiled_programs(row):
    settings = {"layer_pattern": "MM**--", "num_layers": 6, "vocab_size": 32768, **PLAIN, **row["settings"]}
    settings |= {"sequence_length": row["sequence_length"], "mesh": row["mesh"]}
    run = config.replace(config.load("nemotron-h-8b"), **settings)
    anatomy, plan, machine = anatomy_of(run.model), Plan.of(run, parse_mesh(row["mesh"])), Machine(DGX_H100)
    for stack in anatomy.stacks:
        if stack.letter == "*" and plan.context_parallelism:
            continue  # compiled when the roofline halved a ring's steps without a mask (docs/notes/plan.md)
        copied = sum(copy.times * machine.kernel(copy.size) for copy in copies_in_turn(stack, anatomy.model, plan))
        seconds = sum(layer_seconds(stack, plan, machine, MTJAX)) + copied
        # Kernels of the shortest, 0.6 ms, are no longer than their launches, which the formulas of attention leave out.
        assert 1e3 * seconds == pytest.approx(row["milliseconds"][stack.letter], rel=0.11 if seconds < 1e-3 else 0.08)


NO_EXPERTS = {
    name: getattr(config.Config().model, name)
    for name in ("num_experts", "experts_top_k", "expert_size", "shared_expert_size", "shared_expert_gate")
}
SPLIT = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("mesh", "length", "settings", "milliseconds"),
    [
        ("1x1", 8192, {}, 40.35),
        ("1x4", 8192, {**SPLIT, "ssm_chunk": 64}, 45.74),
        ("data=1,context=2,model=1", 16384, {}, 32.55),
        ("data=1,context=4,model=1", 32768, {"recompute": "full"}, 33.77),
        ("data=1,context=8,model=1", 32768, {}, 19.24),
    ],
)
def test_gated_delta_nets_take_as_long_as_those_of_compiled_programs(mesh, length, settings, milliseconds):
    """Of Qwen3-Next's sizes, `GG--` without experts, compiled for H100s (jax 0.10.2, 27 November 2026)."""
    sizes = {"layer_pattern": "GG--", "num_layers": 4, "mlp_size": 5632, "vocab_size": 32768, **NO_EXPERTS}
    run = config.replace(
        config.load("qwen3-next-80b-a3b"),
        **{**sizes, "router_aux_loss": 0.01, **PLAIN, **settings, "sequence_length": length, "mesh": mesh},
    )
    anatomy, plan, machine = anatomy_of(run.model), Plan.of(run, parse_mesh(mesh)), Machine(DGX_H100)
    (stack,) = (stack for stack in anatomy.stacks if stack.letter == "G")
    copied = sum(copy.times * machine.kernel(copy.size) for copy in copies_in_turn(stack, anatomy.model, plan))
    assert 1e3 * (sum(layer_seconds(stack, plan, machine, MTJAX)) + copied) == pytest.approx(milliseconds, rel=0.09)


@pytest.mark.parametrize(
    ("pattern", "chunks"),
    [("M-*MM-*M", ("M-", "*M")), ("MM*-M-*M", ("MM", "*-", "M-", "*M"))],
)
def test_slots_that_a_stage_skips_take_no_time(pattern, chunks):
    """Two chunks on each of two stages: a tick takes as long as the slowest chunk, not as long as all slots."""
    settings = {"layer_pattern": pattern, "num_layers": 8, "vocab_size": 4096, "mesh": "1x2x1", **PLAIN}
    settings |= {"pipeline_schedule": "interleaved", "chunks": 2, "global_batch_size": 8, "sequence_length": 4096}
    run = config.replace(config.load("nemotron-h-8b"), **settings)
    anatomy, plan, machine = anatomy_of(run.model), Plan.of(run, parse_mesh("1x2x1")), Machine(DGX_H100)
    computed = {stack.letter: sum(layer_seconds(stack, plan, machine, MTJAX)) for stack in anatomy.stacks}
    copied = {
        stack.letter: sum(copy.times * machine.kernel(copy.size) for copy in copies_in_turn(stack, anatomy.model, plan))
        for stack in anatomy.stacks
    }
    ticks = 8 * 2 + 2 - 1
    time = step_time(anatomy, plan, DGX_H100)
    assert time.compute - time.logits == pytest.approx(8 / 2 * sum(computed[letter] for letter in pattern))
    longest = max(sum(computed[letter] + copied[letter] for letter in chunk) for chunk in chunks)
    work = 8 / 2 * sum(computed[letter] + copied[letter] for letter in pattern)
    assert time.bubble == pytest.approx(ticks * longest - work)
    least = max(sum(computed[letter] for letter in chunk) for chunk in chunks)
    assert least_seconds(anatomy, plan, DGX_H100) == pytest.approx(ticks * least)
