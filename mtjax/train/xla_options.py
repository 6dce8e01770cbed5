"""XLA options beyond its defaults: to overlap communication with computation on GPUs, and to copy less.

They are passed as a program's `compiler_options`: `XLA_FLAGS` would hold for every program of the process, and a flag
that XLA does not know aborts it. Here such an option is left out, and the run says so. `inspect` and `plan --verify`
compile with the same ones.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from mtjax.config import Config
from mtjax.errors import UserError
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plan import Plan


@dataclass(frozen=True)
class Option:
    """A field of XLA's DebugOptions."""

    name: str
    value: bool | int
    why: str
    known: str
    """The version of jax that knew it, and the default there."""
    since: tuple[int, int] = (0, 0)
    """The first version of jax whose XLA needs it."""
    until: tuple[int, int] = (99, 0)
    """The first version of jax whose XLA does better without, or no longer knows it."""

    @property
    def is_wanted(self) -> bool:
        """With the installed version."""
        return self.since <= jax.__version_info__[:2] < self.until


OVERLAP = (
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "begins a collective as soon as its operands are ready, and waits for it where its result is needed",
        "0.10.2, on by default",
    ),
    Option(
        "xla_gpu_enable_pipelined_reduce_scatter",
        True,
        "moves a scattered sum at the end of a loop's body into the next iteration, behind its products: ZeRO's sums",
        "0.10.2, on by default",
        until=(0, 12),
    ),
)
UNROLLED = (
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "products are cuBLAS's, which adds up gradients as it writes them; XLA's own kernels would be made for each "
        "product of each layer, and that takes longer than all else that is compiled",
        "0.10.2, on by default",
    ),
)
"""Where layers have no loop."""
PIPELINED_ALL_REDUCE = (
    Option(
        "xla_gpu_enable_pipelined_all_reduce",
        True,
        "the same for an all-reduce, which with split sequences is a sum of gradients; without, it is also the next "
        "layer's input, which waits for it all the sooner unless both are under way at a time",
        "0.10.2, off by default",
        until=(0, 12),
    ),
)
"""In addition, where the residual stream is split over the sequence, or collectives go side by side, and layers do not
send ahead by themselves: one such program XLA of jax 0.10.2 could not schedule with it ("is not scheduled after its
control predecessor"), and others were the same with and without.

docs/inspect.md and docs/notes/speed.md have what was left out, and what each of them brings.
"""
MULTI_STREAMING = "xla_gpu_experimental_enable_collective_multi_streaming"
CONCURRENT = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "gradients and ZeRO's parameters travel between servers while activations do inside one; otherwise none begins "
        "before the one before it is done",
        "0.10.2, 1 by default",
    ),
    Option(MULTI_STREAMING, True, "each on a stream of its own: on one they would still wait", "0.10.2"),
)
"""In addition, on meshes of data and model ways over several servers: their collectives cross different links."""
PREFETCH = (
    Option(
        "xla_gpu_experimental_collective_start_as_early_as_possible",
        True,
        "a layer's parameters are asked for when the layer before it begins, and its gradients sent when the one below "
        "does: XLA takes both for shorter beside what is computed than they are; that of jax 0.12 hides more without",
        "0.10.2, off by default",
        until=(0, 12),
    ),
    Option(
        "xla_gpu_all_gather_combine_threshold_bytes",
        1 << 28,
        "all parameters of a layer in one gather: of several over the same ranks XLA has one under way at a time, and "
        "waits for the first of them where it begins",
        "0.10.2, 30 MB by default",
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        1 << 28,
        "the same for a layer's gradients where each rank keeps all of their sum",
        "0.10.2, 30 MB by default",
    ),
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        3,
        "parameters, gradients and what else a layer sends, as tokens to experts, at a time; where a table below has "
        "another number, that many",
        "0.10.2, 1 by default",
    ),
)
"""In addition, where a layer's parameters come from other servers, or gradients go there, while another computes."""
STAGES = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        3,
        "a permute between the stages of a pipeline may be under way beside two other collectives, and so behind the "
        "layers of half a tick, which may have as many at a time and would otherwise wait for it",
        "0.10.2, 1 by default",
    ),
)
"""In addition, on the stages of a pipeline."""
CONTEXT = (
    Option(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "keys, values and their gradients travel between the ranks that share samples while attention computes, all "
        "at a time; otherwise none begins before the one before it is done",
        "0.10.2, 1 by default",
    ),
)
"""In addition, where ranks share the tokens of samples."""
SECTIONS = (
    Option(
        "xla_gpu_copy_insertion_use_region_analysis",
        True,
        "finds that of the stacks of an encoder and a decoder a stage works on one at a time, so that their gradients "
        "are added in place; without it one of the stacks' is copied",
        "0.10.2, off by default",
    ),
)
"""In addition, on stages that have chunks of several stacks."""


DETERMINISTIC = (
    (
        Option(
            "xla_gpu_deterministic_ops",
            True,
            "no operation whose bits depend on the order in which threads come, and no choice of kernels by measuring",
            "0.10.2, off by default",
        ),
        Option(
            "xla_gpu_enable_triton_gemm",
            False,
            "products are cuBLAS's: where there is no GPU, XLA finds no settings for its own kernels without measuring",
            "0.12.0, on by default",
            since=(0, 12),
        ),
    ),
    (
        Option("xla_gpu_exclude_nondeterministic_ops", True, "the first half of it", "0.10.2, off by default"),
        Option("xla_gpu_autotune_level", 0, "the second half", "0.10.2, 4 by default"),
    ),
)
"""Tables that make a step reproducible, the better one first: one of them must be known in full."""

CPU = (
    Option(
        "xla_cpu_copy_insertion_use_region_analysis",
        True,
        "finds an order in which parameters are updated before new moments overwrite the old; without it all are "
        "copied first",
        "0.10.2, off by default",
    ),
)


@dataclass(frozen=True)
class Chosen:
    """The options of a program."""

    options: dict[str, bool | int]
    refused: tuple[str, ...] = ()
    """Names that the installed XLA does not know."""


def choose(config: Config, mesh: Mesh) -> Chosen:
    """The options of a run's programs on a mesh; for GPUs with `overlap = false` none that overlap.

    Raises:
      UserError: the run is to be deterministic, and the installed XLA has no options for it.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return accepted(CPU, device)
    fast = _fast(config, mesh, device)
    if not config.training.deterministic:
        return fast
    return Chosen(fast.options | deterministic(device).options, fast.refused)


def deterministic(device: Any) -> Chosen:
    """The options that make operations on a device reproducible.

    Raises:
      UserError: the installed XLA knows none of the tables in full.
    """
    tables = [accepted(table, device) for table in DETERMINISTIC]
    known = next((table for table in tables if not table.refused), None)
    if known is None:
        raise UserError(
            f"deterministic: this XLA knows neither {' nor '.join(table[0].name for table in DETERMINISTIC)}; take a "
            "version of jax that does, or train without"
        )
    return known


def _fast(config: Config, mesh: Mesh, device: Any) -> Chosen:
    parallel, shape = config.parallel, MeshShape(**mesh.shape)
    staged = shape.has_pipeline
    # In one server there is one kind of link. Of devices only their process is known: most often that of a server.
    processes = len({device.process_index for device in mesh.devices.flat})
    side_by_side = processes > 1 and shape.has_data_and_tensor and not staged
    ahead = Plan.of(config, shape).prefetches(config.model)
    tables = (
        (UNROLLED, config.training.unroll_layers),
        (OVERLAP, parallel.overlap),
        (PIPELINED_ALL_REDUCE, parallel.overlap and not ahead and (parallel.sequence_parallel or side_by_side)),
        (CONCURRENT, parallel.overlap and side_by_side),
        (PREFETCH, parallel.overlap and processes > 1 and ahead),
        (STAGES, parallel.overlap and staged),
        (CONTEXT, parallel.overlap and shape.has_context_parallel),
        (SECTIONS, staged and len(anatomy_of(config.model).sections) > 1),
    )
    return accepted(tuple(option for table, holds in tables if holds for option in table), device)


@cache
def accepted(table: tuple[Option, ...], device: Any) -> Chosen:
    """The options of a table that are wanted and that XLA accepts for a device, tested by compiling a tiny program with
    each of them."""
    table = tuple(option for option in table if option.is_wanted)
    refused = () if _compiles(table, device) else tuple(o.name for o in table if not _compiles((o,), device))
    return Chosen({o.name: o.value for o in table if o.name not in refused}, refused)


def _compiles(options: Iterable[Option], device: Any) -> bool:
    one = jax.ShapeDtypeStruct((), jnp.float32, sharding=SingleDeviceSharding(device))
    with warnings.catch_warnings():
        # A program for an absent device can't be loaded from jax's cache, and jax warns of it.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache", UserWarning)
        try:
            jax.jit(jnp.negative, compiler_options={o.name: o.value for o in options}).lower(one).compile()
        except jax.errors.JaxRuntimeError:
            return False
    return True
