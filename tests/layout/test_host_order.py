"""Offloaded arrays that cross to the device and back at once."""

import pytest

from mtjax.layout.host_order import exchange_pairs, exposed_elements


def waited(sizes: list[int], layers: int) -> int:
    """Walks over the loop, one element a moment in each direction: what a layer reads, updates and writes."""
    here, updated, written, moments = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int]](), 0
    pairs = [sorted(pair, key=lambda i: sizes[i]) for pair in exchange_pairs(sizes)]

    def cross(reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        nonlocal moments
        assert set(writes) <= updated and not set(reads) & here
        moments += max(sum(sizes[i] for i, _ in way) for way in (reads, writes))
        here.update(reads)
        written.update(writes)

    for small, *_ in pairs:
        cross([(small, 0)], [])
    for k in range(layers):
        for small, *rest in pairs:
            assert (small, k) in here
            updated.add((small, k))
            cross([(i, k) for i in rest], [(small, k)])
            updated.update((i, k) for i in rest)
            cross([(small, k + 1)] if k + 1 < layers else [], [(i, k) for i in rest])
    assert here == updated == written == {(i, k) for i in range(len(sizes)) for k in range(layers)}
    return moments


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("sizes", [[7], [3, 7], [5, 1, 9], [4, 4, 4, 4], [9, 1, 8, 2, 7]], ids=str)
def test_what_is_exposed_is_what_a_link_would_take(sizes: list[int], layers: int) -> None:
    exposed = exposed_elements(sizes, layers)
    assert exposed == waited(sizes, layers)
    assert layers * sum(sizes) <= exposed <= 2 * layers * sum(sizes)


def test_arrays_of_about_equal_size_cross_together() -> None:
    """Of Llama 3 8B's layer, a third of the bytes of both directions cross beside others."""
    sizes = [512, 512 * 28672, 1792 * 4096, 512 * 4096, 512 * 4096, 512 * 2048, 512]
    assert exchange_pairs(sizes) == [(1, 2), (3, 4), (5, 0), (6,)]
    assert 0.65 < exposed_elements(sizes, 32) / (2 * 32 * sum(sizes)) < 0.66
