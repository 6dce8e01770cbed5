"""A step compiled for a target, and what the compiler says about it."""

import math
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from mtjax.config import Config
from mtjax.config.sizes import expert_capacity
from mtjax.errors import UserError, first_line, install_extra
from mtjax.inspect import hlo
from mtjax.inspect.stage_branches import with_stage_branches
from mtjax.inspect.targets import Target
from mtjax.models.kernels.grouped import Blocks
from mtjax.sharding.schedules.pipeline import PipelineSchedule
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.mesh import MeshShape, parse_mesh
from mtjax.theory.plan import Plan
from mtjax.train.step import TrainStep, make_train_step

NO_TILES = "Couldn't find output tile sizes"
"""XLA's error where it finds no tile sizes for a matmul in its own kernels (Triton), with no GPU to measure on."""
OWN_KERNELS = "xla_gpu_enable_triton_gemm"
"""XLA's option for such kernels; without them, all matmuls are cuBLAS's."""

EXPERTS_SCOPE = "experts"
"""Named scope of what ranks do with tokens and experts of each other."""


@dataclass(frozen=True)
class MemoryStats:
    """Bytes per device that the compiler has planned."""

    arguments: int
    outputs: int
    aliased: int
    """Part of the outputs that reuses arguments: donated state."""
    temporaries: int

    @property
    def peak(self) -> int:
        """Most that is alive at once, as planned; aliased outputs do not count twice."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class CompiledStep:
    """A train step, compiled for a target."""

    config: Config
    program: TrainStep
    target: Target
    text: str
    """The optimized program as HLO text."""
    module: hlo.Module
    memory: MemoryStats
    trace_seconds: float
    compile_seconds: float
    note: str | None = None
    """How it was compiled, if not with the run's own options."""

    @property
    def mesh(self) -> MeshShape:
        """The mesh it is compiled for."""
        return self.program.shape

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the model."""
        return anatomy_of(self.config.model)

    @cached_property
    def plan(self) -> Plan:
        """The plan by which formulas are worked out; with the attention kernel that was compiled."""
        return Plan.of(self.config, self.mesh, flash_attention="fmha" in self.text)

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """Ways of each mesh axis, outermost first."""
        return dict(self.program.mesh.shape)


def compile_step(config: Config, target: Target) -> CompiledStep:
    """Compiles the train step of `config` for `target`; no device runs it.

    Raises:
      UserError: config and mesh don't fit, or the target can't be compiled for here.
    """
    return compile_program(make_train_step(config, target.mesh(parse_mesh(config.parallel.mesh))), target)


def compile_program(program: TrainStep, target: Target) -> CompiledStep:
    """Compiles the train step of an existing program, as in `train --inspect`.

    Raises:
      UserError: its attention kernel is cuDNN's, which is not installed, or XLA can't compile it.
    """
    start = time.perf_counter()
    lowered = _lower(program)
    traced = time.perf_counter()
    compiled, note = compile_for(target, lowered, program.xla.options)
    done = time.perf_counter()
    text = compiled.as_text()
    assert text is not None
    module = hlo.parse(text)
    if blocks := expected_blocks(program):
        module = hlo.with_trip_counts(module, blocks, EXPERTS_SCOPE)
    plan = Plan.of(program.config, program.shape)
    schedule = program.microbatch_schedule(plan.microbatches)
    if isinstance(schedule, PipelineSchedule):
        module = with_stage_branches(module, schedule.training, len(program.sections))
    return CompiledStep(
        config=program.config,
        program=program,
        target=target,
        text=text,
        module=module,
        memory=memory_of(compiled),
        trace_seconds=traced - start,
        compile_seconds=done - traced,
        note=note,
    )


def compile_for(
    target: Target, lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
) -> tuple[jax.stages.Compiled, str | None]:
    """Compiles a program for a target, if necessary without XLA's own kernels for matmuls.

    Args:
      target: what it is lowered for.
      lowered: the program.
      options: the compiler options with which it was lowered.

    Returns:
      The compiled program; and a note if it could not be compiled with these options alone, otherwise None.

    Raises:
      UserError: XLA can't compile it.
    """
    with warnings.catch_warnings():
        # Programs for absent devices can't be loaded from jax's cache, and jax warns of it each time.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
        try:
            return lowered.compile(), None
        except jax.errors.JaxRuntimeError as e:
            if not target.is_gpu or NO_TILES not in str(e):
                raise _refused(target, e) from e
        try:
            compiled = lowered.compile(compiler_options={**(options or {}), OWN_KERNELS: False})
        except jax.errors.JaxRuntimeError as e:
            raise _refused(target, e) from e
    return compiled, (
        f"XLA finds no tiles for a product of this program in a kernel of its own; it was compiled with {OWN_KERNELS} "
        "off, so that all products are cuBLAS's"
    )


def _refused(target: Target, error: Exception) -> UserError:
    return UserError(
        f"XLA could not compile the program for {target.name}: {first_line(error, 300)}; try another "
        "--microbatch-size, --mesh or --attention, or another version of jax (MTJAX_DEBUG=1 shows all that XLA said)"
    )


def expected_blocks(program: TrainStep) -> int:
    """Of experts' products on a rank, whose loops are as long as there are tokens for: those of equal loads; 0 without
    experts."""
    model, mesh = program.config.model, program.shape
    if not model.num_experts:
        return 0
    plan, length = Plan.of(program.config, mesh), model.sequence_length
    samples, ways = plan.microbatch_size, plan.expert_degree
    capacity, tokens = expert_capacity(model, length), int(plan.local_tokens(length))
    pairs = ways * tokens * model.experts_top_k
    each, places = pairs / model.num_experts, pairs
    if capacity is not None:
        each = min(each, ways * plan.local_tokens(capacity))
        places = model.num_experts * min(samples * capacity, tokens) if ways > 1 else pairs
    rows = Blocks(model.activation, model.num_experts).rows(places)
    return model.num_experts // ways * math.ceil(each / rows)


def _lower(program: TrainStep) -> jax.stages.Lowered:
    try:
        return program.lower_step()
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"XLA could not lower the program: {first_line(e, 300)}") from e
    except RuntimeError as e:
        if "cuDNN not found" not in str(e):
            raise
        raise UserError(
            "flash attention needs cuDNN even to compile for GPUs that are not there: "
            f"{install_extra('aot-cudnn')} (900 MB), or choose --attention xla"
        ) from e


def memory_of(compiled: jax.stages.Compiled) -> MemoryStats:
    """What the compiler has planned for any program."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return MemoryStats(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
    )
