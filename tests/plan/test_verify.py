"""Formulas against the models and the compiled program."""

from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from rich.console import Console

from mtjax import config
from mtjax.analysis import counts, memory
from mtjax.analysis.anatomy import anatomy_of
from mtjax.inspect import verify
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.verify import Check, compare
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.sharding.device_mesh import make_mesh
from mtjax.train.step import make_train_step
from tests.counted import rank_parameters
from tests.inspect.steps import has_cudnn, theory_of

PRESETS = sorted(p.stem for p in config.shipped_folder().glob("gpt2-*.toml"))


@pytest.mark.parametrize("name", PRESETS)
def test_formula_counts_exactly_what_the_model_has(name):
    run = config.replace(config.load(name), global_batch_size=1, microbatch_size=None)
    program = make_train_step(run, make_mesh(MeshShape(), jax.devices()))
    counted = sum(leaf.size for leaf in jax.tree.leaves(program.abstract_parameters))
    assert counts.parameters(anatomy_of(run.model)) == counted


@pytest.mark.parametrize("mesh", ["1x2", "2x4", "1x8"])
def test_formula_counts_exactly_what_a_rank_holds(mesh):
    run = config.replace(config.load("gpt2-tiny"), mesh=mesh)
    shape = parse_mesh(mesh)
    program = make_train_step(run, make_mesh(shape, jax.devices()))
    leaves, places = jax.tree.leaves((program.abstract_parameters, program.state_sharding.parameters)), None
    count = len(leaves) // 2
    leaves, places = leaves[:count], leaves[count:]
    held = sum(
        jax.numpy.prod(jax.numpy.array(s.shard_shape(a.shape))).item() for a, s in zip(leaves, places, strict=True)
    )
    assert rank_parameters(anatomy_of(run.model), shape.model) == held


def test_slots_of_stages_that_hold_no_layer_are_not_counted():
    sizes = {"family": "hybrid", "layer_pattern": "M*-M", "num_layers": 4, "ssm_heads": 8, "ssm_head_dim": 16}
    run = config.replace(config.load("gpt2-tiny"), mesh="2x1x1", **sizes)
    program = make_train_step(run, make_mesh(parse_mesh("2x1x1"), jax.devices()))
    step: Any = SimpleNamespace(program=program, config=run)
    assert verify.counted_parameters(step) == counts.parameters(anatomy_of(run.model))


def errors(report) -> dict[str, Check]:
    return {c.name: c for c in compare(report)}


@pytest.mark.parametrize("mesh", ["2x2", "data=2,context=2,model=1"])
def test_a_program_for_cpus_agrees_where_cpus_are_told(mesh):
    run = config.replace(config.load("gpt2-tiny"), num_layers=1, vocab_size=1024, mesh=mesh, hidden_dropout=0.0)
    run = config.replace(run, attention_dropout=0.0, compute_dtype="float32")  # CPUs send no other type
    checks = errors(inspect(run, find_target("cpu")))
    sent = [check for name, check in checks.items() if name.startswith("sent, ")]
    assert len(sent) == 2 and all(0 < check.program - 64 <= check.formula <= check.program for check in sent)  # scalars
    for name in ("parameters", "weights"):
        assert checks[name].formula == checks[name].program
    assert checks["optimizer"].error == pytest.approx(0, abs=1e-3)
    assert "step time" not in checks


def test_a_program_compiled_with_other_options_is_noted(monkeypatch):
    step = SimpleNamespace(note="it was compiled without a kernel", compile_seconds=1)
    report = SimpleNamespace(step=step, target=find_target("cpu"))
    monkeypatch.setattr(verify, "inspect", lambda *_: report)
    monkeypatch.setattr(verify, "compare", lambda _: [])
    out = StringIO()
    verify.print_verification(Console(file=out, width=140), config.load("gpt2-tiny"), "cpu")
    assert "note    it was compiled without a kernel\n" in out.getvalue()


rare = partial(pytest.param, marks=pytest.mark.exhaustive)
SMALL = {"num_layers": 6, "hidden_size": 512, "num_heads": 8, "sequence_length": 512, "global_batch_size": 32}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Masks double what a program takes to compile: GPT's and BERT's memory is compared with them, other cases without."""
PAIRS = [
    rare("1x1", {"global_batch_size": 8}),
    pytest.param("1x1", {"num_layers": 3, "global_batch_size": 8, "recompute": "none"}, marks=pytest.mark.exhaustive),
    rare("1x1", {"global_batch_size": 8, "recompute": "none"}),
    rare("1x1", {"global_batch_size": 8, "recompute": "none", "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    rare("2x4", {}),
    rare("2x4", {"recompute": "none"}),
    rare("2x4", {"recompute": "selective"}),
    rare("2x4", {"microbatch_size": 4}),
    rare("4x2", {"compute_dtype": "float32"}),
    ("4x2", {"num_layers": 3, "recompute": "none", "sequence_parallel": True, "zero": 3, **PLAIN}),
    rare("4x2", {"recompute": "none", "sequence_parallel": True, "zero": 3}),
    rare("8x1", {}),
    rare("1x8", {"recompute": "none"}),
    rare("1x1", {"global_batch_size": 8, "recompute": "none", "unroll_layers": True}),
    ("2x4", {"num_layers": 3, "microbatch_size": 4, "recompute": "none", "unroll_layers": True, "zero": 1, **PLAIN}),
    rare("2x4", {"microbatch_size": 4, "recompute": "none", "unroll_layers": True, "zero": 1, **PLAIN}),
]


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize(("mesh", "changes"), PAIRS, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)))
def test_compiled_memory_is_as_planned(mesh, changes):
    run = config.replace(config.load("gpt2-small"), **{**SMALL, "microbatch_size": None, "attention": "xla", **changes})
    report = inspect(config.replace(run, mesh=mesh), find_target("h100x8"))
    checks = errors(report)
    assert checks["weights"].error == 0
    assert checks["optimizer"].error == pytest.approx(0, abs=1e-6)
    assert checks["FLOPs of a step"].error == pytest.approx(0, abs=1e-3)
    assert checks["peak"].error == pytest.approx(0, abs=0.06), checks
    planned = memory.stage_memory(report.step.anatomy, report.step.plan)
    assert planned.weights + planned.optimizer == pytest.approx(report.memory.arguments, rel=0.01)
    for name in ("sent, tensor parallel", "sent, data parallel"):
        assert name not in checks or checks[name].error == pytest.approx(0, abs=0.01)


@pytest.mark.aot
@pytest.mark.long
def test_compiled_memory_beside_a_teacher_is_as_planned():
    settings = SMALL | {"num_layers": 2, "microbatch_size": None, "attention": "xla", "recompute": "none", **PLAIN}
    settings |= {"unroll_layers": False}
    taught = {"teacher": "a test", "teacher_width": 1024, "mesh": "2x4"}
    report = inspect(config.replace(config.load("gpt2-small"), **settings, **taught), find_target("h100x8"))
    checks = errors(report)
    assert checks["FLOPs of a step"].error == pytest.approx(0, abs=1e-3)
    assert checks["peak"].error == pytest.approx(0, abs=0.05), checks
    assert checks["sent, tensor parallel"].error == pytest.approx(0, abs=0.01)
    planned = report.memory.formula
    assert planned.weights + planned.optimizer + planned.teacher == pytest.approx(report.memory.arguments, rel=0.01)


SHIPPED = [
    pytest.param("bert-base", {}, marks=pytest.mark.exhaustive),
    rare("bert-336m", {}),
    ("t5-small", {"num_layers": 2, "num_decoder_layers": 2, **PLAIN}),
    rare("t5-small", PLAIN),
    rare("t5-base", {}),
    rare("gpt2-small", {"mesh": "1x1", "global_batch_size": 8, "microbatch_size": None, "recompute": "none"}),
    rare("gpt2-355m", {"mesh": "2x4", "global_batch_size": 16, "microbatch_size": None, "recompute": "none", **PLAIN}),
]


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize(("name", "changes"), SHIPPED, ids=lambda x: x if isinstance(x, str) else "")
def test_compiled_memory_of_a_preset_is_as_planned(name, changes):
    run = config.replace(config.load(name), attention="xla", **changes)
    checks = errors(inspect(run, find_target("h100x8")))
    assert checks["weights"].error == 0
    assert checks["peak"].error == pytest.approx(0, abs=0.05), checks


UNLIKE_GPT = SMALL | PLAIN | {"family": "llama", "num_layers": 2, "global_batch_size": 8, "attention": "xla"}
UNLIKE_GPT |= {"microbatch_size": None, "unroll_layers": False, "recompute": "none", "vocab_size": 32_000}
SPLIT = {"mesh": "1x2", "recompute": "full", "sequence_parallel": True}
LATENT = {"kv_lora_rank": 128, "q_lora_rank": 192, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
NARROW = {"mesh": "1x2x2", "recompute": "full", "microbatch_size": 2, "hidden_size": 256, "vocab_size": 2000}
UMT5 = {"family": "t5", "relative_bias_layers": "all", "num_decoder_layers": 2, "decoder_sequence_length": 256}
OTHERS = {
    "latent attention": LATENT | SPLIT,
    "latent attention, adapters, stages of one layer": LATENT | NARROW | {"lora_rank": 8},
    "multi-token prediction": {"mtp_num_layers": 1},
    "multi-token prediction, split sequences": {"mtp_num_layers": 2} | SPLIT,
    "latent attention without recompute": LATENT,
    "a relative bias in each layer": UMT5,
}


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize("name", [*map(rare, OTHERS)])
def test_compiled_memory_of_other_layers_is_as_planned(name):
    """Of untied tables, whose gradient comes last, and of single layers, which no loop copies."""
    run = config.replace(config.Config(), **{"mesh": "1x1", **UNLIKE_GPT, **OTHERS[name]})
    checks = errors(inspect(run, find_target("h100x8")))
    assert checks["FLOPs of a step"].error == pytest.approx(0, abs=1e-3)
    assert checks["peak"].error == pytest.approx(0, abs=0.05), checks


HYBRID = PLAIN | {"family": "hybrid", "hidden_size": 512, "num_heads": 8, "sequence_length": 1024, "vocab_size": 4096}
HYBRID |= {"global_batch_size": 8, "microbatch_size": 2, "mesh": "1x1", "recompute": "full", "unroll_layers": False}
HYBRID |= {"attention": "auto" if has_cudnn else "xla"}
SHARED = {"activation": "geglu_exact", "position": "rope", "head_dim": 128, "block_rank": 64}
SHARED |= {"block_attention_adapters": True, "tie_embeddings": True}
PATTERNS = {
    "(M)x4": {},
    "(G)x4": {},
    "(MMZ)x2": SHARED,
    "(H-)x3": {"mesh": "2x4", "sequence_parallel": True, "zero": 1},
    "(G-)x3": {"mesh": "2x4", "sequence_parallel": True, "zero": 1, "recompute": "none"},
    "(M-M*)x2": {"mesh": "2x4", "sequence_parallel": True, "zero": 1, "hidden_size": 1024},
}


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize("pattern", [next(iter(PATTERNS)), *map(rare, [*PATTERNS][1:])])
def test_compiled_memory_of_a_pattern_is_as_planned(pattern):
    run = config.replace(config.Config(), **HYBRID, **{"layer_pattern": pattern, **PATTERNS[pattern]})
    checks = errors(inspect(run, find_target("h100x8")))
    assert checks["FLOPs of a step"].error == pytest.approx(0, abs=2e-3)
    assert checks["peak"].error == pytest.approx(0, abs=0.05), checks


WIDE = HYBRID | {"layer_pattern": "(*-)x4", "hidden_size": 4096, "num_heads": 32, "sequence_length": 4096}
WIDE |= {"mesh": "16x8", "sequence_parallel": True, "zero": 3, "vocab_size": 1024, "loss_chunk": 32, "attention": "xla"}
WIDE |= {"global_batch_size": 32, "microbatch_size": 1, "grad_reduce_dtype": "bfloat16"}
ALONE = {"mesh": "32x1", "sequence_parallel": False, "hidden_size": 2048, "num_heads": 16, "global_batch_size": 64}
PREFETCHED = [{}, *map(rare, [{"recompute": "selective"}, {"microbatch_size": 2, "global_batch_size": 64}, ALONE])]


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize("changes", PREFETCHED, ids=lambda changes: next(iter(changes), "full"))
def test_compiled_memory_of_layers_that_prefetch_for_others_is_as_planned(changes):
    """Beside tensor parallelism and without: what neighbours saved, gathered and send is alive at the peak, or free."""
    checks = errors(inspect(config.replace(config.Config(), **WIDE | changes), find_target("h100x8")))
    assert checks["peak"].error == pytest.approx(0, abs=0.02), checks


RECORDED = [  # peaks of XLA's buffer assignment: docs/notes/memory.md
    ({}, 788.8e6),
    ({"recompute": "selective"}, 855.9e6),
    ({"microbatch_size": 2, "global_batch_size": 64}, 1428.9e6),
    (ALONE, 3211.0e6),
]


@pytest.mark.parametrize(
    ("changes", "peak"), RECORDED, ids=("full", "selective", "two samples", "no tensor parallelism")
)
def test_memory_of_layers_that_prefetch_for_others_is_that_of_recorded_programs(changes, peak):
    run = config.replace(config.Config(), **WIDE | changes)
    assert memory.stage_memory(*theory_of(run)).total == pytest.approx(peak, rel=0.01)


STAGED = {"num_layers": 8, "global_batch_size": 32, "microbatch_size": 1, "zero": 1}
TIMED = [
    (
        "llama3-8b",
        "data=2,stage=2,model=1",
        {"pipeline_schedule": "interleaved", "chunks": 4, "recompute": "full", "sequence_length": 4096},
    ),
    pytest.param(
        "llama3-8b",
        "data=1,stage=4,model=2",
        {"pipeline_schedule": "gpipe", "sequence_parallel": True},
        marks=[pytest.mark.exhaustive, pytest.mark.skipif(not has_cudnn, reason="needs the extra aot-cudnn")],
    ),
    ("mixtral-8x7b", "8x1", {"num_layers": 2, "recompute": "full", "zero": 3, "microbatch_size": 4}),
]


@pytest.mark.aot
@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "changes"), TIMED, ids=lambda x: x if isinstance(x, str) else "")
def test_step_time_is_that_of_the_compiled_program(name, mesh, changes):
    """Within 15%: of pipelines, whose losses are computed once a microbatch, and of experts, whose products are
    computed in blocks."""
    attention = "auto" if has_cudnn else "xla"
    run = config.replace(config.load(name), **{**STAGED, "mesh": mesh, "attention": attention, **changes})
    report = inspect(run, find_target("h100x8"))
    assert report.verdict.holds
    assert errors(report)["step time"].error == pytest.approx(0, abs=0.15)
    assert errors(report)["FLOPs of a step"].error == pytest.approx(0, abs=0.02)
