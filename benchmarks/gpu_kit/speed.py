"""A model's training step: time and memory, measured and predicted, by cause."""

import tempfile
from pathlib import Path
from typing import Any

import jax

from gpu_kit.child import Child, next_tokens
from gpu_kit.clock import seconds_of
from gpu_kit.shapes import SHAPES, config_of
from mtjax.analysis.counts import parameters
from mtjax.analysis.flops import model_flops
from mtjax.analysis.timing import step_time
from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.inspect.compiled import compile_program
from mtjax.inspect.kernels.audit import check_kernels
from mtjax.inspect.measured import measure
from mtjax.inspect.report import Report, report
from mtjax.inspect.targets import Target, running_target
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.devices import attach_devices
from mtjax.runtime.xla_options import traced
from mtjax.sharding.global_batch import global_batch
from mtjax.train.observability.metrics import device_memory
from mtjax.train.step import TrainStep, make_train_step

TRACED = 3
"""Number of traced steps."""
KERNELS = 40
"""Number of kernels, those farthest from their prediction, that are kept."""


def run(child: Child, name: str, memory: float) -> dict[str, Any]:
    """Times the step of a shape on one GPU."""
    return time_run(config_of(SHAPES[name], memory, rehearse=child.rehearse), child)


def time_run(config: Config, child: Child, *, waits: bool = True) -> dict[str, Any]:
    """Compiles a step, waits for exclusive use of the GPU, times the step and traces it.

    Args:
      config: the run.
      child: gets the results before the trace, which may fail.
      waits: whether another process may be using the GPU.
    """
    mesh = attach_devices(parse_mesh(config.parallel.mesh))
    program = make_train_step(config, mesh)
    predicted = report(compile_program(program, running_target(mesh)))
    if waits:
        child.wait_for_turn()
    state, size = program.initialize(0), config.training.global_batch_size
    batch = global_batch(program.batch_sharding, next_tokens(config, 0), size)
    results: dict[str, Any] = {}

    def step() -> None:
        nonlocal state, results
        state, results = program.step(state, batch)

    found = describe(program.config, predicted) | seconds_of(step, lambda: jax.block_until_ready(results))
    found |= {"peak_bytes": (device_memory() or (None,))[0], "loss": float(results["loss"])}
    flops = model_flops(predicted.step.anatomy) * size / mesh.size
    found["tflops"] = flops / found["seconds"] / 1e12
    if predicted.time:
        peak = predicted.time.tflops / predicted.time.mfu
        found["mfu"] = found["tflops"] / peak
    child.answer(found)
    # Compiled again without CUDA graphs: a trace does not name the operations in them.
    program = make_train_step(config, mesh)
    program.xla = traced(program.xla, mesh.local_devices[0])
    predicted, why_not = with_kernels(program, running_target(mesh))
    found |= {"kernels_not_read": why_not} if why_not else {}
    step()
    return found | trace(step, lambda: jax.block_until_ready(results), predicted)


def with_kernels(program: TrainStep, target: Target) -> tuple[Report, str | None]:
    """Compiles a step; returns predictions that read its kernels, or others and why the kernels can't be read."""
    if target.server is None:
        return report(compile_program(program, target)), None
    try:
        check_kernels(target)
        with tempfile.TemporaryDirectory() as folder:
            return report(compile_program(program, target, Path(folder)), dumped=Path(folder)), None
    except UserError as e:
        return report(compile_program(program, target)), str(e)


def describe(config: Config, predicted: Report) -> dict[str, Any]:
    """Returns facts of the run, and predictions of `plan` and `inspect`; times are None for unknown hardware."""
    step, server = predicted.step, predicted.target.server
    by_plan = step_time(step.anatomy, step.plan, server) if server else None
    return {
        "parameters": parameters(step.anatomy),
        "mesh": str(step.mesh),
        "microbatch": step.plan.microbatch_size,
        "microbatches": step.plan.microbatches,
        "batch": config.training.global_batch_size,
        "sequence": config.model.sequence_length,
        "attention": "pallas" if step.plan.pallas_attention else "cudnn" if step.plan.flash_attention else "xla",
        "compile_seconds": step.compile_seconds,
        "predicted": {
            "plan_seconds": by_plan.total if by_plan else None,
            "inspect_seconds": predicted.time.seconds if predicted.time else None,
            "plan_bytes": predicted.memory.formula.total,
            "compiled_bytes": predicted.memory.peak,
        },
    }


def trace(step: Any, wait: Any, predicted: Report) -> dict[str, Any]:
    """Returns seconds of a step by cause and by phase, measured and predicted; an error if the trace can't be read."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(TRACED):
                step()
            wait()
        try:
            measured = measure(predicted, Path(folder))
        except UserError as e:
            return {"trace_error": str(e)}
    causes = {name: {"measured": c.measured, "predicted": c.predicted} for name, c in measured.causes.items()}
    phases = {n: {"measured": p.computing + p.sending, "predicted": p.predicted} for n, p in measured.phases.items()}
    kernels = [kernel.to_json() for kernel in measured.kernels[:KERNELS]]
    return {"traced_seconds": measured.seconds, "causes": causes, "phases": phases, "kernels": kernels}
