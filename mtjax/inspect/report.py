"""Report on a compiled step, which text, JSON and HTML show."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from jax.sharding import NamedSharding

from mtjax.analysis.communication import contract_of, symbols_of
from mtjax.analysis.contract import PHASES, Contract, Symbols, requirements
from mtjax.analysis.flops import compiled_flops
from mtjax.analysis.hardware import Server
from mtjax.analysis.parts.experts import exchanged_share
from mtjax.analysis.parts.heads import OutputProjectionPart
from mtjax.config import Config, Model
from mtjax.errors import UserError
from mtjax.inspect.check import Landmarks, Verdict, check
from mtjax.inspect.collectives import Collective, find_collectives
from mtjax.inspect.compiled import CompiledStep, compile_step
from mtjax.inspect.float8 import Float8Products, float8_products
from mtjax.inspect.hlo import Array
from mtjax.inspect.kernels.audit import why_unread
from mtjax.inspect.legacy_symbols import letters
from mtjax.inspect.memory import MemoryReport, argument_arrays, host_violations, memory_report
from mtjax.inspect.predict import TimeReport, predict
from mtjax.inspect.products import count_flops
from mtjax.inspect.stages import StagesReport, stages_report
from mtjax.inspect.targets import Target
from mtjax.sharding.param_specs import dotted


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives that differ only in their position in the program: one row of the table."""

    kind: str
    axes: tuple[str, ...] | None
    phase: str
    arrays: tuple[Array, ...]
    servers: int
    is_async: bool
    count: int
    """Executions in a step."""
    payload_bytes: int
    """Of one execution."""
    wire_bytes: float
    """Sent by a device in one execution."""
    hidden: int
    """Overlapped executions in a step: with computation between start and done."""
    op_name: str
    is_known: bool
    """Whether kind, axes and count are certain."""


@dataclass(frozen=True)
class Flops:
    """FLOPs of a step, all devices together."""

    counted: int
    """Of the matmuls in the program."""
    formula: float
    """By formula, for the matmuls that XLA does not remove."""

    @property
    def difference(self) -> float:
        """Relative difference of `counted` from `formula`."""
        return self.counted / self.formula - 1


@dataclass(frozen=True)
class Report:
    """Communication, memory, FLOPs and time of a compiled step."""

    step: CompiledStep
    symbols: Symbols
    """Symbols of the contract's formulas with their values, and the symbols of earlier versions."""
    contract: Contract
    collectives: tuple[Collective, ...]
    rows: tuple[CollectiveRow, ...]
    verdict: Verdict
    memory: MemoryReport
    flops: Flops
    time: TimeReport | None
    """None for CPUs, whose speed is not known."""
    stages: StagesReport | None
    """None without pipeline parallelism."""
    analysis_seconds: float
    float8: Float8Products | None = None
    """None without matmuls in 8 bits, and for CPUs."""
    unread: str | None = None
    """Why the kernels' machine code was not read, where it would be by default."""

    @property
    def config(self) -> Config:
        """The run."""
        return self.step.config

    @property
    def target(self) -> Target:
        """The devices that it is compiled for."""
        return self.step.target


def inspect(
    config: Config,
    target: Target,
    contract: Contract | None = None,
    time_on: Server | None = None,
    teacher: Model | None = None,
    *,
    kernels: bool | None = False,
) -> Report:
    """Compiles the train step of a config and reports on it.

    Args:
      config: the run, with its mesh.
      target: the devices.
      contract: expected collectives; the run's contract when None.
      time_on: servers for which time and memory are predicted, if not those compiled for (V100s, for which XLA no
        longer compiles).
      teacher: the model of the config's teacher, whose weights are in memory during the step.
      kernels: whether to read the machine code of the kernels; None where it can be read and takes no more than some
        seconds.

    Raises:
      UserError: config, mesh and target don't fit, or the contract can't be evaluated.
    """
    unread = why_unread(target) if kernels is None and target.server else None
    reads = unread is None and target.server is not None if kernels is None else kernels
    if not reads:
        return report(compile_step(config, target), contract, time_on, teacher, unread=unread)
    # Kernels of a step are hundreds of files, which are not needed once they are read.
    with TemporaryDirectory(prefix="mtjax-kernels-") as name:
        folder = Path(name)
        step = compile_step(config, target, folder)
        if kernels is None and (unread := why_unread(target, folder)):
            return report(step, contract, time_on, teacher, unread=unread)
        try:
            return report(step, contract, time_on, teacher, folder)
        except UserError as e:
            if kernels:
                raise
            # Kernels that can't be read are an error only where the user asked for them.
            return report(step, contract, time_on, teacher, unread=str(e))


def report(
    step: CompiledStep,
    contract: Contract | None = None,
    time_on: Server | None = None,
    teacher: Model | None = None,
    dumped: Path | None = None,
    unread: str | None = None,
) -> Report:
    """Reports on a compiled step; arguments as of `inspect`, the folder to which XLA wrote its kernels, and the reason
    why they are not read."""
    start = time.perf_counter()
    server = time_on or step.target.server
    named = symbols_of(step.anatomy, step.plan)
    symbols = {**named, **letters(step, named)}
    contract = contract or contract_of(step.anatomy, step.plan)
    required = requirements(contract, symbols, step.mesh, step.config.training.compute_dtype)
    # The servers are those for which time is predicted: a group that is inside one of those compiled for may span
    # several of these.
    per_server, model = server.gpus if server else step.target.devices_per_server, step.config.model
    # Run time decides how much of a ragged all-to-all's buffer is sent: what counts is the expected share, as in the
    # contract.
    ragged_share = exchanged_share(model, step.plan.expert_degree) if model.num_experts else 1.0
    collectives = find_collectives(step.module, step.mesh_axes, per_server, ragged_share)
    verdict = check(collectives, required, landmarks(step), is_gpu=step.target.is_gpu)
    replicated = replicated_parameters(step, contract)
    counted, float8 = count_flops(step.module), float8_products(step)
    memory = memory_report(step, server.gpu.memory if server else None, teacher)
    violations = (*verdict.violations, *replicated, *(float8.missed if float8 else ()))
    # XLA for CPUs has one memory.
    violations += tuple(host_violations(memory, saves_inputs=step.plan.recompute_offload)) if step.target.is_gpu else ()
    return Report(
        step=step,
        symbols=symbols,
        contract=contract,
        collectives=tuple(collectives),
        rows=tuple(table(collectives)),
        verdict=Verdict(verdict.lines, violations, verdict.tolerated),
        memory=memory,
        flops=Flops(counted * step.mesh.size, formula_flops(step)),
        time=predict(step, collectives, counted, server, dumped) if server else None,
        stages=stages_report(step),
        analysis_seconds=time.perf_counter() - start,
        float8=float8,
        unread=unread,
    )


def formula_flops(step: CompiledStep) -> float:
    """Returns the FLOPs of a compiled step's matmuls by formula."""
    return compiled_flops(step.anatomy, step.plan) * step.config.training.global_batch_size


def table(collectives: Sequence[Collective]) -> list[CollectiveRow]:
    """Groups collectives by phase, kind, axes and arrays; in the order of a step."""
    groups: dict[tuple, list[Collective]] = {}
    for c in collectives:
        # `is_known` belongs to the key, or a certain collective would get the question mark of an uncertain one.
        key = (PHASES.index(c.phase), c.kind, c.axes, c.arrays, c.servers, c.is_async, c.is_known)
        groups.setdefault(key, []).append(c)
    return [_row(groups[key]) for key in sorted(groups, key=lambda k: k[0])]


def _row(equal: list[Collective]) -> CollectiveRow:
    """Returns the row of equal collectives."""
    first = equal[0]
    return CollectiveRow(
        kind=first.kind,
        axes=first.axes,
        phase=first.phase,
        arrays=first.arrays,
        servers=first.servers,
        is_async=first.is_async,
        count=sum(c.count for c in equal),
        payload_bytes=first.payload_bytes,
        wire_bytes=first.wire_bytes,
        hidden=sum(c.count for c in equal if c.hidden_behind),
        op_name=first.op_name,
        is_known=first.is_known,
    )


def landmarks(step: CompiledStep) -> Landmarks:
    """Returns the sizes by which unexpected arrays of this step are recognized."""
    outputs = (part for part in step.anatomy.head if isinstance(part, OutputProjectionPart))
    logits = step.plan.microbatch_size * sum(part.tokens * part.rows for part in outputs)
    stacked = [record for record in jax.tree.leaves(step.program.records) if record.is_stacked]
    stacks = {r.name: NamedSharding(step.program.mesh, r.compute_spec).shard_shape(r.shape) for r in stacked}
    return Landmarks(parameter_shapes(step), logits, {name: shape for name, shape in stacks.items() if shape[0] > 1})


def parameter_shapes(step: CompiledStep) -> dict[str, tuple[int, ...]]:
    """Returns the unsharded shape of each parameter by its dotted name."""
    leaves = jax.tree_util.tree_flatten_with_path(step.program.abstract_parameters)[0]
    return {dotted(path): leaf.shape for path, leaf in leaves}


def replicated_parameters(step: CompiledStep, contract: Contract) -> list[str]:
    """Returns messages about parameters that are replicated though the contract shards them over `model`."""
    degree = step.mesh.degree(step.program.layout.rules.heads)
    local = dict(argument_arrays(step.module))
    leaves, _ = jax.tree_util.tree_flatten_with_path(step.program.logical_axes, is_leaf=lambda x: isinstance(x, tuple))
    shapes = parameter_shapes(step)
    notes = []
    for path, names in leaves:
        name = dotted(path)
        array = local.get("state.parameters" + jax.tree_util.keystr(path))
        sharded = [axis for axis in names if axis in contract.split]
        # A parameter that the step never reads is not an argument of the program.
        if array is None or not sharded or degree == 1 or array.dims != shapes[name]:
            continue
        notes.append(
            f"the weight {name} is replicated on every device, {array}: the contract {contract.name} shards its "
            f"{' and '.join(sharded)} over {degree} tensor parallel ranks"
        )
    return notes
