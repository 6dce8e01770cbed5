"""Bubbles and microbatches in flight: of mtjax's stages against timetables, of Megatron's against the published forms
and a simulated 1F1B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.analysis.schedules import bubble, full_ticks, megatron_bubble, megatron_in_flight, slots
from mtjax.layout.timetable import timetable


@given(
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    stages=st.integers(1, 7),
    microbatches=st.integers(1, 24),
    chunks=st.integers(1, 4),
)
def test_formulas_say_what_timetables_hold(schedule, stages, microbatches, chunks):
    table = timetable(schedule, stages, microbatches, chunks)
    assert bubble(stages, microbatches, chunks) == pytest.approx(table.bubble)
    assert slots(schedule, stages, microbatches, chunks) == table.slots
    both = [phase.stop - phase.start for phase in table.phases if phase.forward and phase.backward]
    assert full_ticks(schedule, stages, microbatches, chunks) == sum(both)


def test_lock_step_keeps_two_microbatches_for_each_stage_behind():
    assert slots("1f1b", 8, 32) == 2 * 8 - 1
    assert slots("gpipe", 8, 32) == 32
    assert bubble(4, 8, chunks=2) == megatron_bubble("interleaved", 4, 8, chunks=2) == 3 / 16


def test_megatrons_bubbles():
    assert megatron_bubble("gpipe", 4, 8) == megatron_bubble("1f1b", 4, 8) == 3 / 8
    assert megatron_bubble("interleaved", 4, 8, chunks=2) == 3 / 16
    assert megatron_bubble("1f1b", 1, 8) == 0


def test_interleaving_holds_the_published_factor_more():
    p, v = 8, 4
    assert megatron_in_flight("interleaved", p, 64, 0, v) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_never_more_than_there_are():
    assert megatron_in_flight("1f1b", 8, 2) == 2
    assert megatron_in_flight("interleaved", 8, 8, 0, 2) == 8
    assert megatron_in_flight("gpipe", 8, 32) == 32


def simulate_1f1b(stages: int, microbatches: int) -> tuple[float, list[int]]:
    """Walks 1F1B tick by tick (backward takes two); idle over ideal time, and the most in flight per stage."""
    orders = []
    for i in range(stages):
        warm = min(stages - i - 1, microbatches)
        order = [("f", k) for k in range(warm)]
        for k in range(microbatches - warm):
            order += [("f", warm + k), ("b", k)]
        order += [("b", k) for k in range(microbatches - warm, microbatches)]
        orders.append(order)
    done: dict[tuple[str, int, int], int] = {}
    clock, place, flying, most = [0] * stages, [0] * stages, [0] * stages, [0] * stages
    while any(place[i] < len(orders[i]) for i in range(stages)):
        for i in range(stages):
            if place[i] == len(orders[i]):
                continue
            kind, k = orders[i][place[i]]
            before = ("f", k, i - 1) if kind == "f" else ("b", k, i + 1)
            if 0 <= before[2] < stages and before not in done:
                continue
            clock[i] = max(clock[i], done.get(before, 0)) + (1 if kind == "f" else 2)
            done[(kind, k, i)] = clock[i]
            flying[i] += 1 if kind == "f" else -1
            most[i] = max(most[i], flying[i])
            place[i] += 1
    ideal = 3 * microbatches
    return (max(clock) - ideal) / ideal, most


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 4), (2, 4), (4, 4), (4, 12), (8, 16)])
def test_1f1b_against_a_simulation(stages, microbatches):
    idle, most = simulate_1f1b(stages, microbatches)
    assert megatron_bubble("1f1b", stages, microbatches) == pytest.approx(idle)
    assert [megatron_in_flight("1f1b", stages, microbatches, i) for i in range(stages)] == most
