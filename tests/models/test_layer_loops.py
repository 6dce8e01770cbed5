"""Loops over the layers of a pattern: as few layers to compile as can be."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax import config as configs
from mtjax.config.layer_pattern import expanded, joined_loops, runs_of


@pytest.mark.parametrize(
    ("name", "alone", "handing_on"),
    [
        ("mamba2-hybrid-8b", 22, 36),
        ("nemotron-h-8b", 13, 15),
        ("qwen3-next-80b-a3b", 8, 14),
        ("zamba2-1.2b", 7, 8),
    ],
)
def test_presets_leave_as_few_layers_to_compile_as_can_be(name: str, alone: int, handing_on: int) -> None:
    """In loops that hand on what they gather, and in those that need not."""
    letters = expanded(configs.load(name).model.layer_pattern)
    compiled = [sum(len(unit) for unit, _ in loops) for loops in (runs_of(letters), joined_loops(letters))]
    assert compiled == [alone, handing_on]


@given(st.text("M*-", min_size=1, max_size=9))
def test_no_other_loops_that_hand_on_compile_fewer_layers(letters: str) -> None:
    """Beside every division into loops."""

    @cache
    def fewest(start: int) -> int:
        found = [0] if start == len(letters) else []
        for size in range(1, len(letters) - start + 1):
            unit, end = letters[start : start + size], start + size
            found.append(size + fewest(end))
            while letters.startswith(unit, end):
                end += size
                if letters.startswith(unit[0], end) and letters[start - 1] == unit[-1]:
                    found.append(size + fewest(end))
        return min(found)

    assert sum(len(unit) for unit, _ in joined_loops(letters)) == fewest(0)
