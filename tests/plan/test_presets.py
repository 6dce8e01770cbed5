"""Every config that ships loads, is valid, and says the truth about its size."""

import re

import pytest

from mtjax import config
from mtjax.analysis import counts, flops, memory
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.hardware import SERVERS
from mtjax.analysis.schedules import bubble
from mtjax.analysis.timing import step_time
from mtjax.layout import plan as plans
from mtjax.layout.divisibility import check_config
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.timetable import num_ticks
from mtjax.plan import published

PATHS = sorted(config.shipped_folder().glob("*.toml"))
PRESETS = [p for p in PATHS if p.stem not in ("default", "llama-tiny")]


@pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)
def test_loads_and_is_valid(path):
    config.validate(config.load(path.stem))


def test_every_published_model_is_there():
    names = {p.stem for p in PRESETS}
    table_1 = {"gpt2-1.2b", "gpt2-2.5b", "gpt2-4.2b", "gpt2-8.3b"}
    table_2 = {"gpt2-355m", "gpt2-2.5b-lm", "gpt2-8.3b-lm"}
    table_4 = {"bert-336m", "bert-1.3b", "bert-3.9b"}
    family = {"bert-base", "bert-tiny", "gpt2-small", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt2-tiny"}
    llama = {"llama2-7b", "llama2-13b", "llama2-70b", "llama3-8b", "llama3-70b", "llama3-8b-128k", "llama3-70b-128k"}
    stages = {f"gpt-{size}" for size in ("39b", "76b", "145b", "175b", "310b", "530b", "1t")}
    assert table_1 | table_2 | table_4 | family | llama | stages <= names


@pytest.mark.parametrize("row", [row for row in published.A100 if row.mesh.has_pipeline], ids=lambda row: row.name)
def test_configs_with_stages_are_the_rows_of_the_table(row):
    """Sizes, mesh and batch of Table 1 of arXiv 2104.04473, whose parameters are published too."""
    runs = [config.load(path) for path in PRESETS if path.stem.startswith("gpt-")]
    sizes = (row.num_layers, row.hidden_size, row.num_heads)
    (run,) = (run for run in runs if (run.model.num_layers, run.model.hidden_size, run.model.num_heads) == sizes)
    assert parse_mesh(run.parallel.mesh) == row.mesh
    assert run.training.global_batch_size == row.global_batch_size
    assert counts.parameters(anatomy_of(run.model)) / 1e9 == pytest.approx(float(row.name[:-1]), rel=0.001)


@pytest.mark.parametrize(("name", "published"), [("bert-336m", 336e6), ("bert-1.3b", 1.3e9), ("bert-3.9b", 3.9e9)])
def test_bert_is_as_large_as_table_4_says(name, published):
    assert counts.parameters(anatomy_of(config.load(name).model)) == pytest.approx(published, rel=0.02)


def test_bert_base_is_as_large_as_hugging_faces():
    """110,106,428 for BertForPreTraining, and the rows of the vocabulary that are padding, with their biases."""
    model = config.load("bert-base").model
    assert counts.parameters(anatomy_of(model)) == 110_106_428 + (30_720 - 30_522) * (768 + 1)


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: p.stem)
def test_divides_over_its_mesh_and_states_its_size(path):
    run = config.load(path)
    shape = anatomy_of(run.model)
    plan = plans.Plan.of(run, parse_mesh(run.parallel.mesh))
    check_config(run, parse_mesh(run.parallel.mesh))
    header = path.read_text()
    stated = re.search(r"# Parameters: ([\d,]+)", header)
    assert stated and int(stated[1].replace(",", "")) == counts.parameters(shape)
    if gib := re.search(r"by formula: ([\d.]+) GiB, of which ([\d.]+) GiB", header):
        whole = memory.peak_stage_memory(shape, plan)
        assert (gib[1], gib[2]) == (f"{whole.total / 2**30:.1f}", f"{whole.states / 2**30:.1f}")
        if compiled := re.search(r"compiled ([\d.]+) GiB", header):
            assert whole.total / 2**30 == pytest.approx(float(compiled[1]), rel=0.05)
    if step := re.search(r"([\d.]+) s a step by formula", header):
        assert step[1] == f"{step_time(shape, plan, SERVERS['h100']).total:.1f}"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("t5-large", 737_668_096),
        ("t5-3b", 2_851_598_336),
        ("t5-11b", 11_307_321_344),
        ("t5-1.1-base", 247_577_856),
    ],
)
def test_t5_is_as_large_as_hugging_faces(name, published):
    assert counts.parameters(anatomy_of(config.load(name).model)) == published


@pytest.mark.parametrize(
    ("name", "published", "met"),
    [("mixtral-8x7b", 46.7, 12.9), ("mixtral-8x22b", 141, 39), ("qwen3-30b-a3b", 30.5, 3.3)],
)
def test_experts_are_as_large_as_published(name, published, met):
    """Billions of parameters, and of those that a token meets."""
    anatomy, digits = anatomy_of(config.load(name).model), 0 if published == 141 else 1
    assert round(counts.parameters(anatomy) / 1e9, digits) == published
    assert abs(counts.active_parameters(anatomy) / 1e9 - met) <= 0.2


def test_dots1_is_as_large_as_its_config_json_says():
    """Of 62 layers the first has no experts; 32 heads of 128, and as many keys."""
    hidden, vocabulary, attention = 4096, 152_064, 4 * 4096**2 + 2 * 128
    dense = 3 * hidden * 10_944
    expert, router = 3 * hidden * 1408, 128 * hidden + 128
    every_layer, with_experts = attention + 2 * hidden, (128 + 2) * expert + router
    parameters = 2 * vocabulary * hidden + 62 * every_layer + dense + 61 * with_experts + hidden
    anatomy = anatomy_of(config.load("dots1-142b").model)
    assert counts.parameters(anatomy) == parameters == 142_774_381_696
    assert counts.active_parameters(anatomy) == parameters - 61 * (128 - 6) * expert


@pytest.mark.parametrize("path", [p for p in PRESETS if re.match(r"gpt-\d", p.stem)], ids=lambda p: p.stem)
def test_the_predictions_of_stages_stand_in_header_and_docs(path):
    """Ticks, bubbles, memory and the time of a step on A100 and H100."""
    run = config.load(path)
    anatomy, plan = anatomy_of(run.model), plans.Plan.of(run, parse_mesh(run.parallel.mesh))
    shape = plan.stages, plan.microbatches
    ticks, idle, plain = num_ticks(*shape, plan.chunks), bubble(*shape, plan.chunks), bubble(*shape)
    size = memory.peak_stage_memory(anatomy, plan).total / 2**30
    done = flops.hardware_flops(anatomy, plan.recompute) * plan.global_batch_size / plan.mesh.size / 1e12
    # Of each server's GPUs: cuDNN takes wider heads on Hopper than on Ampere.
    servers = (SERVERS[kind] for kind in ("a100-80", "h100"))
    on_each = ((plans.Plan.of(run, plan.mesh, server.gpu.compute_capability), server) for server in servers)
    a100, h100 = (step_time(anatomy, plan, server).total for plan, server in on_each)
    speeds = f"{a100:.1f} s, {done / a100:.0f} | {h100:.1f} s, {done / h100:.0f}"
    name = f"{path.stem} | {run.parallel.mesh} | {plan.microbatch_size} x {plan.microbatches} | {plan.chunks}"
    docs = (path.parents[1] / "docs" / "notes" / "plan.md").read_text()
    assert f"| {name} | {ticks} | {idle:.1%} | {plain:.1%} | {size:.1f} | {speeds} |" in docs
    assert f"{a100:.1f} s on A100, {done / a100:.0f} TFLOP/s" in path.read_text()
