"""Memory, FLOPs, time, JSON and the page of compiled steps, against formulas we did not take from them."""

import dataclasses
import json
import re
import shlex
from html import unescape
from html.parser import HTMLParser
from io import StringIO

import jax
import pytest
from rich.console import Console

from mtjax import cli
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import DGX_2H, DGX_H100
from mtjax.commands.train import Options as TrainOptions
from mtjax.inspect import text
from mtjax.inspect.advice import memory_advice
from mtjax.inspect.compare import comparison_table, other_config, sent_bytes, sweep_configs
from mtjax.inspect.decision import Decision
from mtjax.inspect.html import page
from mtjax.inspect.report import Report, report
from mtjax.inspect.schema import SCHEMA, to_json
from mtjax.inspect.train_hook import show_program
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.plan.search import describe
from tests.counted import rank_parameters
from tests.inspect.steps import needs_aot, tiny


def rendered(report: Report) -> str:
    console = Console(file=StringIO(), width=180)
    text.show(report, console)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@needs_aot
def test_counted_flops_are_the_published_formula(two_servers_report):
    """72 B s l h^2 (1 + s/(6h) + V/(12lh)) of arXiv 2104.04473 without recompute, and logits once more by chunks."""
    layers, h, s, v, batch = 3, 64, 64, 256, 8
    published = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert two_servers_report.flops.counted == pytest.approx(published + 2 * batch * s * h * v, rel=0.01)


@needs_aot
@pytest.mark.parametrize("fixture", ["gpu_report", "two_servers_report", "data_parallel_report"])
def test_counted_flops_are_the_reports_formula(fixture, request):
    """Also with full recompute and flash attention."""
    assert request.getfixturevalue(fixture).flops.difference == pytest.approx(0, abs=0.01)


def test_counted_flops_on_cpus(cpu_report):
    assert cpu_report.flops.difference == pytest.approx(0, abs=0.01)


@needs_aot
def test_memory_of_the_state_is_exact(gpu_report):
    memory = gpu_report.memory
    parameters = 4 * rank_parameters(anatomy_of(gpu_report.config.model), 4)
    assert memory.parameters == parameters == memory.formula.weights
    assert memory.optimizer == pytest.approx(2 * parameters, abs=16)  # two moments and two counters
    assert memory.arguments == memory.parameters + memory.optimizer + memory.other_arguments
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries
    assert memory.temporaries == memory.gradients + memory.activations
    assert memory.capacity == DGX_H100.gpu.memory
    assert memory.fits is True


def test_a_program_fits_what_train_and_plan_may_take(cpu_report):
    """90% of the memory; where it does not fit, settings that make it smaller and are not chosen yet."""

    def on(share):
        memory = cpu_report.memory
        return dataclasses.replace(cpu_report, memory=dataclasses.replace(memory, capacity=int(memory.peak / share)))

    fits, excessive = on(0.89), on(0.91)
    assert fits.memory.fits and not excessive.memory.fits
    line = r"does not fit\S*: \S+ .B \(\S+ MiB\) of .*, 90% of the device's "
    assert re.search(line, text.memory_lines(excessive))
    assert memory_advice(fits, "tiny", "h100x8") is None
    advice = memory_advice(excessive, "a b.toml", "h100x8")
    assert advice is not None and advice.startswith("does not fit: try --zero 3, ")
    size = cpu_report.step.mesh.size
    assert advice.endswith(
        f"`mtjax plan --config 'a b.toml' --gpus {size} --target h100x8` searches for a plan that fits"
    )


@needs_aot
def test_a_device_too_small_does_not_fit(gpu_report):
    small = dataclasses.replace(DGX_H100, gpu=dataclasses.replace(DGX_H100.gpu, memory=1_000_000))
    found = report(gpu_report.step, time_on=small)
    assert found.memory.fits is False
    assert "does not fit" in rendered(found)


@needs_aot
def test_predicted_time_adds_up(gpu_report):
    t = gpu_report.time
    assert t.seconds == pytest.approx(t.products + t.memory_bound + t.exposed + t.contention, rel=1e-6)
    assert sum(t.exposed_by_axes.values()) == pytest.approx(t.exposed)
    assert sum(spent.total for spent in t.phases.values()) == pytest.approx(t.seconds)
    assert 0 < t.mfu <= t.hfu < 1
    assert set(t.layers) == {"layer forward", "layer backward"}
    for events in t.layers.values():
        assert {e.stream for e in events} >= {"compute", "send"}


@needs_aot
def test_slower_hardware_takes_longer(gpu_report):
    assert report(gpu_report.step, time_on=DGX_2H).time.seconds > gpu_report.time.seconds
    slow = dataclasses.replace(DGX_H100, link=DGX_H100.link / 100)
    found = report(gpu_report.step, time_on=slow).time
    assert found.exposed > gpu_report.time.exposed
    assert found.products == gpu_report.time.products


@needs_aot
def test_json_has_the_documented_fields(gpu_report):
    document = json.loads(json.dumps(to_json(gpu_report)))
    assert document["schema"] == SCHEMA == "mtjax.inspect/1"
    assert set(document) == {
        *("schema", "run", "target", "seconds", "collectives", "contract", "memory", "flops", "time", "stages"),
        "measured",
    }
    assert document["run"]["mesh"] == {"data": 2, "model": 4}
    forward = [c for c in document["collectives"] if c["phase"] == "layer forward"]
    assert sum(c["count"] for c in forward) == 12
    assert forward[0]["arrays"] == [{"dtype": "bf16", "dims": [2, 64, 64]}]
    assert document["contract"]["holds"] is True
    assert document["target"]["server"]["gpus"] == 8


class Checker(HTMLParser):
    """Collects what a page would load, and checks that its tags close."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "srcset", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@needs_aot
def test_the_page_needs_nothing_else(gpu_report):
    html = page(gpu_report, [gpu_report])
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    assert checker.loads == []
    assert "script" not in checker.seen
    assert "url(" not in html
    assert "http" not in html
    assert html.count("<svg") >= 5
    assert "Timeline of a layer" in html


@needs_aot
def test_the_page_says_what_one_decides_by(gpu_report):
    """Two layers of 64 keep no H100 busy: that is red, and the planner knows a faster mesh of eight."""
    decision = Decision.on(gpu_report, gpu_report.config, "gpt2-tiny", price=2.5)
    assert decision.faster is not None
    html = page(gpu_report, decision=decision)
    checker = Checker()
    checker.feed(html)
    assert checker.open == [] and checker.loads == []
    assert '<b class="bad">' in html and "TFLOP/s" in html
    assert f"{describe(decision.faster.plan)}: " in html
    typed = re.search(r"<code>mtjax train (.*?)</code>", html)
    assert typed
    chosen = cli.parse(shlex.split(unescape(typed[1])), "mtjax train", "", TrainOptions).config
    assert Plan.of(chosen, parse_mesh(chosen.parallel.mesh)) == decision.faster.plan
    time, steps = gpu_report.time, gpu_report.config.training.steps
    money = 8 * steps * time.seconds / 3600 * 2.5
    assert f"cost at 2.5 per GPU and hour</th><td>{money:,.0f} (" in html
    assert "25 published runs on H100" in html and f"jax {jax.__version__}" in html
    assert "hidden_size = 64" in html
    dear = dataclasses.replace(decision, price=None, faster=None, command=None)
    assert "cost at" not in page(gpu_report, decision=dear) and "the planner finds none" in page(
        gpu_report, decision=dear
    )


def test_the_terminal_shows_the_table_and_the_verdict(cpu_report):
    shown = rendered(cpu_report)
    assert "layer backward    │ all-reduce │ model │    12 │ f32[2,64,64]" in shown
    assert "the contract holds" in shown
    assert "f32 for bf16: converted by XLA for CPUs" in shown


def test_side_by_side(cpu_report):
    console = Console(file=StringIO(), width=120)
    console.print(comparison_table(cpu_report, cpu_report))
    assert "same" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    total = sum(c.wire_bytes * c.count for c in cpu_report.collectives)
    assert sent_bytes(cpu_report) == pytest.approx(total)
    assert sent_bytes(cpu_report, "model", "layer forward") == 12 * 32_768 * 1.5


def test_what_vs_understands():
    base = tiny()
    assert other_config(base, ["4x2", "recompute=none"]).parallel.mesh == "4x2"
    assert other_config(base, ["--recompute=none"]).training.recompute == "none"
    assert other_config(base, ["global-batch-size=16"]).training.global_batch_size == 16
    assert other_config(base, ["gpt2-8.3b"]).model.num_layers == 72


def test_a_sweep_tries_every_factorisation():
    tried = {str(mesh): run for mesh, run in sweep_configs(tiny(), 8)}
    assert set(tried) == {"8x1", "4x2", "2x4", "1x8"}
    assert "num_heads 4" in str(tried["1x8"])
    assert tried["8x1"].training.microbatch_size == 1  # of 8 samples on 8 data ranks


def test_train_shows_the_program_it_is_about_to_run(cpu_report):
    console = Console(file=StringIO(), width=180)
    found = show_program(cpu_report.step.program, console)
    assert found.verdict.holds
    assert found.rows == cpu_report.rows
    assert "the contract holds" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.size(999), "999 B"),
        (text.size(999_700), "1 MB"),
        (text.size(21_256_492_818), "21.3 GB"),
        (text.duration(0.00099999), "1 ms"),
        (text.duration(0.551), "551 ms"),
        (text.duration(5e-6), "5 us"),
        (text.duration(1234.0), "1,234 s"),
    ],
)
def test_units(shown, expected):
    assert shown == expected
