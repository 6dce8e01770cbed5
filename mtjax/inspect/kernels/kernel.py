"""A kernel of a step: what it reads and writes, what it computes, and the longest of its clocks."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mtjax.analysis.hardware import Gpu
from mtjax.inspect.kernels.block import SECTOR, Followed, follow
from mtjax.inspect.kernels.occupancy import occupancy
from mtjax.inspect.kernels.ptx import PtxEntry as Ptx
from mtjax.inspect.kernels.rates import ISSUE, ISSUED, L1_SECTORS, L2_SECTORS, PIPE_OF, SECTORS, rates_of
from mtjax.inspect.kernels.tools import Assembled

COALESCED = 0.5
"""Share of the bytes of its sectors that a kernel must use; otherwise its accesses are uncoalesced."""


@dataclass(frozen=True)
class KernelLaunch:
    """How the host launches a kernel."""

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared: int
    """Bytes of shared memory in addition to the kernel's own."""

    @property
    def blocks(self) -> int:
        """Blocks of threads."""
        return math.prod(self.grid)

    @property
    def block_threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.threads)


@dataclass(frozen=True)
class MachineCode:
    """A kernel's machine code on a GPU, and one launch of it."""

    name: str
    launch: KernelLaunch
    registers: int
    spilled: int
    """Bytes of a thread, stored for lack of registers."""
    shared: int
    """Bytes of shared memory of a block."""
    occupancy: float
    """Share of an SM's warps that it can use."""
    counts: Mapping[str, float]
    """Pipe -> instructions of a thread; "issue" all of them."""
    seconds: Mapping[str, float]
    """Clock -> seconds of a launch at the GPU's rates, without memory's own."""
    atomics: tuple[str, ...]
    """Kinds of atomic operations: "compare-and-swap", "reduction", "atomic with result"."""
    coalesced: float | None
    """Share of the bytes of its sectors of memory that a block uses; None where its addresses depend on data."""
    vectors: Mapping[int, int]
    """Bytes that a thread accesses in an instruction -> executions by a thread."""
    is_indexed: bool
    """Whether some addresses depend on data that differs between threads: a gather or a scatter."""
    is_exact: bool
    """Whether instructions were counted, not estimated: no loop, or one whose length is known."""

    @property
    def bound(self) -> str:
        """The clock that takes longest."""
        return max(self.seconds, key=lambda clock: self.seconds[clock])

    @property
    def longest(self) -> float:
        """Seconds of that clock."""
        return max(self.seconds.values())


def machine_of(
    ptx: Ptx, assembled: Assembled, launch: KernelLaunch, gpu: Gpu, *, is_matmul: bool = False
) -> MachineCode:
    """Counts what a launch of a kernel does.

    Args:
      ptx: its virtual machine code, from which addresses are computed.
      assembled: its machine code, from which instructions are counted.
      launch: of the kernel.
      gpu: the GPU.
      is_matmul: whether its time is that of its FLOPs, so that its memory accesses are not followed.
    """
    followed = Followed(1, np.zeros(0, np.int64)) if is_matmul else follow(ptx, launch.threads, launch.grid)
    per_thread = followed.bytes_per_thread(ptx)
    # PTX tells what a thread accesses, machine code what a branch's side or a loop's iteration does: only both tell how
    # often these run.
    shares = assembled.code.shares(followed.straight(ptx))
    times = assembled.code.times(per_thread, shares)
    counts = _by_pipe(assembled.code.counts(times, shares))
    shared = assembled.shared + launch.shared
    accesses = followed.accesses.values()
    vectors: Counter[int] = Counter()
    for i, access in followed.accesses.items():
        vectors[ptx.ops[i].access_bytes] += access.threads / followed.threads  # pyright: ignore[reportArgumentType]
    return MachineCode(
        name=ptx.name,
        launch=launch,
        registers=assembled.registers,
        spilled=assembled.spilled,
        shared=shared,
        occupancy=occupancy(gpu, launch.block_threads, assembled.registers, shared),
        counts=counts,
        seconds=_seconds(counts, followed, launch, gpu),
        atomics=atomics_of(ptx),
        coalesced=followed.touched / (SECTOR * followed.sectors) if followed.sectors else None,
        vectors=dict(vectors),
        is_indexed=any(access.is_indexed for access in accesses),
        is_exact=not assembled.code.loops or (times > 1 and followed.is_complete),
    )


def _by_pipe(names: Mapping[str, float]) -> dict[str, float]:
    counts: dict[str, float] = {ISSUE: sum(names.values())}
    for name, count in names.items():
        if name in PIPE_OF:
            counts[PIPE_OF[name]] = counts.get(PIPE_OF[name], 0.0) + count
    return counts


def _seconds(counts: Mapping[str, float], followed: Followed, launch: KernelLaunch, gpu: Gpu) -> dict[str, float]:
    """Returns the seconds of each clock on the SM with most blocks."""
    # In the last, partial wave some SMs have one block more than the others, which wait for them.
    blocks = math.ceil(launch.blocks / gpu.multiprocessors)
    clock = gpu.clock * 1e9
    rates = {**rates_of(gpu.compute_capability), ISSUE: ISSUED}
    # A block's threads are issued in warps.
    threads = blocks * math.ceil(launch.block_threads / 32) * 32
    seconds = {pipe: threads * count / rates[pipe] / clock for pipe, count in counts.items()}
    requested = sum(access.sectors for access in followed.accesses.values()) / followed.blocks / L1_SECTORS
    # What warps request passes the L1 cache each time; the block's distinct sectors come from L2 at least once.
    seconds[SECTORS] = blocks * max(requested, followed.sectors / followed.blocks / L2_SECTORS) / clock
    return seconds


def atomics_of(ptx: Ptx) -> tuple[str, ...]:
    """Returns the kinds of a kernel's atomic operations on global memory."""
    kinds = {
        "compare-and-swap" if "cas" in op.parts else "reduction" if op.kind == "red" else "atomic with result"
        for op in ptx.ops
        if op.kind in ("atom", "red") and op.space != "shared"
    }
    return tuple(sorted(kinds))
