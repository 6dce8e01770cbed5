"""Plots: memory by mesh, weak scaling with the paper's points, strong scaling with Amdahl's bound."""

from dataclasses import replace
from pathlib import Path

import matplotlib

# Before anything else of matplotlib: its default looks for a display.
matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.flops import amdahl_speedup
from mtjax.analysis.hardware import Server
from mtjax.analysis.memory import Memory, peak_stage_memory
from mtjax.analysis.timing import step_time
from mtjax.config.sizes import divisors
from mtjax.layout.divisibility import problems
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.plan import published
from mtjax.plan.options import Options


def draw(path: Path, anatomy: Anatomy, plan: Plan, server: Server, options: Options) -> None:
    """Writes all three plots to one file, atomically; its suffix determines the format."""
    figure = Figure(figsize=(17, 5.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    memory_by_mesh(left, anatomy, plan, server, options.usable)
    weak_scaling(middle)
    strong_scaling(right, anatomy, plan, server, options.serial_share)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=130)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def memory_parts(memory: Memory) -> dict[str, float]:
    """Returns GiB by component."""
    components = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "saved activations": memory.kept,
        "workspace of one layer": memory.working,
        "logits": memory.logits,
        **({"teacher": memory.teacher} if memory.teacher else {}),
    }
    return {name: size / 2**30 for name, size in components.items()}


def mesh_choices(anatomy: Anatomy, plan: Plan, server: Server) -> list[Plan]:
    """Returns the plan on every mesh of as many GPUs that fits, by tensor parallel degree; stages as planned."""
    gpus = plan.mesh.size // plan.stages
    choices = []
    for model in divisors(gpus):
        data = gpus // model
        if model > server.gpus or plan.global_batch_size % data:
            continue
        microbatch = min(plan.microbatch_size, plan.global_batch_size // data)
        # Ranks of all other axes become data parallel ones, so that bars differ in these three alone.
        mesh = MeshShape(data=data, stage=plan.stages, model=model)
        option = replace(plan, mesh=mesh, microbatch_size=microbatch)
        if not any(problems(anatomy.model, option)):
            choices.append(option)
    return choices


def memory_by_mesh(axes: Axes, anatomy: Anatomy, plan: Plan, server: Server, usable: float) -> None:
    """Plots the memory components, one stacked bar per mesh."""
    choices = mesh_choices(anatomy, plan, server) or [plan]
    names = [f"{p.data_degree}x{p.stages}x{p.tensor_degree}" for p in choices]
    parts = [memory_parts(peak_stage_memory(anatomy, p)) for p in choices]
    bottom = [0.0] * len(choices)
    for name in parts[0]:
        heights = [p[name] for p in parts]
        axes.bar(names, heights, bottom=bottom, label=name)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.axhline(usable * server.gpu.memory / 2**30, color="black", linestyle="--", label=f"{usable:.0%} of the GPU")
    axes.set(title=f"Memory per {server.gpu.name}, by formula", xlabel="mesh (data x stage x model)", ylabel="GiB")
    axes.tick_params(axis="x", rotation=40 if len(names) > 4 else 0)
    axes.legend(fontsize=8)


def weak_scaling(axes: Axes) -> None:
    """Plots Figure 5: the paper's points and the predictions."""
    points = published.figure_5()
    curves = ((points[:4], "tab:blue", "tensor parallel"), (points[4:], "tab:orange", "tensor x data parallel"))
    for curve, colour, name in curves:
        gpus = [p.plan.mesh.size for p in curve]
        axes.plot(gpus, [100 * p.published for p in curve], "o", color=colour, label=f"{name}: paper, measured")
        axes.plot(gpus, [100 * p.predicted for p in curve], "--", color=colour, label=f"{name}: predicted")
    axes.set_xscale("log", base=2)
    axes.set(title="Weak scaling, V100 (Figure 5)", xlabel="GPUs", ylabel="% of one GPU's speed", ylim=(0, 110))
    axes.legend(fontsize=8, loc="lower left")


def strong_scaling(axes: Axes, anatomy: Anatomy, plan: Plan, server: Server, serial_share: float) -> None:
    """Plots the speed-up over one replica at a fixed global batch size, with the ideal and Amdahl's bound."""
    # A replica has all ranks of a sharding group and of expert parallelism, which divide its batch.
    replica = plan.mesh.replica_shape
    counts = [d for d in divisors(plan.global_batch_size // replica.batch_degree) if d <= max(64, plan.data_degree)]
    times = []
    for data in counts:
        share = plan.global_batch_size // (data * replica.batch_degree)
        microbatch = min(plan.microbatch_size, share)
        while share % microbatch:
            microbatch -= 1
        option = replace(plan, mesh=replace(plan.mesh, data=data), microbatch_size=microbatch)
        times.append(step_time(anatomy, option, server).total)
    gpus = [d * replica.size for d in counts]
    axes.plot(gpus, [times[0] / t for t in times], "o-", label="predicted")
    axes.plot(gpus, counts, ":", color="grey", label="ideal")
    bound = [amdahl_speedup(serial_share, d) for d in counts]
    axes.plot(gpus, bound, "--", color="tab:red", label=f"Amdahl, {100 * serial_share:g}% serial")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    title = f"Strong scaling, global batch {plan.global_batch_size}, {replica.size} GPUs per replica"
    axes.set(title=title, xlabel="GPUs", ylabel="speed-up over one replica")
    axes.legend(fontsize=8)
