"""Predicted time of a step, with its exposed communication."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.analysis import flops as formulas
from mtjax.analysis.accuracy import accuracy_on
from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_PHASES
from mtjax.analysis.hardware import Server
from mtjax.analysis.optimizer import exposed_host_bytes
from mtjax.analysis.timing import step_time
from mtjax.config.sizes import layers_with_prediction, windowed_layers
from mtjax.config.ssm import ATTENTION, numbers_of
from mtjax.inspect.causes import Causes, memory_bound_by_cause
from mtjax.inspect.collectives import Collective
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.kernels.audit import KernelReport, audit
from mtjax.inspect.kinds import KindTime, time_of_kinds
from mtjax.inspect.roofline import Event, Roofline, Spent
from mtjax.runtime.xla_options import MULTI_STREAMING


@dataclass(frozen=True)
class TimeReport:
    """A predicted step."""

    server: Server
    seconds: float
    products: float
    """Seconds of compute-bound operations: matmuls."""
    memory_bound: float
    """Seconds of memory-bound operations."""
    exposed: float
    """Seconds of exposed communication: a device waits for a collective."""
    hidden: float
    """Seconds of communication that computation overlaps with."""
    contention: float
    """Seconds that overlapped collectives slow computation down."""
    exposed_by_axes: Mapping[str, float]
    hidden_by_axes: Mapping[str, float]
    phases: Mapping[str, Spent]
    causes: Causes
    """The memory-bound seconds by phase and cause."""
    tflops: float
    """Model FLOPs (recompute not counted) per device and second, in tera."""
    hardware_tflops: float
    """FLOPs of the program's matmuls per device and second, in tera."""
    mfu: float
    """Model FLOPs over the peak; attention counted in full."""
    hfu: float
    """FLOPs of the program over the peak."""
    by_plan: float
    """Seconds by the planner's formulas: kernels of the model, and copies in layer loops."""
    copies_by_plan: float
    """Seconds of the copies among them."""
    between: tuple[float, float]
    """Range of seconds by the errors on published runs."""
    layers: Mapping[str, tuple[Event, ...]]
    """Timeline of one layer's forward and one layer's backward pass (with its recompute)."""
    kinds: Mapping[str, KindTime]
    """Computing time of each kind of layers, where there are several."""
    roofline: Roofline
    """What was walked, with the clocks and streams of this program."""
    copying: float = 0.0
    """Seconds of exposed copies of offloaded states from and to the host's memory."""
    kernels: KernelReport | None = None
    """What the kernels' machine code does, where it was read; the seconds above then include it."""

    @property
    def exposed_share(self) -> float:
        """Share of the step that is exposed communication."""
        return self.exposed / self.seconds


def predict(
    step: CompiledStep, collectives: Sequence[Collective], flops: int, server: Server, dumped: Path | None = None
) -> TimeReport:
    """Simulates the compiled step on the GPUs of `server`.

    Args:
      step: a program for GPUs.
      collectives: all of its collectives.
      flops: of its matmuls, on one device.
      server: the hardware; may differ from that compiled for.
      dumped: folder to which XLA wrote the program's kernels, if they are to be read.
    """
    side_by_side = bool(step.program.xla.options.get(MULTI_STREAMING))
    model = step.config.model
    # Of hybrid models only those with attention.
    numbers = numbers_of(model, ATTENTION) or layers_with_prediction(model)
    windowed = sum(windowed_layers(model)[number] for number in numbers) / len(numbers)
    roofline = Roofline(step.module, list(collectives), server, side_by_side=side_by_side, windowed=windowed)
    kernels = audit(step, roofline, dumped) if dumped else None
    walked = roofline.run()
    total = Spent()
    for spent in walked.phases.values():
        total.add(spent)
    config = step.config
    model_flops = formulas.model_flops(step.anatomy) * config.training.global_batch_size / step.mesh.size
    by_plan = step_time(step.anatomy, step.plan, server)
    # By formula: copies to the host are on neither clock of the walk.
    copying = exposed_host_bytes(step.anatomy, step.plan) / roofline.machines[2].host_bandwidth
    seconds = walked.seconds + copying
    peak = roofline.machines[4 if config.training.compute_dtype == "float32" else 2].peak
    return TimeReport(
        server=server,
        seconds=seconds,
        copying=copying,
        products=total.products,
        memory_bound=total.memory_bound,
        exposed=total.exposed,
        hidden=total.hidden,
        contention=total.contention,
        by_plan=by_plan.total,
        copies_by_plan=by_plan.copies,
        between=accuracy_on(server).around(seconds),
        exposed_by_axes={axes: spent.exposed for axes, spent in walked.by_axes.items()},
        hidden_by_axes={axes: spent.hidden for axes, spent in walked.by_axes.items()},
        phases=dict(walked.phases),
        causes=memory_bound_by_cause(roofline),
        tflops=model_flops / seconds / 1e12,
        hardware_tflops=flops / seconds / 1e12,
        mfu=model_flops / seconds / peak,
        hfu=flops / seconds / peak,
        layers=layer_timelines(roofline),
        kinds=time_of_kinds(roofline, step.anatomy.stacks, step.plan),
        roofline=roofline,
        kernels=kernels,
    )


def layer_timelines(roofline: Roofline) -> dict[str, tuple[Event, ...]]:
    """Returns the events of the loop bodies that are a layer's forward and backward pass."""
    slowest: dict[str, tuple[float, tuple[Event, ...]]] = {}
    for walked in roofline.walked.values():
        times = {phase: walked.phases[phase].total for phase in LAYER_PHASES if phase in walked.phases}
        inside = any(event.label.startswith("while") for event in walked.events)
        # A layer's body has no loop in it, and does hardly anything but the layer: pipelines' ticks and microbatches'
        # loops are left out.
        if not times or inside or sum(times.values()) < 0.5 * walked.seconds:
            continue
        # With recompute the body has both, and is the backward pass.
        name = LAYER_BACKWARD if LAYER_BACKWARD in times else LAYER_FORWARD
        if walked.seconds > slowest.get(name, (0.0, ()))[0]:
            slowest[name] = (walked.seconds, tuple(walked.events))
    return {name: events for name, (_, events) in slowest.items()}
