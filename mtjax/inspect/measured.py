"""Measured time of a step, from a trace of jax's profiler, compared with the prediction for the compiled program.

A trace has the name of the HLO instruction of each operation that a device ran; the compiled program has that
instruction's phase and, of a collective, its mesh axes. On GPUs the operations are the kernels on the streams of a
device, on CPUs the thunks of the host's threads; both have the same names and are read the same way.
"""

import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from mtjax import config as configs
from mtjax.analysis.contract import PHASES
from mtjax.config import Config
from mtjax.config.model_identity import differences
from mtjax.errors import UserError, first_line
from mtjax.inspect.collectives import computes
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo import Computation, Instruction, Module
from mtjax.inspect.hlo_walk import Site, walk
from mtjax.inspect.measured_kernels import InstructionWork, MeasuredKernel, Ran, by_kernel
from mtjax.inspect.phases import OTHER, locate
from mtjax.inspect.products import products_of
from mtjax.inspect.report import Report
from mtjax.layout.mesh import AUTO, parse_mesh

HOLDS_OTHERS = ("while", "call", "conditional")
"""Operations whose time is that of the operations inside them."""
RUNS_AS_ONE = ("fusion", "async-start")
"""Operations that are one in the program's schedule, with others inside."""
PRODUCTS, ATTENTION, MEMORY = "products", "attention", "memory-bound"
COLLECTIVES, NOTHING = "collectives", "nothing runs"
"""Causes of a step's time, keys of the JSON report: attention is fused kernels; collectives include overlapped ones."""
_SHARED_KERNEL = re.compile(r'deduplicated_name="([^"]*)"')
CUDA_GRAPH = "command_buffer"
"""How the names of CUDA graphs begin in a trace."""
UNKNOWN_SHARE = 0.02
"""Most of the time that operations may have that are not in the program."""
DECIDE = (
    *("pipeline_schedule", "chunks", "layers_per_stage", "sequence_parallel", "tensor_layout", "context_method"),
    *("expert_dispatch", "zero", "overlap", "offload", "grad_reduce_dtype", "global_batch_size", "microbatch_size"),
    *("compute_dtype", "recompute", "recompute_method", "recompute_num_layers", "recompute_offload", "unroll_layers"),
    *("loss_chunk", "deterministic", "fp8", "fp8_format", "fp8_scales", "fp8_bf16_first_layers"),
    *("fp8_bf16_last_layers", "attention", "hidden_dropout", "attention_dropout", "optimizer", "master_dtype"),
    *("adam_mu_dtype", "adam_nu_dtype", "qk_clip", "label_smoothing", "z_loss"),
)
"""Settings, in addition to the model's, that determine the program."""


@dataclass(frozen=True)
class Operation:
    """One run of an operation on a device."""

    name: str
    """Name of the HLO instruction."""
    device: str
    start: float
    """Seconds."""
    seconds: float


@dataclass
class Sent:
    """Seconds per step of collectives of one kind over the same axes in a phase."""

    count: int = 0
    measured: float = 0.0
    predicted: float | None = None
    """One after the other, overlapped or not; None where the hardware is not known."""


@dataclass
class InPhase:
    """Seconds per step in a phase."""

    computing: float = 0.0
    sending: float = 0.0
    predicted: float | None = None


@dataclass
class OfCause:
    """Seconds per step of a cause."""

    measured: float = 0.0
    predicted: float | None = None


@dataclass
class Measured:
    """Measured times of a step: means over steps and devices, in seconds."""

    trace: Path
    steps: int
    devices: int
    seconds: float
    """From the first operation of a step to the first of the next."""
    phases: dict[str, InPhase] = field(default_factory=dict)
    collectives: dict[tuple[str, str, tuple[str, ...] | None], Sent] = field(default_factory=dict)
    """By phase, kind and axes."""
    causes: dict[str, OfCause] = field(default_factory=dict)
    """By cause: matmuls, attention, memory-bound, collectives, idle."""
    kernels: tuple[MeasuredKernel, ...] = ()
    """By kernel, those whose prediction is off by most seconds first; no collectives, loops, calls or branches."""


def measure(report: Report, path: Path) -> Measured:
    """Compares a trace with a report.

    Args:
      report: on the program that was traced.
      path: of the trace, of the folder that `--profile` wrote, or of the run's folder.

    Raises:
      UserError: there is no trace, it can't be read, or it is of another program.
    """
    trace = find_trace(path)
    check_same_run(trace, report.config)
    operations = list(read_operations(trace, report.step.module.name))
    if not operations:
        raise UserError(f"{trace} has no operation of {report.step.module.name}: it is not a trace of training steps")
    # Before names are looked up: a matmul inside a fusion is known to the module, but its time is the fusion's.
    outer = outermost(report.step.module)
    operations = [replace(o, name=outer.get(o.name, o.name)) for o in operations]
    known = instructions(report.step)
    known |= inside_fusions(known, report.step, {o.name for o in operations})
    total = sum(o.seconds for o in operations)
    unknown = {o.name for o in operations if o.name not in known}
    if graphs := sorted(name for name in unknown if name.startswith(CUDA_GRAPH)):
        raise UserError(
            f"{trace} lacks the times of single operations: XLA ran some of them as CUDA graphs "
            f"({len(graphs)}, such as {graphs[0]}); trace with mtjax train --profile, which turns CUDA graphs off"
        )
    if sum(o.seconds for o in operations if o.name in unknown) > UNKNOWN_SHARE * total:
        raise UserError(
            f"{trace} is of another program: {min(unknown)} and {len(unknown) - 1} more operations are not in the one "
            "compiled here; inspect with the config.toml and the devices of the traced run"
        )
    devices, steps = len({o.device for o in operations}), count_steps(report.step, operations)
    measured = Measured(trace, steps, devices, step_seconds(operations, steps))
    predict_sent(report, measured)
    works = work_of(report)
    measured.causes.update(by_cause(report, works, operations, steps, devices))
    running = {name: work for name, work in works.items() if work.cause != NOTHING}
    measured.kernels = by_kernel(report.step, running, executions(operations, steps * devices))
    collectives = {c.name: c for c in report.collectives}
    for operation in operations:
        seconds = operation.seconds / steps / devices
        collective = collectives.get(operation.name)
        if collective is not None:
            in_phase = measured.phases.setdefault(collective.phase, InPhase())
            in_phase.sending += seconds
            measured.collectives[collective.phase, collective.kind, collective.axes].measured += seconds
        elif known.get(operation.name, ("", ""))[1] not in HOLDS_OTHERS:
            phase = known.get(operation.name, (OTHER, ""))[0]
            measured.phases.setdefault(phase, InPhase()).computing += seconds
    if report.time is not None:
        for phase, spent in report.time.phases.items():
            measured.phases.setdefault(phase, InPhase()).predicted = spent.total
    return measured


def work_of(report: Report) -> dict[str, InstructionWork]:
    """Returns what each operation that a device runs does, by its name; no collectives."""
    roofline = report.time.roofline if report.time else None
    module, sent = report.step.module, {c.name for c in report.collectives}
    found: dict[str, InstructionWork] = {}
    for site in scheduled(module):
        if site.instruction.name in sent:
            continue
        name, seconds = kind_of_work(module, site.computation, site.instruction), None
        if roofline and computes(site.instruction) and name != NOTHING:
            each, by_products = roofline.seconds(site.computation, site.instruction)
            name, seconds = name if by_products else MEMORY, site.count * each
        before = found.get(site.instruction.name)
        # A computation that several loops call has one instruction at several sites, and the trace adds their times up
        # under one name.
        if before is not None and before.predicted is not None:
            seconds = before.predicted + (seconds or 0.0)
        found[site.instruction.name] = InstructionWork(name, seconds)
    return found


def by_cause(
    report: Report, works: Mapping[str, InstructionWork], operations: Iterable[Operation], steps: int, devices: int
) -> dict[str, OfCause]:
    """Returns the measured time per step by cause, with the prediction where the hardware is known."""
    roofline, sent = report.time.roofline if report.time else None, {c.name for c in report.collectives}
    causes = {name: OfCause(predicted=0.0 if roofline else None) for name in (PRODUCTS, ATTENTION, MEMORY)}
    for work in works.values():
        if work.predicted is not None:
            causes[work.cause].predicted = (causes[work.cause].predicted or 0.0) + work.predicted
    if sent:
        each = [c.count * roofline.collective_seconds(c) for c in report.collectives] if roofline else []
        causes[COLLECTIVES] = OfCause(predicted=sum(each) if roofline else None)
    running: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for o in operations:
        name = COLLECTIVES if o.name in sent else works[o.name].cause if o.name in works else MEMORY
        if name != NOTHING:
            causes[name].measured += o.seconds / steps / devices
            running[o.device].append((o.start, o.start + o.seconds))
    idle = sum(gaps(spans) for spans in running.values()) / steps / devices
    causes[NOTHING] = OfCause(idle, 0.0 if roofline else None)
    return causes


def outermost(module: Module) -> dict[str, str]:
    """Returns for each operation inside one of the program's schedule, a fusion, the name of the latter.

    XLA: a matmul that reads a slice of an array is inside a fusion, and a trace has the matmul's name.
    """
    found: dict[str, str] = {}
    for site in walk(module):
        callers = (caller.instruction for caller in site.callers)
        if (outer := next((c for c in callers if c.opcode in RUNS_AS_ONE), None)) is not None:
            found.setdefault(site.instruction.name, outer.name)
    return found


def executions(operations: Iterable[Operation], times: int) -> dict[str, Ran]:
    """Returns how often and how long each operation ran in one of `times` steps of a device, by its name."""
    found: dict[str, Ran] = defaultdict(lambda: Ran(0.0, 0.0))
    for o in operations:
        launches, seconds = found[o.name]
        found[o.name] = Ran(launches + 1 / times, seconds + o.seconds / times)
    return found


def scheduled(module: Module) -> Iterator[Site]:
    """Yields the operations that a device runs: a fusion as one operation, a loop as those of its body."""
    for site in walk(module):
        called = [c.instruction for c in site.callers]
        is_condition = called and (called[-1].attribute("condition") or "").lstrip("%") == site.computation.name
        if not is_condition and all(c.opcode in HOLDS_OTHERS for c in called):
            yield site


def kind_of_work(module: Module, computation: Computation, instruction: Instruction) -> str:
    """Returns the cause of an operation: matmuls, attention or memory-bound; none for loops, calls and branches."""
    if instruction.opcode in HOLDS_OTHERS:
        return NOTHING
    products = products_of(module, computation, instruction)
    return ATTENTION if any(p.is_flash for p in products) else PRODUCTS if products else MEMORY


def gaps(spans: list[tuple[float, float]]) -> float:
    """Returns the idle seconds between the first start and the last end."""
    idle, until = 0.0, None
    for start, end in sorted(spans):
        idle += max(0.0, start - until) if until is not None else 0.0
        until = end if until is None else max(until, end)
    return idle


def predict_sent(report: Report, measured: Measured) -> None:
    """Adds all collectives of the program, with their predicted time."""
    roofline = report.time.roofline if report.time else None
    for c in report.collectives:
        sent = measured.collectives.setdefault((c.phase, c.kind, c.axes), Sent())
        sent.count += c.count
        if roofline is not None:
            sent.predicted = (sent.predicted or 0.0) + c.count * roofline.collective_seconds(c)


def find_trace(path: Path) -> Path:
    """Finds the newest `.xplane.pb` at or below a path.

    Raises:
      UserError: there is none.
    """
    if path.name.endswith(".trace.json.gz"):  # holds a part of what is in the file beside it
        path = path.parent
    found = [path] if path.is_file() else sorted(path.rglob("*.xplane.pb")) if path.is_dir() else []
    if not found:
        raise UserError(f"{path} has no trace of jax's profiler (.xplane.pb): mtjax train --profile 10:13 writes one")
    # A run's folder has a trace for each time it was profiled, and for each process.
    return max(found, key=lambda p: p.stat().st_mtime)


def check_same_run(trace: Path, config: Config) -> None:
    """Checks that the config of the run in whose folder a trace is, if any, compiles to the same program.

    Raises:
      UserError: names the settings that differ.
    """
    # RUN/profile/plugins/profile/DATE/HOST.xplane.pb.
    beside = next((p / "config.toml" for p in trace.parents[:5] if (p / "config.toml").is_file()), None)
    if beside is None:
        return
    theirs = configs.load(str(beside))
    sections = list(zip(vars(theirs).values(), vars(config).values(), strict=True))
    differing = differences(theirs.model, config.model)
    meshes = [theirs.parallel.mesh, config.parallel.mesh]
    if AUTO not in meshes and parse_mesh(meshes[0]) != parse_mesh(meshes[1]):
        differing.append(f"mesh is {meshes[0]} there and {meshes[1]} here")
    # Names of instructions prove nothing: XLA numbers those of all programs alike, such as fusion.12.
    for name in DECIDE:
        there, here = next((getattr(a, name), getattr(b, name)) for a, b in sections if hasattr(a, name))
        # What is left to be chosen (the kernel, the loop over layers) may have been chosen as the other one says.
        is_chosen = {None, AUTO} & {there, here} and name in ("attention", "unroll_layers")
        if there != here and not is_chosen:
            differing.append(f"{name} is {there} there and {here} here")
    if differing:
        raise UserError(f"{trace} is of another program: {'; '.join(differing)}; inspect with --config {beside}")


def read_operations(trace: Path, module: str) -> Iterator[Operation]:
    """Reads the operations of a program from a trace, of all devices.

    Raises:
      UserError: the file is not a trace.
    """
    try:
        planes = list(ProfileData.from_file(str(trace)).planes)
    except Exception as e:
        raise UserError(f"{trace} can't be read as a trace of jax's profiler: {first_line(e)}") from e
    gpus = [plane for plane in planes if plane.name.startswith("/device:")]
    # On CPUs operations run in the host's threads.
    for plane in gpus or planes:
        for line in plane.lines:
            if gpus and not line.name.startswith("Stream"):
                continue  # the same once more, grouped
            for event in line.events:
                stats: dict[str, Any] = dict(event.stats)
                if str(stats.get("hlo_module", "")).partition("(")[0] == module and "hlo_op" in stats:
                    # A plane is one GPU, but all virtual CPU devices share the host's plane.
                    device = f"{plane.name}/{stats.get('device_ordinal', 0)}"
                    yield Operation(str(stats["hlo_op"]), device, event.start_ns / 1e9, event.duration_ns / 1e9)


def instructions(step: CompiledStep) -> dict[str, tuple[str, str]]:
    """Returns the phase and operation of each instruction by its name."""
    return {
        i.name: (locate(computation, i)[0], i.opcode)
        for computation in step.module.computations.values()
        for i in computation.instructions
    }


def inside_fusions(
    known: dict[str, tuple[str, str]], step: CompiledStep, names: set[str]
) -> dict[str, tuple[str, str]]:
    """Returns the phase and operation of what asynchronous fusions run, by its name in a trace.

    XLA: the text of a program has the names of such a fusion's start and of an operation with the same kernel
    (`deduplicated_name`), but not of the operation itself, which differs from the latter in its number. Operations with
    the same kernel in several phases are counted in the first.
    """
    starts: dict[str, tuple[str, str]] = {}
    for computation in step.module.computations.values():
        for i in computation.instructions:
            if shared := _SHARED_KERNEL.search(i.attributes):
                starts.setdefault(_unnumbered(shared[1]), known[i.name])
    return {name: starts[_unnumbered(name)] for name in names - known.keys() if _unnumbered(name) in starts}


def _unnumbered(name: str) -> str:
    return name.rpartition(".")[0] if name.rpartition(".")[2].isdigit() else name


def count_steps(step: CompiledStep, operations: Iterable[Operation]) -> int:
    """Returns the number of traced steps: how often a device ran most of the operations that a step runs once."""
    # The median: an operation at the edge of the traced window may be missing, or be there once more.
    once = {i.name for i in step.module.entry.instructions if i.opcode not in HOLDS_OTHERS}
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for operation in operations:
        if operation.name in once:
            counts[operation.device, operation.name] += 1
    return max(1, round(statistics.median(counts.values()))) if counts else 1


def step_seconds(operations: Iterable[Operation], steps: int) -> float:
    """Returns the mean time of a step on the device that was busy longest."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for o in operations:
        first[o.device] = min(first.get(o.device, o.start), o.start)
        last[o.device] = max(last.get(o.device, 0.0), o.start + o.seconds)
    # From the first operation to the last, without the pause after the last step, in which the host launches the next.
    return max(last[device] - first[device] for device in first) / steps


def in_order(measured: Measured) -> list[tuple[str, InPhase]]:
    """Returns the phases in the order of a step."""
    known = {phase: order for order, phase in enumerate(PHASES)}
    return sorted(measured.phases.items(), key=lambda item: known.get(item[0], len(known)))
