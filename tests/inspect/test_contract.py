"""The tensor layout's contract on compiled programs: operations and bytes for H100, elements for CPUs."""

import re
from dataclasses import replace

import pytest
from jax import lax

from mtjax import config
from mtjax.analysis.anatomy import anatomy_of
from mtjax.analysis.flops import compiled_flops
from mtjax.inspect.products import count_flops
from mtjax.inspect.report import Report, inspect, report
from mtjax.inspect.targets import find_target
from mtjax.layout import attention_kernel
from mtjax.layout.attention_kernel import spans_of
from mtjax.layout.layouts import NOT_SHARDED
from mtjax.layout.rules import DATA
from mtjax.sharding import param_comm as parameters
from tests.counted import rank_parameters
from tests.inspect.steps import has_cudnn, needs_aot, required_of, tiny

BSH = 2 * 64 * 64


def sent(report: Report, phase: str, axes: tuple[str, ...] = ("model",)) -> dict[tuple[str, int, str], int]:
    """(operation, elements, type) -> arrays in a step, of what is larger than scalars."""
    found: dict[tuple[str, int, str], int] = {}
    for c in report.collectives:
        for array in c.arrays:
            if c.phase == phase and c.axes == axes and array.elements > 16:
                key = (c.kind, array.elements, array.dtype)
                found[key] = found.get(key, 0) + c.count
    return found


@needs_aot
def test_figure_4_of_the_paper_on_h100(gpu_report):
    """Per layer and microbatch: two all-reduces forward, one recomputed, two backward; 3 layers, 2 microbatches."""
    assert gpu_report.verdict.violations == ()
    assert sent(gpu_report, "layer forward") == {("all-reduce", BSH, "bf16"): 12}
    assert sent(gpu_report, "layer recompute") == {("all-reduce", BSH, "bf16"): 6}
    assert sent(gpu_report, "layer backward") == {("all-reduce", BSH, "bf16"): 12}
    assert sent(gpu_report, "embedding forward") == {("all-reduce", BSH, "bf16"): 2}
    assert sent(gpu_report, "loss backward") == {("all-reduce", BSH, "bf16"): 2}
    assert sum(e * n for (_, e, _), n in sent(gpu_report, "loss forward").items()) == 3 * 2 * 64 * 2


@needs_aot
def test_no_recompute_and_one_microbatch_on_two_servers(two_servers_report):
    report, bsh = two_servers_report, 4 * 64 * 64
    assert report.verdict.violations == ()
    assert sent(report, "layer forward") == {("all-reduce", bsh, "bf16"): 6}
    assert sent(report, "layer recompute") == {}
    assert sent(report, "layer backward") == {("all-reduce", bsh, "bf16"): 6}
    crossing = {c.axes: c.servers for c in report.collectives}
    assert crossing[("model",)] == 1
    assert crossing[("data",)] == 2


@needs_aot
def test_data_parallel_sends_each_gradient_once_a_step(data_parallel_report):
    report = data_parallel_report
    assert report.verdict.violations == ()
    assert {c.axes for c in report.collectives} == {("data",)}
    gradients = sum(e * n for (_, e, _), n in sent(report, "gradients", ("data",)).items())
    scalars = gradients - rank_parameters(anatomy_of(report.config.model), 1)
    assert 0 <= scalars <= 2


def test_cpu_programs_keep_the_contract_in_elements(cpu_report):
    assert cpu_report.verdict.violations == ()
    assert sent(cpu_report, "layer forward") == {("all-reduce", BSH, "f32"): 12}
    assert sent(cpu_report, "layer recompute") == {("all-reduce", BSH, "f32"): 6}
    assert sent(cpu_report, "layer backward") == {("all-reduce", BSH, "f32"): 12}
    notes = {note for line in cpu_report.verdict.lines for note in line.notes}
    assert "f32 for bf16: converted by XLA for CPUs" in notes


@pytest.mark.parametrize(
    "settings",
    [
        {"label_smoothing": 0.1, "z_loss": 1e-4, "hidden_dropout": 0.1, "attention_dropout": 0.1, "loss_chunk": 100},
        *(
            pytest.param(settings, marks=pytest.mark.long)
            for settings in (
                {"mesh": "1x4", "recompute": "none", "microbatch_size": None},
                {"mesh": "8x1", "microbatch_size": 1, "compute_dtype": "float32"},
                {"mesh": "1x1"},
            )
        ),
    ],
)
def test_the_contract_holds_on_cpus_whatever_the_run(settings):
    report = inspect(tiny(num_layers=2, **settings), find_target("cpu"))
    assert report.verdict.violations == ()
    ways = report.step.mesh
    assert {axis for c in report.collectives for axis in c.axes or ("?",) if c.group_size > 1} == {
        axis for axis, n in (("data", ways.data), ("model", ways.model)) if n > 1
    }


def test_gradients_of_the_contract_are_the_parameters_of_a_rank():
    for ways in (1, 2, 4):
        run = tiny(mesh=f"2x{ways}")
        (line,) = (required for required in required_of(run) if required.line.phase == "gradients")
        assert line.elements == rank_parameters(anatomy_of(run.model), ways)


def test_axes_of_one_way_ask_for_nothing():
    assert required_of(tiny(mesh="1x1")) == []


ONE_MICROBATCH = {"sequence_parallel": True, "microbatch_size": None, "hidden_size": 1024}
"""Each layer's gradients are summed over `data` right after those of its norms are summed over `model`."""
GROUPS = {"num_layers": 4, "recompute_num_layers": 2}
SPLIT = [
    {"sequence_parallel": True},
    {"sequence_parallel": True, "zero": 1, "grad_reduce_dtype": "bfloat16"},
    {"zero": 2, "microbatch_size": None},
    {"zero": 3, "tensor_layout": "2d"},
    {"mesh": "data=2,shard=2,model=2", "sequence_parallel": True, "zero": 3, "global_batch_size": 16},
]


@pytest.mark.parametrize(
    "settings",
    [
        *SPLIT[:2],
        pytest.param(SPLIT[2], marks=pytest.mark.exhaustive),
        *(pytest.param(each, marks=pytest.mark.long) for each in SPLIT[3:]),
    ],
)
def test_split_sequences_and_zero_keep_their_contract_on_cpus(settings):
    report = inspect(tiny(num_layers=2, **settings), find_target("cpu"))
    assert report.verdict.violations == ()
    assert len(report.verdict.lines) > 5
    assert_gradients_have_their_type(report)


def assert_gradients_have_their_type(found: Report) -> None:
    """The contract of the other type is broken, and says by what."""
    kinds = ["float32", "bfloat16"]
    asked = found.config.parallel.grad_reduce_dtype
    other = kinds[1 - kinds.index(asked)]
    wrong = report(replace(found.step, config=config.replace(found.config, grad_reduce_dtype=other)))
    short = {"float32": "f32", "bfloat16": "bf16"}
    breaches = [v for v in wrong.verdict.violations if "over data in gradients" in v]
    verb = "sends" if found.target.is_gpu else "reduces"
    assert any(f"{verb} {short[asked]} instead of {short[other]}" in v for v in breaches), wrong.verdict.violations


def assert_scatters_add_rows(found: Report) -> None:
    """Every scatter adds to rows that are contiguous in memory: of the embedding's gradient, and of no bias."""
    scatters = re.findall(
        r"f32\[[\d,]+\]\{([\d,]+)\} scatter\(.*scatter_dims_to_operand_dims=\{(\d+)\}", found.step.text
    )
    assert scatters
    for layout, dimension in scatters:
        assert layout.split(",")[-1] == dimension, "the scattered dimension is the outermost"


@needs_aot
@pytest.mark.parametrize(
    "settings",
    [
        *(
            pytest.param(settings, marks=pytest.mark.long)
            for settings in (
                SPLIT[1],
                {"zero": 3, "tensor_layout": "2d", "family": "llama", "mlp_size": 96, "mesh": "data=2,shard=2,model=2"},
                {**ONE_MICROBATCH, "family": "llama", "mlp_size": 704},
            )
        ),
        *(
            pytest.param(settings, marks=pytest.mark.exhaustive)
            for settings in (
                SPLIT[0],
                *SPLIT[2:5],
                {"mesh": "data=2,shard=4", "zero": 1, "grad_reduce_dtype": "bfloat16", "microbatch_size": None},
                GROUPS | {"zero": 3, "sequence_parallel": True},
                {"sequence_parallel": True, "zero": 3},
                ONE_MICROBATCH,
                {**ONE_MICROBATCH, "family": "t5", "decoder_sequence_length": 32},
                {"zero": 1},
                {"zero": 3},
                GROUPS | {"zero": 3, "recompute_method": "block"},
            )
        ),
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_split_sequences_and_zero_keep_their_contract_on_h100(settings):
    """Operations, elements and types; nothing else crosses `data` or `model`."""
    report = inspect(tiny(**({"num_layers": 2} | settings)), find_target("h100x8"))
    assert report.verdict.violations == ()
    assert_gradients_have_their_type(report)
    if "tensor_layout" not in settings:  # 2D shards the width of the table's gradient, which XLA then transposes
        assert_scatters_add_rows(report)
    kinds = {c.kind for c in report.collectives}
    assert "all-to-all" not in kinds and "collective-permute" not in kinds
    if settings.get("sequence_parallel"):
        layers = sent(report, "layer forward") | sent(report, "layer backward")
        assert {kind for kind, elements, dtype in layers if elements >= BSH and dtype == "bf16"} == {
            "all-gather",
            "reduce-scatter",
        }
        layers = (c for c in report.collectives if c.axes == ("model",) and c.phase.startswith("layer"))
        streams = (a for c in layers for a in c.arrays if a.dtype == "bf16" and a.elements >= BSH)
        lengths = {64, settings.get("decoder_sequence_length", 64)}
        assert {a.dims[0] for a in streams} == lengths  # first, or XLA would transpose it for the products


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    "attention",
    [
        pytest.param("auto", marks=pytest.mark.skipif(not has_cudnn, reason="needs nvidia-cudnn-cu13")),
        pytest.param("xla", marks=pytest.mark.exhaustive if has_cudnn else ()),
    ],
)
def test_float16_keeps_the_contract_and_the_memory_of_bfloat16_on_h100(attention):
    """With cuDNN's attention and with XLA's; what the loss scale adds is a few scalars."""
    settings = {"num_layers": 2, "sequence_parallel": True, "zero": 1, "attention": attention}
    found, expected = (
        inspect(tiny(**settings, compute_dtype=kind), find_target("h100x8")) for kind in ("float16", "bfloat16")
    )
    assert found.verdict.violations == expected.verdict.violations == ()
    assert ("__cudnn$fmha" in found.step.text) == (attention == "auto")
    for phase in ("layer forward", "layer recompute", "layer backward"):
        kinds = {(kind, n): count for (kind, n, dtype), count in sent(found, phase).items() if dtype == "f16"}
        assert kinds == {
            (kind, n): count for (kind, n, dtype), count in sent(expected, phase).items() if dtype == "bf16"
        }
        assert kinds
    assert found.memory.peak == pytest.approx(expected.memory.peak, rel=1e-2)


needs_cudnn = pytest.mark.skipif(not has_cudnn, reason="needs nvidia-cudnn-cu13")


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.exhaustive), "full"])
def test_blocks_of_causal_attention_leave_out_the_keys_behind_their_span_on_h100(recompute, monkeypatch):
    """Four spans of two blocks each, whose FLOPs are 5/8 of those of all scores."""
    monkeypatch.setattr(attention_kernel, "SCORES_AT_A_TIME", 1)
    monkeypatch.setattr(attention_kernel, "LEAST_QUERIES_AT_A_TIME", 32)
    fields = {"attention": "blocks", "reset_attention_mask": True, "recompute": recompute, "sequence_length": 256}
    step = (report := inspect(tiny(**fields), find_target("h100x8"))).step
    assert report.verdict.violations == () and spans_of(256, 32) == 4
    formula = compiled_flops(step.anatomy, step.plan) * step.config.training.global_batch_size / step.mesh.size
    assert count_flops(step.module) == pytest.approx(formula, rel=1e-9)


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        pytest.param({"attention": "cudnn", "reset_attention_mask": True}, "cudnn", marks=needs_cudnn),
        pytest.param({"attention": "cudnn", "attention_window": 16, "window_layers": "SF"}, "cudnn", marks=needs_cudnn),
        pytest.param(
            {"attention": "cudnn", "head_dim": 256}, "cudnn", marks=[needs_cudnn, pytest.mark.exhaustive]
        ),  # of the cases above in everything but the size
        ({"attention": "blocks", "reset_attention_mask": True, "attention_window": 16}, "blocks"),
        (
            {"attention": "pallas", "family": "llama", "num_kv_heads": 2, "reset_attention_mask": True}
            | {"attention_dropout": 0.1},
            "pallas",
        ),
        pytest.param(
            {"attention": "pallas", "attention_dropout": 0.1, "recompute": "none"},
            "pallas",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_kernels_keep_the_contract_and_the_flops_of_theory_on_h100(fields, kernel):
    """Of a branch between two kernels, by the layer's window or by how many documents there are, one counts."""
    step = (report := inspect(tiny(**fields), find_target("h100x8"))).step
    assert report.verdict.violations == () and step.config.model.attention == kernel
    formula = compiled_flops(step.anatomy, step.plan) * step.config.training.global_batch_size / step.mesh.size
    assert count_flops(step.module) == pytest.approx(formula, rel=1e-9)


def test_a_gradient_reduced_whole_breaks_the_contract_of_zero(monkeypatch):
    monkeypatch.setattr(parameters, "reduce_gradient", whole_sum)
    report = inspect(tiny(num_layers=2, zero=2), find_target("cpu"))
    assert any("over data" in violation for violation in report.verdict.violations)


def whole_sum(gradient, place, total):
    """Like `parameters.reduce_gradient`, but sends everything to everyone first."""
    gathered = parameters.map_shards(lambda g: lax.psum(g, DATA), place)(gradient.astype("float32"))
    whole = parameters.map_shards(lambda g: lax.psum(g, DATA), place)(gathered / 2)
    if total.dim == NOT_SHARDED:
        return whole
    size = gradient.shape[total.dim] // 2
    return lax.pcast(lax.slice_in_dim(whole, 0, size, axis=total.dim), (DATA,), to="varying")


@needs_aot
@pytest.mark.long
@pytest.mark.parametrize("microbatch", [4, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_offloaded_layer_inputs_wait_in_the_hosts_memory(microbatch):
    """XLA's memory space 5 is the host's; the stack of layer inputs [12, b, 512, 256] moves there and back."""
    fields = {"mesh": "8x1", "zero": 3, "num_layers": 12, "hidden_size": 256, "sequence_length": 512}
    fields |= {"global_batch_size": 32, "microbatch_size": microbatch}
    kept, offloaded = (
        inspect(tiny(recompute_offload=offload, **fields), find_target("h100x8")) for offload in (False, True)
    )
    inputs = re.escape(f"bf16[12,{microbatch},512,256]") + r"\{[\d,]*:S\(5\)\}"
    assert re.search(inputs, offloaded.step.text) and not re.search(inputs, kept.step.text)
    freed = kept.memory.temporaries - offloaded.memory.temporaries
    assert freed > 0.99 * 12 * microbatch * 512 * 256 * 2  # but for a kilobyte
    assert offloaded.verdict.violations == ()
