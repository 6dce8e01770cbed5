"""Compilation of a step for a target, and the compiler's statistics."""

import re
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax

from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.expert_blocks import expert_blocks
from mtjax.config import Config, replace
from mtjax.errors import UserError, first_line, install_extra
from mtjax.inspect import hlo
from mtjax.inspect.products import is_own_attention
from mtjax.inspect.stage_branches import with_stage_branches
from mtjax.inspect.targets import ATTACHED, Target, judged_by
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.sharding.pipeline.executor import PipelineSchedule
from mtjax.train.step import TrainStep, make_train_step

NO_TILES = "Couldn't find output tile sizes"
"""XLA's error where it finds no tile sizes for a matmul in Triton kernels, without a GPU for autotuning."""
DUMP_TO = "xla_dump_to"
"""XLA's option for the folder to which it writes programs and their kernels."""
WITH_KERNELS = {"xla_dump_emitter_re": ".*ptx.*"}
"""Option without which jax 0.12 writes no kernels."""
OWN_KERNELS = "xla_gpu_enable_triton_gemm"
"""XLA's option for Triton matmuls; without them, all matmuls are cuBLAS's."""

EXPERTS_SCOPE = "experts"
"""Named scope of dispatch and experts."""


@dataclass(frozen=True)
class MemoryStats:
    """Bytes per device that the compiler allocates."""

    arguments: int
    outputs: int
    aliased: int
    """Outputs that reuse arguments: the donated state."""
    temporaries: int
    host: int = 0
    """Arguments in the host's memory, which are not in `arguments`."""

    @property
    def peak(self) -> int:
        """Most bytes alive at once; aliased outputs are counted once."""
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
    """How it was compiled, if not with the run's options."""

    @property
    def mesh(self) -> MeshShape:
        """The mesh that it is compiled for."""
        return self.program.mesh_shape

    @property
    def anatomy(self) -> Anatomy:
        """The components of the model."""
        return anatomy_of(self.config.model)

    @cached_property
    def plan(self) -> Plan:
        """The plan for formulas, with the compiled attention kernel."""
        is_own, run = is_own_attention(self.text), self.config
        if run.model.attention == "pallas" and not is_own:
            # A program without attention, such as that of Mamba-2 layers alone.
            run = replace(run, attention="blocks")
        # From the program, not from the config: formulas that assumed the other kernel would differ from the program by
        # all scores.
        is_flash = is_own or "fmha" in self.text
        return Plan.of(
            run,
            self.mesh,
            flash_attention=is_flash,
            pallas_attention=is_own,
            joins_parallel=self.target.is_gpu,
        )

    @property
    def guessed_matmuls(self) -> int:
        """Number of Triton's matmul kernels with tiles that XLA guessed, because there is no GPU to measure them on."""
        return 0 if self.target.name == ATTACHED else len(re.findall(r'"kind":"__triton_(?:nested_)?gemm', self.text))

    @property
    def mesh_axes(self) -> Mapping[str, int]:
        """Mesh axis -> degree, outermost first."""
        return dict(self.program.mesh.shape)


def compile_step(config: Config, target: Target, dump_to: Path | None = None) -> CompiledStep:
    """Compiles the train step of `config` for `target`; no device runs it.

    Args:
      config: the run.
      target: the devices.
      dump_to: folder to which XLA writes the program's kernels, if any.

    Raises:
      UserError: config and mesh don't fit, or this machine can't compile for the target.
    """
    return compile_program(make_train_step(config, target.mesh(parse_mesh(config.parallel.mesh))), target, dump_to)


def compile_program(program: TrainStep, target: Target, dump_to: Path | None = None) -> CompiledStep:
    """Compiles the train step of an existing program, as in `train --inspect`; arguments as of `compile_step`.

    Raises:
      UserError: its attention kernel is cuDNN's, which is not installed, or XLA fails to compile it.
    """
    start = time.perf_counter()
    lowered = _lower(program)
    traced = time.perf_counter()
    compiled, note = compile_for(target, lowered, dump_to)
    done = time.perf_counter()
    # Parsed once, as the text of a large program is long, and every report reads the module.
    text = compiled.as_text()
    assert text is not None
    module = hlo.parse(text)
    plan, model = Plan.of(program.config, program.mesh_shape), program.config.model
    if model.num_experts:
        # Only the routing at run time decides how long the loop over blocks is: this is its length with equal loads.
        module = hlo.with_trip_counts(module, expert_blocks(model, plan).number, EXPERTS_SCOPE)
    schedule = program.microbatch_schedule(plan.microbatches)
    # After the trip counts: a loop over ticks is recognized by its length.
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
    target: Target, lowered: jax.stages.Lowered, dump_to: Path | None = None
) -> tuple[jax.stages.Compiled, str | None]:
    """Compiles a program for a target, if necessary without Triton matmuls.

    Args:
      target: the devices that it is lowered for.
      lowered: the program.
      dump_to: folder to which XLA writes the program's kernels, if any.

    Returns:
      The compiled program; and a note if it was compiled with other options, otherwise None.

    Raises:
      UserError: XLA fails to compile it.
    """
    # As options of this compilation: `XLA_FLAGS` is read once a process, and would make every program write there.
    written: dict[str, str | bool] = {DUMP_TO: str(dump_to), **WITH_KERNELS} if dump_to else {}
    with warnings.catch_warnings():
        # Programs for absent devices can't be loaded from jax's compilation cache, and jax warns each time.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
        try:
            # jax adds these to the options with which the program was lowered.
            return lowered.compile(compiler_options=written or None), None
        except jax.errors.JaxRuntimeError as e:
            if not target.is_gpu or NO_TILES not in str(e):
                raise _refused(target, e) from e
        try:
            compiled = lowered.compile(compiler_options={**written, OWN_KERNELS: False})
        except jax.errors.JaxRuntimeError as e:
            raise _refused(target, e) from e
    return compiled, (
        f"XLA finds no tile sizes for a Triton matmul of this program; it was compiled with {OWN_KERNELS} off, so that "
        "all matmuls are cuBLAS's; on a GPU XLA measures both, so the program that runs there may have other kernels"
    )


def _refused(target: Target, error: Exception) -> UserError:
    """Returns the error about a program that XLA fails to compile."""
    return UserError(
        f"XLA could not compile the program for {target.name}: {first_line(error, 300)}; try another "
        "--microbatch-size, --mesh or --attention, or another version of jax (MTJAX_DEBUG=1 shows XLA's full output)"
    )


def _lower(program: TrainStep) -> jax.stages.Lowered:
    """Lowers a step; reports XLA's errors, and a missing cuDNN, as `UserError`."""
    try:
        # While lowering, jax decides whether cuDNN's attention supports the shapes.
        with judged_by(program.mesh.devices.flat[0]):
            return program.lower_step()
    except jax.errors.JaxRuntimeError as e:
        raise UserError(f"XLA could not lower the program: {first_line(e, 300)}") from e
    except RuntimeError as e:
        if "No supported GPU devices found" in str(e):
            raise UserError(
                f"jax {jax.__version__} compiles Pallas kernels only for GPUs that it knows by name, not for "
                f"{program.mesh.devices.flat[0].device_kind!r}: use --attention blocks, or describe another GPU"
            ) from e
        if "cuDNN not found" not in str(e):
            raise
        raise UserError(
            "flash attention needs cuDNN even to compile for absent GPUs: "
            f"{install_extra('aot-cudnn')} (900 MB), or use --attention xla"
        ) from e


def memory_of(compiled: jax.stages.Compiled) -> MemoryStats:
    """Returns the compiler's memory statistics of a program."""
    stats = compiled.memory_analysis()
    assert stats is not None
    return MemoryStats(
        stats.argument_size_in_bytes,
        stats.output_size_in_bytes,
        stats.alias_size_in_bytes,
        stats.temp_size_in_bytes,
        stats.host_argument_size_in_bytes,
    )
