"""Bubbles and microbatches in flight, against the published forms and a simulated 1F1B."""

import pytest

from mtjax.theory.schedules import bubble, in_flight


def test_bubbles():
    assert bubble("gpipe", 4, 8) == bubble("1f1b", 4, 8) == 3 / 8
    assert bubble("interleaved", 4, 8, chunks=2) == 3 / 16
    assert bubble("1f1b", 1, 8) == 0


def test_interleaving_holds_the_published_factor_more():
    p, v = 8, 4
    assert in_flight("interleaved", p, 64, 0, v) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_never_more_than_there_are():
    assert in_flight("1f1b", 8, 2) == 2
    assert in_flight("interleaved", 8, 8, 0, 2) == 8
    assert in_flight("gpipe", 8, 32) == 32


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
    assert bubble("1f1b", stages, microbatches) == pytest.approx(idle)
    assert [in_flight("1f1b", stages, microbatches, i) for i in range(stages)] == most
