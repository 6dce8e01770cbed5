"""What a report says of a pipeline, against the timetable and the sizes of what stages send."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from rich.console import Console

from mtjax.inspect import chart, hlo, text
from mtjax.inspect.groups import Groups
from mtjax.inspect.html import page
from mtjax.inspect.report import Report, inspect
from mtjax.inspect.schema import to_json
from mtjax.inspect.stages import direction, find_permutes
from mtjax.inspect.targets import find_target
from mtjax.layout.timetable import num_ticks, timetable
from tests.inspect.snippets import TICKS
from tests.inspect.steps import tiny


@pytest.fixture(scope="module")
def staged() -> Report:
    """Two stages of two layers, four microbatches of one sample, on virtual CPUs."""
    run = tiny(mesh="2x2x2", num_layers=4, microbatch_size=1, compute_dtype="float32")
    return inspect(run, find_target("cpu"))


def rendered(report: Report) -> str:
    console = Console(file=StringIO(), width=180)
    text.show(report, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.long
def test_permutes_are_the_tables_and_carry_a_part_of_the_stream(staged):
    ticks = num_ticks(stages=2, microbatches=4)
    found = {permutes.carries: permutes for permutes in staged.stages.permutes}
    assert set(found) == {"activations", "gradients"}
    for permutes in found.values():
        assert permutes.count == ticks == 5
        assert permutes.payload_bytes == 4 * 1 * 64 * 64 / 2  # b s h / model, float32
    assert staged.stages.table == timetable("1f1b", 2, 4)
    assert staged.stages.bubble_formula == staged.stages.table.bubble == 1 / 4


def test_stages_have_their_layers_and_slots(staged):
    assert [(stage.layers, stage.in_flight) for stage in staged.stages.stages] == [(2, 3), (2, 1)]


def test_the_terminal_shows_the_timetable(staged):
    shown = rendered(staged)
    assert "stage 0  0 1 · 2 0 3 1 · 2 3" in shown
    assert "stage 1  · 0 0 1 1 2 2 3 3 ·" in shown
    assert "5 forward and 5 backward ticks, 4 of each with work on a stage; (p-1)/(m v) = 1/4 = 25.0%" in shown
    assert re.search(r"activations │ next +│ +5 │ +1 │ f32\[1,32,64\] +│ +8.19 kB │ +41 kB │ +0 of 5 │ - ", shown)
    assert "(data x model)" not in shown


def test_json_has_the_documented_fields(staged):
    found = json.loads(json.dumps(to_json(staged)))["stages"]
    assert (found["schedule"], found["microbatches"], found["chunks"]) == ("1f1b", 4, 1)
    assert found["forward_halves"] == found["backward_halves"] == 5
    assert [(permutes["carries"], permutes["count"]) for permutes in found["permutes"]] == [
        ("activations", 5),
        ("gradients", 5),
    ]
    assert [stage["in_flight"] for stage in found["stages"]] == [3, 1]
    assert found["stages"][0]["memory"]["total"] > 0


class Cells(HTMLParser):
    """Titles of a page's shapes, and what it would load; checks that tags close."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "br", "line"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if self.open[-2:] == ["rect", "title"]:
            self.titles.append(data)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def cells_of(html: str) -> Cells:
    cells = Cells()
    cells.feed(html)
    assert cells.open == []
    assert cells.loads == []
    return cells


def test_the_page_has_a_cell_for_every_half(staged):
    turns = [title for title in cells_of(page(staged)).titles if title.startswith("stage ")]
    assert len(turns) == 2 * 2 * num_ticks(2, 4)
    assert sum("idle" in title for title in turns) == 2 * 2
    assert "stage 1, tick 1, backward: microbatch 0, slot 0" in turns


def test_chunks_fade_and_long_timetables_lose_their_middle():
    cells = cells_of(chart.timetable(timetable("interleaved", 4, 8, 2)))
    assert sum("chunk 1" in title for title in cells.titles) == 2 * 4 * 8
    html = chart.timetable(timetable("gpipe", 32, 512))
    assert len(cells_of(html).titles) == 15 * 239  # a lane and a column are the marks of what is left out
    assert html.count("…") == 2
    assert len(html) < 600_000


def test_without_stages_nothing_is_said_of_them(cpu_report):
    assert cpu_report.stages is None
    assert to_json(cpu_report)["stages"] is None
    assert "Stages" not in rendered(cpu_report)
    assert "Stages" not in page(cpu_report)


MESH = {"data": 2, "stage": 4, "model": 2}


def pairs(by: int, ways: int, wraps: bool, mesh: dict[str, int]) -> Groups:
    """Every device sends to that `by` stages on."""
    inner = mesh["model"]
    found = []
    for device in range(mesh["data"] * ways * inner):
        stage = device // inner % ways
        if wraps or 0 <= stage + by < ways:
            found.append((device, device + ((stage + by) % ways - stage) * inner))
    return Groups(tuple(found), is_pairs=True)


@pytest.mark.parametrize("wraps", [False, True])
def test_directions_along_a_line_and_a_ring(wraps):
    assert direction(pairs(1, 4, wraps, MESH), MESH, "stage") == "activations"
    assert direction(pairs(-1, 4, wraps, MESH), MESH, "stage") == "gradients"


def test_in_a_ring_of_two_directions_are_the_same():
    mesh = MESH | {"stage": 2}
    assert direction(pairs(1, 2, False, mesh), mesh, "stage") == "activations"
    assert direction(pairs(-1, 2, False, mesh), mesh, "stage") == "gradients"
    assert direction(pairs(1, 2, True, mesh), mesh, "stage") == "either way"


def test_what_hides_a_permute_are_the_layers_products_in_its_window():
    """A loop of five ticks: gradients travel behind a layer's product, activations behind a layer's trivial work."""
    onward, back = find_permutes(hlo.parse(TICKS), {"data": 1, "stage": 4, "model": 2}, ("stage",))
    assert (onward.carries, onward.count, onward.hidden, dict(onward.behind)) == ("activations", 5, 0, {})
    assert (back.carries, back.count, back.hidden, dict(back.behind)) == ("gradients", 5, 5, {"layer forward": 5})
    assert onward.payload_bytes == back.payload_bytes == 2 * 4 * 8


def test_permutes_along_other_axes_are_not_the_stages():
    assert not list(find_permutes(hlo.parse(TICKS), {"data": 4, "stage": 1, "model": 2}, ("stage",)))


def test_a_report_of_many_stages_names_the_first_and_the_last(staged):
    many = replace(staged.stages, stages=staged.stages.stages * 20)
    console = Console(file=StringIO(), width=180)
    console.print(text.stages_table(many))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "│    39 │" in shown
    assert "…" in shown
