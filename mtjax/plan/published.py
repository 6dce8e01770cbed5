"""Published runs, and the planner's predictions of them.

No constant is chosen per point or after looking at a gap. What a source does not state is assumed once, for all its
points, and documented here.
"""

from dataclasses import dataclass, replace

from mtjax.analysis.anatomy import Anatomy, gpt
from mtjax.analysis.flops import hardware_flops, model_flops
from mtjax.analysis.hardware import DGX_2H, DGX_A100_80, DGX_H100, Server
from mtjax.analysis.machine import Constants
from mtjax.analysis.memory import peak_stage_memory
from mtjax.analysis.software import COMPOSER, MEGATRON_2019, MEGATRON_2021, MEGATRON_CORE, Software
from mtjax.analysis.timing import step_time
from mtjax.layout.divisibility import problems
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.layout.layouts import TENSOR_RULES
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import MEGATRON_BF16, MEGATRON_FP16, Plan, Recompute
from mtjax.plan.search import chunk_counts


@dataclass(frozen=True)
class Point:
    """A published speed and its prediction."""

    name: str
    plan: Plan
    published: float
    predicted: float

    @property
    def gap(self) -> float:
        """Predicted minus published."""
        return self.predicted - self.published


FIGURE_5_BASE = 39.0
"""TFLOP/s that one V100 sustains on the 1.2B model (section 5 of arXiv 1909.08053)."""

# Layers, width, heads and tensor parallel degree; weak scaling without and with 64 data parallel ranks.
_TABLE_1 = [(40, 1536, 16, 1), (54, 1920, 20, 2), (64, 2304, 24, 4), (72, 3072, 32, 8)]
_MODEL_ONLY = (1.00, 0.95, 0.82, 0.77)
_WITH_DATA = (0.96, 0.83, 0.79, 0.74)


def figure_5(constants: Constants | None = None) -> list[Point]:
    """Predicts the weak scaling of Table 1, relative to one GPU on the 1.2B model: tensor parallelism alone, then with
    data parallel degree 64.

    As the paper: microbatch 8, full recompute, dropout, float16, gradients reduced once. Padded vocabulary 51,200.
    """
    anatomies = [gpt(layers, h, a, 1024, 51_200) for layers, h, a, _ in _TABLE_1]
    one = Plan(MeshShape(), 8, 8, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
    plans = [replace(one, mesh=MeshShape(model=t)) for *_, t in _TABLE_1]
    # Relative to the prediction of one GPU, as the paper's are to its measurement: an error that all points share
    # cancels.
    base = _speed(anatomies[0], plans[0], DGX_2H, MEGATRON_2019, constants)
    points = []
    for data, published in ((1, _MODEL_ONLY), (64, _WITH_DATA)):
        for anatomy, plan, share in zip(anatomies, plans, published, strict=True):
            scaled = replace(plan, mesh=replace(plan.mesh, data=data), global_batch_size=8 * data)
            speed = _speed(anatomy, scaled, DGX_2H, MEGATRON_2019, constants)
            points.append(Point(f"{scaled.mesh.size} GPUs", scaled, share, speed / base))
    return points


def figure_5_base(constants: Constants | None = None) -> Point:
    """Predicts the TFLOP/s of one GPU on the 1.2B model, recompute counted."""
    layers, h, a, _ = _TABLE_1[0]
    plan = Plan(MeshShape(), 8, 8, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
    speed = _speed(gpt(layers, h, a, 1024, 51_200), plan, DGX_2H, MEGATRON_2019, constants)
    return Point("1 GPU", plan, FIGURE_5_BASE, speed)


def figure_5_fixed_batch(constants: Constants | None = None) -> list[Point]:
    """Predicts the speed-up over one GPU of the 1.2B model with 8 samples on several (appendix D of 1909.08053)."""
    layers, h, a, _ = _TABLE_1[0]
    anatomy = gpt(layers, h, a, 1024, 51_200)
    one = Plan(MeshShape(), 8, 8, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
    base = _speed(anatomy, one, DGX_2H, MEGATRON_2019, constants)
    points = []
    for gpus, published in ((2, 1.64), (4, 2.34), (8, 2.98)):
        plan = replace(one, mesh=MeshShape(model=gpus))
        # The speed of all GPUs together: the paper's appendix has speed-ups, not efficiencies.
        speed = gpus * _speed(anatomy, plan, DGX_2H, MEGATRON_2019, constants) / base
        points.append(Point(f"8 samples on {gpus} GPUs", plan, published, speed))
    return points


def megatron_v1(constants: Constants | None = None) -> Point:
    """Predicts the TFLOP/s of one V100 on the 1.2B model by Megatron-LM 1.0 (nv-adlr.github.io/MegatronLMV1), with
    fused kernels. Held out: no constant was fitted to it or changed after it was read.
    """
    layers, h, a, _ = _TABLE_1[0]
    plan = Plan(MeshShape(), 8, 8, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
    speed = _speed(gpt(layers, h, a, 1024, 51_200), plan, DGX_2H, MEGATRON_2021, constants)
    return Point("1 GPU, Megatron-LM 1.0", plan, 62.4, speed)


@dataclass(frozen=True)
class PublishedRun:
    """A row of a published weak-scaling table."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    mesh: MeshShape
    global_batch_size: int
    tflops: float
    """Per GPU."""

    @property
    def splits_layers(self) -> bool:
        """Whether it has tensor parallelism."""
        return self.mesh.degree(TENSOR_RULES.heads) > 1


A100 = (
    PublishedRun("1.7B", 24, 2304, 24, parse_mesh("32x1x1"), 512, 137.0),
    PublishedRun("3.6B", 30, 3072, 32, parse_mesh("32x1x2"), 512, 138.0),
    PublishedRun("7.5B", 36, 4096, 32, parse_mesh("32x1x4"), 512, 142.0),
    PublishedRun("18.4B", 40, 6144, 48, parse_mesh("32x1x8"), 1024, 135.0),
    PublishedRun("39.1B", 48, 8192, 64, parse_mesh("32x2x8"), 1536, 138.0),
    PublishedRun("76.1B", 60, 10240, 80, parse_mesh("32x4x8"), 1792, 140.0),
    PublishedRun("145.6B", 80, 12288, 96, parse_mesh("24x8x8"), 2304, 148.0),
    PublishedRun("310.1B", 96, 16384, 128, parse_mesh("15x16x8"), 2160, 155.0),
    PublishedRun("529.6B", 105, 20480, 128, parse_mesh("9x35x8"), 2520, 163.0),
    PublishedRun("1008B", 128, 25600, 160, parse_mesh("6x64x8"), 3072, 163.0),
)
"""Table 1 of arXiv 2104.04473."""
_H100 = (
    PublishedRun("1.7B", 24, 2048, 16, parse_mesh("48x1x1"), 192, 409.0),
    PublishedRun("7.1B", 30, 4096, 32, parse_mesh("48x1x2"), 192, 466.0),
    PublishedRun("16B", 32, 6144, 48, parse_mesh("48x1x4"), 192, 489.0),
    PublishedRun("70B", 84, 8192, 64, parse_mesh("48x2x8"), 384, 420.0),
    PublishedRun("177B", 96, 12288, 96, parse_mesh("48x6x8"), 1152, 433.0),
)


def a100_weak_scaling(constants: Constants | None = None) -> list[Point]:
    """Predicts Table 1 of arXiv 2104.04473, TFLOP/s per GPU, recompute counted; `Constants.training` is fitted to it.

    Sequence 2048, padded vocabulary 51,200, full recompute, scores written out, float16. Microbatch size and chunks per
    stage are not in the table: we assume those that fit 90% of the memory and are fastest by this model.
    """
    points = []
    for run in A100:
        anatomy = gpt(run.num_layers, run.hidden_size, run.num_heads, 2048, 51_200)
        # The microbatch of 1 is replaced by the fastest that fits.
        plan = Plan(run.mesh, run.global_batch_size, 1, recompute="full", precision=MEGATRON_FP16, residuals="megatron")
        best = _fastest(anatomy, plan, (1, 2, 4, 8, 16), DGX_A100_80, MEGATRON_2021, constants)
        points.append(Point(run.name, best, run.tflops, _speed(anatomy, best, DGX_A100_80, MEGATRON_2021, constants)))
    return points


def h100_weak_scaling(constants: Constants | None = None) -> list[Point]:
    """Predicts Megatron-Core, TFLOP/s per GPU: sequence 4096, vocabulary 131,072, untied output, full attention.

    Microbatch size and chunks per stage were not published: we assume those that fit 90% of the memory and are fastest
    by this model. Also assumed: no recompute, no dropout, flash attention, sequence parallelism, ZeRO-1.
    """
    points = []
    for run in _H100:
        anatomy = gpt(run.num_layers, run.hidden_size, run.num_heads, 4096, 131_072, tied_embeddings=False)
        plan = Plan(
            run.mesh,
            run.global_batch_size,
            1,
            sequence_parallel=run.splits_layers,
            zero=1,
            flash_attention=True,
            dropout=False,
            precision=MEGATRON_BF16,
            residuals="megatron",
        )
        best = _fastest(anatomy, plan, (1, 2, 4), DGX_H100, MEGATRON_CORE, constants)
        points.append(Point(run.name, best, run.tflops, _speed(anatomy, best, DGX_H100, MEGATRON_CORE, constants)))
    return points


@dataclass(frozen=True)
class Shape:
    """A model of a table whose rows repeat it."""

    num_layers: int
    hidden_size: int
    num_heads: int


_MPT = {
    "760m": Shape(24, 1536, 12),
    "1b": Shape(24, 2048, 16),
    "3b": Shape(32, 2560, 20),
    "7b": Shape(32, 4096, 32),
    "13b": Shape(40, 5120, 40),
    "30b": Shape(48, 7168, 56),
    "70b": Shape(80, 8192, 64),
}
_COMPOSER: tuple[tuple[str, int, int, int, Recompute, float], ...] = (
    *(("760m", 8, 24, 384, "none", 345.3), ("760m", 16, 24, 384, "none", 374.9), ("760m", 32, 24, 768, "none", 371.7)),
    *(("1b", 8, 14, 112, "none", 413.8), ("1b", 16, 20, 320, "none", 419.1), ("1b", 32, 20, 640, "none", 410.9)),
    *(("1b", 64, 20, 1280, "none", 404.2), ("3b", 16, 10, 480, "none", 432.7), ("3b", 32, 6, 576, "none", 412.7)),
    *(("3b", 64, 6, 1152, "none", 403.8), ("7b", 8, 6, 48, "none", 459.5), ("13b", 8, 2, 16, "none", 393.7)),
    *(("13b", 16, 2, 32, "none", 391.7), ("13b", 32, 2, 64, "none", 395.3), ("13b", 64, 2, 128, "none", 394.4)),
    *(("30b", 8, 3, 504, "full", 377.1), ("30b", 16, 10, 480, "full", 426.2), ("30b", 32, 14, 1344, "full", 434.6)),
    *(("70b", 32, 2, 1024, "full", 357.7), ("70b", 64, 8, 2048, "full", 421.3)),
)
"""Model, GPUs, microbatch, global batch, recompute, model TFLOP/s per GPU."""


def composer_h100(constants: Constants | None = None) -> list[Point]:
    """Predicts MosaicML's benchmarks of MPT on H100, all rows of 2,048 tokens: model TFLOP/s per GPU, full attention.

    Held out: no constant was fitted to them or changed after they were read. FSDP is ZeRO-3; assumed are the network of
    a DGX H100, and unfused kernels. Padded vocabulary 50,368.
    """
    points = []
    for name, gpus, microbatch, batch, recompute, tflops in _COMPOSER:
        shape = _MPT[name]
        anatomy = gpt(shape.num_layers, shape.hidden_size, shape.num_heads, 2048, 50_368)
        plan = Plan(
            MeshShape(data=gpus),
            batch,
            microbatch,
            recompute=recompute,
            zero=3,
            flash_attention=True,
            dropout=False,
            precision=MEGATRON_BF16,
            residuals="megatron",
        )
        time = step_time(anatomy, plan, DGX_H100, COMPOSER, constants).total
        points.append(Point(f"{name} on {gpus}", plan, tflops, model_flops(anatomy) * batch / time / gpus / 1e12))
    return points


def _fastest(
    anatomy: Anatomy,
    plan: Plan,
    microbatches: tuple[int, ...],
    server: Server,
    software: Software,
    constants: Constants | None,
) -> Plan:
    """Returns the plan with the fastest microbatch size and chunks that fit."""
    variants = [
        replace(plan, microbatch_size=b, chunks=v, pipeline_schedule="interleaved" if v > 1 else "1f1b")
        for b in microbatches
        for v in chunk_counts(anatomy, plan.stages)
    ]
    fitting = [p for p in variants if _fits(anatomy, p, server)]
    return min(fitting, key=lambda p: step_time(anatomy, p, server, software, constants).total)


def _fits(anatomy: Anatomy, plan: Plan, server: Server) -> bool:
    """Returns whether a plan is possible and fits the memory."""
    if any(problems(anatomy.model, plan)):
        return False
    return peak_stage_memory(anatomy, plan).total <= USABLE_MEMORY * server.gpu.memory


def _speed(anatomy: Anatomy, plan: Plan, server: Server, software: Software, constants: Constants | None) -> float:
    """Predicts the TFLOP/s per GPU, recompute counted, as in the sources."""
    flops = hardware_flops(anatomy, plan.recompute) * plan.global_batch_size
    return flops / step_time(anatomy, plan, server, software, constants).total / plan.mesh.size / 1e12
