"""XLA options in addition to its defaults: to overlap communication with computation on GPUs, and to copy less.

They are passed as a program's `compiler_options`: `XLA_FLAGS` would apply to every program of the process, and a flag
that XLA does not know aborts it. Here such an option is omitted, and the run reports it. `inspect` and `plan --verify`
compile with the same options.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.stacks import sections_of


@dataclass(frozen=True)
class XLAOption:
    """A field of XLA's DebugOptions."""

    name: str
    value: bool | int | str
    why: str
    known: str
    """The version of jax whose XLA has it, and its default there."""
    since: tuple[int, int] = (0, 0)
    """The first version of jax whose XLA needs it."""
    until: tuple[int, int] = (99, 0)
    """The first version of jax whose XLA is better without it, or no longer has it."""

    @property
    def is_needed(self) -> bool:
        """Whether the installed version needs it."""
        return self.since <= jax.__version_info__[:2] < self.until


OVERLAP = (
    XLAOption(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "begins a collective as soon as its operands are ready, and waits for it where its result is needed",
        "0.10.2, on by default",
    ),
    XLAOption(
        "xla_gpu_enable_pipelined_reduce_scatter",
        True,
        "moves a reduce-scatter at the end of a loop's body into the next iteration, behind its matmuls: ZeRO's "
        "gradients",
        "0.10.2, on by default",
        until=(0, 12),
    ),
)
MEMORY = (
    XLAOption(
        "xla_gpu_memory_limit_slop_factor",
        112,
        "in percent, of 80% of the GPU's memory less arguments: temporaries may take 90% of the memory. XLA computes "
        "matmuls of a program that takes more again, by its default from 76% on",
        "0.10.2, 95 by default",
    ),
)
"""On compile-only devices. On attached GPUs XLA takes the percentage of jax's share, which is `USABLE_MEMORY`
(`mtjax.layout.gpu_memory`), and its default stays."""
UNROLLED = (
    XLAOption(
        "xla_gpu_enable_triton_gemm",
        False,
        "matmuls use cuBLAS, which accumulates gradients as it writes them; XLA's Triton kernels would be compiled "
        "for each matmul of each layer, which takes longer than everything else that is compiled",
        "0.10.2, on by default",
    ),
)
"""With `unroll_layers`, which has no loop over layers."""
FLOAT8 = (
    XLAOption(
        "xla_gpu_enable_triton_gemm",
        False,
        "matmuls of 8-bit operands are cuBLASLt's; XLA's Triton kernels would compute those with scales in 16 bits",
        "0.10.2, on by default",
    ),
)
"""With `fp8`."""
PIPELINED_ALL_REDUCE = (
    XLAOption(
        "xla_gpu_enable_pipelined_all_reduce",
        True,
        "the same for an all-reduce, which with sequence parallelism is only one of gradients; without, it is also "
        "one of the next layer's input, which then waits for both unless they can be in flight at the same time",
        "0.10.2, off by default",
        until=(0, 12),
    ),
)
"""In addition, with sequence parallelism or concurrent collectives, unless layers prefetch explicitly: XLA of jax
0.10.2 could not schedule one such program with it ("is not scheduled after its control predecessor"), and others were
the same with and without it.

docs/inspect.md and docs/notes/speed.md list options that are not set, and the effect of each of these.
"""
MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"
CONCURRENT = (
    XLAOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "gradients and ZeRO's parameters are sent between servers while activations are sent inside one; otherwise "
        "each collective waits for the one before it",
        "0.10.2, 1 by default",
    ),
    XLAOption(MULTI_STREAMING, True, "each on a separate CUDA stream: on one stream they would still wait", "0.10.2"),
)
"""In addition, with data and tensor parallelism over several servers, whose collectives use different links."""
PREFETCH = (
    XLAOption(
        "xla_gpu_experimental_collective_start_as_early_as_possible",
        True,
        "prefetches a layer's parameters when the layer before it begins, and reduces its gradients when the layer "
        "below begins: XLA underestimates the time of both when they overlap with compute",
        "0.10.2, off by default",
        until=(0, 12),
    ),
    XLAOption(
        "xla_gpu_all_gather_combine_threshold_bytes",
        1 << 30,
        "all parameters of a layer, up to half a billion in 16 bits, in one all-gather: XLA has only one collective "
        "over the same ranks in flight at a time, and with several it waits for the first where the second begins",
        "0.10.2, 30 MB by default",
    ),
    XLAOption(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        1 << 27,
        "the same for a layer's gradients if they are reduce-scattered; counted are the bytes of a rank's part. Tables "
        "stay apart from the last layer in most models",
        "0.10.2, 30 MB by default",
    ),
    XLAOption(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        1 << 28,
        "the same for a layer's gradients if they are all-reduced",
        "0.10.2, 30 MB by default",
    ),
    XLAOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        3,
        "parameters, gradients and other traffic of a layer, such as tokens to experts, can be in flight at a time; a "
        "table below with another number takes precedence",
        "0.10.2, 1 by default",
    ),
)
"""In addition, if parameters are all-gathered from other servers, or gradients reduced to them, while a layer
computes."""
EARLY = (replace(PREFETCH[0], since=(0, 12), until=(99, 0)),)
"""In addition by jax 0.12 without ZeRO. Its XLA hides less with it of ZeRO-3, and as much of ZeRO-1."""
STAGES = (
    XLAOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        3,
        "a collective-permute between pipeline stages can be in flight with two other collectives, and so overlap "
        "with the layers of half a tick, which may have as many and would otherwise wait for it",
        "0.10.2, 1 by default",
    ),
)
"""In addition, with pipeline parallelism."""
CONTEXT = (
    XLAOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "keys, values and their gradients are sent between context parallel ranks at the same time, while attention "
        "computes; otherwise each waits for the one before it",
        "0.10.2, 1 by default",
    ),
)
"""In addition, with context parallelism."""
SECTIONS = (
    XLAOption(
        "xla_gpu_copy_insertion_use_region_analysis",
        True,
        "finds that a stage works on either the encoder's or the decoder's stack at a time, so that their gradients "
        "are accumulated in place; without it one of the two is copied",
        "0.10.2, off by default",
    ),
)
"""In addition, on pipeline stages with chunks of several stacks (encoder and decoder)."""


DETERMINISTIC = (
    (
        XLAOption(
            "xla_gpu_deterministic_ops",
            True,
            "no operation whose bits depend on the order of threads, and no choice of kernels by measurement "
            "(autotuning)",
            "0.10.2, off by default",
        ),
        XLAOption(
            "xla_gpu_enable_triton_gemm",
            False,
            "matmuls use cuBLAS: without a GPU, XLA finds no settings for its Triton kernels without measurement",
            "0.12.0, on by default",
            since=(0, 12),
        ),
    ),
    (
        XLAOption("xla_gpu_exclude_nondeterministic_ops", True, "the first half of it", "0.10.2, off by default"),
        XLAOption("xla_gpu_autotune_level", 0, "the second half", "0.10.2, 4 by default"),
    ),
)
"""Tables that make a step deterministic, the preferred one first: XLA must know all options of one of them."""

CPU = (
    XLAOption(
        "xla_cpu_copy_insertion_use_region_analysis",
        True,
        "finds an order in which parameters are updated before new moments overwrite the old ones; without it all "
        "moments are copied first",
        "0.10.2, off by default",
    ),
)


TRACED = (
    XLAOption(
        "xla_gpu_enable_command_buffer",
        "",
        "each kernel is launched by itself: a trace does not name the operations in a CUDA graph. On an H200, steps of "
        "GPT-2 medium with its layers in a loop took 208.3 ms instead of 206.1 (docs/gpu.md)",
        "0.10.2, on by default",
    ),
)
"""With `--profile`."""


@dataclass(frozen=True)
class Chosen:
    """The XLA options of a program."""

    options: dict[str, bool | int | str]
    refused: tuple[str, ...] = ()
    """Options that the installed XLA does not support."""


def choose(config: Config, mesh: Mesh) -> Chosen:
    """Returns the options of a run's programs on a mesh; on GPUs with `overlap = false`, none that overlap.

    Raises:
      UserError: the run is deterministic, and the installed XLA does not support that.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return accepted(CPU, device)
    fast = _fast(config, mesh, device)
    if not config.training.deterministic:
        return fast
    # Determinism wins where both have an option.
    return Chosen(fast.options | deterministic(device).options, fast.refused)


def traced(chosen: Chosen, device: Any) -> Chosen:
    """Returns options with which a trace of a program on a device names its operations."""
    if device.platform == "cpu":
        return chosen
    more = accepted(TRACED, device)
    return Chosen(chosen.options | more.options, chosen.refused + more.refused)


def deterministic(device: Any) -> Chosen:
    """Returns the options that make operations on a device deterministic.

    Raises:
      UserError: the installed XLA supports none of the tables in full.
    """
    tables = [accepted(table, device) for table in DETERMINISTIC]
    known = next((table for table in tables if not table.refused), None)
    if known is None:
        raise UserError(
            f"deterministic: this XLA supports neither {' nor '.join(table[0].name for table in DETERMINISTIC)}: use a "
            "version of jax that does, or remove --deterministic"
        )
    return known


def _fast(config: Config, mesh: Mesh, device: Any) -> Chosen:
    """Returns the options for speed, by the parallelism of the run."""
    parallel, mesh_shape = config.parallel, MeshShape(**mesh.shape)
    staged = mesh_shape.has_pipeline
    # Inside one server there is one kind of link. Devices only report their process, which usually is one server's.
    processes = len({device.process_index for device in mesh.devices.flat})
    concurrent = processes > 1 and mesh_shape.has_data_and_tensor and not staged
    prefetches = Plan.of(config, mesh_shape).prefetches(config.model)
    tables = (
        (MEMORY, _is_compile_only(device)),
        (UNROLLED, bool(config.training.unroll_layers)),
        (FLOAT8, config.training.fp8 != "none"),
        (OVERLAP, parallel.overlap),
        (PIPELINED_ALL_REDUCE, parallel.overlap and not prefetches and (parallel.sequence_parallel or concurrent)),
        (CONCURRENT, parallel.overlap and concurrent),
        (PREFETCH, parallel.overlap and processes > 1 and prefetches),
        (EARLY, parallel.overlap and processes > 1 and prefetches and not parallel.zero),
        (STAGES, parallel.overlap and staged),
        (CONTEXT, parallel.overlap and mesh_shape.has_context_parallel),
        (SECTIONS, staged and len(sections_of(config.model)) > 1),
    )
    return accepted(tuple(option for table, holds in tables if holds for option in table), device)


def _is_compile_only(device: Any) -> bool:
    """Returns whether a device of this process is absent, so that it has no memory either."""
    try:
        device.memory_stats()
    except jax.errors.JaxRuntimeError:
        return True
    return False


@cache
def accepted(table: tuple[XLAOption, ...], device: Any) -> Chosen:
    """Returns the options of a table that the installed version needs and accepts, tested by compiling a tiny program
    with each of them for a device."""
    table = tuple(option for option in table if option.is_needed)
    # All at once first: one compile where every option is known.
    refused = () if _compiles(table, device) else tuple(o.name for o in table if not _compiles((o,), device))
    return Chosen({o.name: o.value for o in table if o.name not in refused}, refused)


def _compiles(options: Iterable[XLAOption], device: Any) -> bool:
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    with warnings.catch_warnings():
        # jax warns that a program for a compile-only device can't be loaded from its cache.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
        try:
            jax.jit(jnp.negative, compiler_options={o.name: o.value for o in options}).lower(one).compile()
        except jax.errors.JaxRuntimeError:
            return False
    return True
