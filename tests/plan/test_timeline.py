"""Timetables in characters: what a reader sees is what the table says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.layout.timetable import forward_timetable, num_ticks, timetable
from mtjax.plan.timeline import abridged, chunk_name, columns, legend, lines

SIZES = {"stages": st.integers(1, 20), "microbatches": st.integers(1, 40), "chunks": st.integers(1, 3)}
SCHEDULES = st.sampled_from(["1f1b", "interleaved", "gpipe"])


def drawn(table, width: int = 500) -> list[str]:
    return [line.plain.rstrip() for line in lines(table, width)]


def test_two_stages_as_drawn_by_hand():
    assert drawn(timetable("1f1b", 2, 3)) == [
        "         F F B F B F B B",
        "stage 0  0 1 · 2 0 · 1 2",
        "stage 1  · 0 0 1 1 2 2 ·",
    ]


def test_chunks_are_letters():
    assert drawn(timetable("interleaved", 2, 2, 2)) == [
        "         F  F  F  F  B  F  B  B  B  B",
        "stage 0  0a 1a 0b 1b ·  ·  0b 1b 0a 1a",
        "stage 1  ·  0a 1a 0b 0b 1b 1b 0a 1a ·",
    ]
    assert "letter" in legend(timetable("interleaved", 2, 2, 2))
    assert "letter" not in legend(timetable("1f1b", 2, 2))


def test_a_forward_pass_has_no_backward_columns():
    assert drawn(forward_timetable(2, 2)) == ["         F F F", "stage 0  0 1 ·", "stage 1  · 0 1"]


def test_long_tables_lose_their_middle():
    shown = drawn(timetable("1f1b", 4, 32), width=40)
    assert shown[0] == "         F  F  F  F  B  …  B  B  B  B"
    assert shown[1].startswith("stage 0  0  1  2  3")
    assert shown[1].endswith("29 30 31")
    assert drawn(timetable("gpipe", 20, 4))[9] == "…"
    assert drawn(timetable("gpipe", 20, 4))[-1].startswith("stage 19 ")


@given(schedule=SCHEDULES, width=st.integers(10, 200), **SIZES)
def test_lines_keep_to_the_width_and_have_a_cell_for_every_column(schedule, stages, microbatches, chunks, width):
    table = timetable(schedule, stages, microbatches, chunks)
    shown = lines(table, width)
    label = len(f"stage {stages - 1} ")
    cell = 1 + len(str(microbatches - 1)) + (chunks > 1)
    assert all(line.cell_len <= max(width, label + 3 * cell) for line in shown)
    assert len(shown) == 1 + min(stages, 16)
    assert {line.cell_len for line in shown if line.plain.strip() != "…"} == {shown[0].cell_len}


@given(schedule=SCHEDULES, **SIZES)
def test_columns_are_the_halves_that_run(schedule, stages, microbatches, chunks):
    table = timetable(schedule, stages, microbatches, chunks)
    found = columns(table)
    assert len(found) == 2 * num_ticks(stages, microbatches, chunks)
    assert [(c.tick, c.is_backward) for c in found] == sorted((c.tick, c.is_backward) for c in found)
    assert all(c.half == (table.backward if c.is_backward else table.forward)[c.tick] for c in found)


@pytest.mark.parametrize(
    ("most", "expected"), [(9, [0, 1, 2, 3, 4]), (5, [0, 1, 2, 3, 4]), (4, [0, 1, None, 4]), (3, [0, None, 4])]
)
def test_abridged(most, expected):
    assert abridged(range(5), most) == expected


def test_names_of_chunks():
    assert [chunk_name(n) for n in (0, 1, 25, 26, 27, 52)] == ["a", "b", "z", "aa", "ab", "ba"]
