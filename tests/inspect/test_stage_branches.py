"""Branches that a stage takes in some ticks only: how often they count, and how long a tick takes with them."""

import dataclasses

import pytest

from mtjax.inspect import hlo
from mtjax.inspect.causes import memory_bound_by_cause
from mtjax.inspect.collectives import find_collectives
from mtjax.inspect.hlo import Module
from mtjax.inspect.products import count_flops
from mtjax.inspect.roofline import Roofline
from mtjax.inspect.stage_branches import with_stage_branches
from mtjax.layout.timetable import Timetable, timetable
from tests.inspect.test_roofline import CONSTANTS, SERVER

ARRAY = "f32[64,64]{1,0}"
KERNEL = 2.0
"""Seconds of each."""
EMBEDDING, LOSSES, EMBEDDING_GRADIENTS = "embedding", "jvp(loss)", "transpose(jvp(embedding))"
KERNELS = {EMBEDDING: 1, LOSSES: 4, EMBEDDING_GRADIENTS: 2}
"""Of the branch that runs them, after a sum over the model ranks, which takes no time here."""
HEADER = "HloModule jit_step, is_scheduled=true, num_partitions=4\n"
PASSED_ON = f"""
%passed_on (p: {ARRAY}) -> {ARRAY} {{
  ROOT %p = {ARRAY} parameter(0)
}}
"""


def branch(name: str, scope: str) -> str:
    inner = f"{scope}/stages/cond/branch_0_fun/mlp" if "layers" in scope else f"stages/cond/branch_1_fun/{scope}"
    path = f'metadata={{op_name="jit(step)/while/body/{inner}'
    lines = [f'%y.0 = {ARRAY} all-reduce(%x), channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}, {path}/psum"}}']
    kernels = KERNELS.get(scope, 1)
    for number in range(kernels):
        root = "ROOT " if number == kernels - 1 else ""
        operands = f"dot(%y.{number}, %y.{number}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
        lines.append(f'{root}%y.{number + 1} = {ARRAY} {operands}, {path}/dot_general"}}')
    body = "\n  ".join(lines).replace("%y.", f"%{name}.y.")
    return f"\n%{name} (x: {ARRAY}) -> {ARRAY} {{\n  %x = {ARRAY} parameter(0)\n  {body}\n}}\n"


def tick(name: str, forward: bool, backward: bool, skips: bool = False) -> tuple[str, list[str]]:
    """The branches of a tick and its instructions, from %x to %out; `skips`: whether stages skip layers."""
    scopes = [EMBEDDING] * forward + ["layers"] * forward + ["transpose(jvp(layers))"] * backward
    scopes += [LOSSES, EMBEDDING_GRADIENTS] * backward
    branches, lines, last = "", [], "x"
    for number, scope in enumerate(scopes):
        value, path = f"{name}.{number}", 'metadata={op_name="jit(step)/while/body'
        is_layer = "layers" in scope
        if is_layer and not skips:
            operation = f'negate(%{last}), {path}/{scope}/neg"}}'
        else:
            callee = f"{name}.run.{number}"
            branches += branch(callee, scope)
            held, other = ("passed_on", callee) if is_layer else (callee, "passed_on")
            calls = f"true_computation=%{held}, false_computation=%{other}"
            around = f"/{scope}" if is_layer else ""
            operation = f'conditional(%true, %{last}, %{last}), {calls}, {path}{around}/stages/cond"}}'
        lines.append(f"%{value} = {ARRAY} {operation}")
        last = value
    return branches, [*lines, f"%{name}.out = {ARRAY} bitcast(%{last})"]


def program(table: Timetable, skips: bool = False) -> str:
    """Loops over ticks, one for each phase; XLA unrolls those of one tick."""
    state, computations, entry, last = f"(s32[], {ARRAY})", PASSED_ON, [], "x"
    for number, phase in enumerate(table.phases):
        name, length = f"phase{number}", phase.stop - phase.start
        branches, lines = tick(name, phase.forward, phase.backward, skips)
        computations += branches
        true = "%true = pred[] constant(true)"
        if length == 1:
            entry += [line.replace("(%x", f"(%{last}").replace(", %x)", f", %{last})") for line in lines]
            last = f"{name}.out"
            continue
        inside = "\n  ".join(
            [f"%s = {state} parameter(0)", f"%x = {ARRAY} get-tuple-element(%s), index=1", true, *lines]
        )
        inside += (
            f"\n  %i = s32[] get-tuple-element(%s), index=0\n  ROOT %next = {state} tuple(%i, %{name}.out)".replace(
                "%i", f"%{name}.i"
            )
        )
        computations += f"\n%{name} (s: {state}) -> {state} {{\n  {inside}\n}}\n"
        condition = f"%{name}.condition (s: {state}) -> pred[] {{\n  %s = {state} parameter(0)\n  ROOT {true}\n}}\n"
        computations += "\n" + condition
        entry += [
            f"%{name}.in = {state} tuple(%zero, %{last})",
            f"%{name}.loop = {state} while(%{name}.in), condition=%{name}.condition, body=%{name}, "
            f'backend_config={{"known_trip_count":{{"n":"{length}"}}}}',
            f"%{name}.out = {ARRAY} get-tuple-element(%{name}.loop), index=1",
        ]
        last = f"{name}.out"
    start = [f"%x = {ARRAY} parameter(0)", "%zero = s32[] constant(0)", "%true = pred[] constant(true)"]
    body = "\n  ".join([*start, *entry, f"ROOT %end = {ARRAY} bitcast(%{last})"])
    return f"{HEADER}{computations}\nENTRY %main (x: {ARRAY}) -> {ARRAY} {{\n  {body}\n}}\n"


def compiled(table: Timetable, skips: bool = False) -> Module:
    return with_stage_branches(hlo.parse(program(table, skips)), table, 1)


TABLES = [
    timetable("interleaved", 2, 4, 2),
    timetable("1f1b", 2, 4),
    timetable("1f1b", 4, 8),
    timetable("gpipe", 2, 3),
    timetable("interleaved", 4, 6, 3),
    timetable("1f1b", 2, 1),
]


@pytest.mark.parametrize("table", TABLES)
def test_branches_count_once_a_microbatch_and_the_embedding_in_idle_ticks_too(table: Timetable) -> None:
    module, m = compiled(table), table.microbatches
    found = find_collectives(module, {"stage": 2, "model": 2}, 8)
    counts = {phase: sum(c.count for c in found if c.phase == phase) for phase in {c.phase for c in found}}
    idle = table.forward_ticks - m * table.chunks
    assert counts == {"embedding forward": m + idle, "loss forward": m, "embedding backward": m}
    assert all(c.is_exact for c in found)
    products = KERNELS[EMBEDDING] * (m + idle) + (KERNELS[LOSSES] + KERNELS[EMBEDDING_GRADIENTS]) * m
    assert count_flops(module) == products * 2 * 64**3


@pytest.mark.parametrize("table", TABLES)
def test_layers_that_a_stage_may_skip_count_in_every_tick(table: Timetable) -> None:
    """And do not change which branches of the timetable are taken."""
    found, plain = (find_collectives(compiled(table, skips), {"stage": 2, "model": 2}, 8) for skips in (True, False))
    counts, others = (
        {phase: sum(c.count for c in each if c.phase == phase) for phase in {c.phase for c in each}}
        for each in (found, plain)
    )
    halves = table.forward, table.backward
    ticks = [sum(any(work is not None for work in half) for half in each) for each in halves]
    assert counts == {**others, "layer forward": ticks[0], "layer backward": ticks[1]}


@pytest.mark.parametrize("table", [table for table in TABLES if min(p.stop - p.start for p in table.phases) > 1])
def test_a_tick_takes_what_its_slowest_stage_does(table: Timetable) -> None:
    def kernels(at: int, stage: int) -> int:
        """Of a stage in a tick, worked out from the timetable alone."""
        forward, backward = table.forward[at], table.backward[at]
        count = 0
        if any(forward):
            work = forward[stage]
            count += 1 + (KERNELS[EMBEDDING] if stage == 0 and (work is None or work.chunk == 0) else 0)
        if any(backward):
            work, count = backward[stage], count + 1
            if work and stage == table.stages - 1 and work.chunk == table.chunks - 1:
                count += KERNELS[LOSSES]
            if work and stage == 0 and work.chunk == 0:
                count += KERNELS[EMBEDDING_GRADIENTS]
        return count

    module = compiled(table)
    found = find_collectives(module, {"stage": 2, "model": 2}, 8)
    roofline = Roofline(module, found, dataclasses.replace(SERVER, link=1e12), CONSTANTS)
    slowest = (max(kernels(at, stage) for stage in range(table.stages)) for at in range(len(table.forward)))
    assert roofline.run().seconds == pytest.approx(KERNEL * sum(slowest))
    total = sum(spent.memory_bound for spent in roofline.run().phases.values())
    assert sum(sum(causes.values()) for causes in memory_bound_by_cause(roofline).values()) == pytest.approx(total)
