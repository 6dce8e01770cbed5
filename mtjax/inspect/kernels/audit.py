"""The kernels of a step with what they will do, matched to the program's operations, and which of them are slow."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mtjax.analysis.hardware import Gpu
from mtjax.errors import UserError
from mtjax.inspect.causes import cause_of, executed
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo import Computation, Instruction
from mtjax.inspect.kernels.dump import Dump, read
from mtjax.inspect.kernels.kernel import COALESCED, MachineCode, machine_of
from mtjax.inspect.kernels.rates import rates_of
from mtjax.inspect.kernels.source import SourceLines
from mtjax.inspect.kernels.tools import Assembled, assemble, find_tool
from mtjax.inspect.phases import locate
from mtjax.inspect.products import products_of
from mtjax.inspect.roofline import Roofline
from mtjax.inspect.targets import Target
from mtjax.inspect.traffic import bytes_moved

SLOW = 2.0
"""How many times as long as its bytes a kernel's instructions may take."""
ARCHITECTURES = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100a"}
"""Compute capability -> architecture for which XLA and ptxas compile."""
SWAPS = "compare-and-swap"
MOST_READ = 250
"""Kernels of a step up to which they are read by default; a CPU takes less than 5 seconds for as many."""


@dataclass(frozen=True)
class KernelRow:
    """A kernel and its executions in a step."""

    machine: MachineCode
    instructions: tuple[str, ...]
    """Operations of the program that it executes."""
    count: int
    """Launches in a step."""
    phase: str
    cause: str
    op_name: str
    source: str
    """The line of mtjax from which it comes; "" where XLA dropped it."""
    bytes: int
    """Read and written by a launch, as the program's operations say."""
    by_bytes: float
    """Seconds of a launch at the memory's speed."""
    by_instructions: float
    """Seconds of a launch by the longest of its other clocks."""
    by_products: float
    """Seconds of a launch's matmuls; 0 without any."""
    least: float
    """Seconds of any launch."""

    @property
    def seconds(self) -> float:
        """Of all launches, by the longest clock."""
        return self.count * max(self.by_bytes, self.by_instructions, self.by_products, self.least)

    @property
    def is_slow(self) -> bool:
        """Whether its instructions take `SLOW` times as long as its bytes, and longer than a launch."""
        return not self.by_products and self.by_instructions > max(SLOW * self.by_bytes, self.least)

    @property
    def is_uncoalesced(self) -> bool:
        """Whether it uses less than `COALESCED` of the sectors it touches, and moves enough for that to count."""
        # Below a launch's time it would make no difference.
        share = self.machine.coalesced
        return share is not None and share < COALESCED and self.by_bytes > self.least

    @property
    def faults(self) -> dict[str, str]:
        """What makes it slower than its bytes: in a word or two -> in a sentence."""
        m, times = self.machine, self.by_instructions / max(self.by_bytes, 1e-12)
        found = {
            SWAPS: (
                SWAPS in m.atomics,
                "atomic adds to the same element wait for each other in a compare-and-swap loop",
            ),
            "spills": (m.spilled > 0, f"spills {m.spilled} bytes a thread for lack of registers"),
            "uncoalesced": (self.is_uncoalesced, f"uses {m.coalesced or 0:.0%} of the memory sectors that it touches"),
            "slow": (self.is_slow, f"takes {times:.1f} times as long as its bytes, by its instructions ({m.bound})"),
        }
        return {fault: sentence for fault, (holds, sentence) in found.items() if holds}


@dataclass(frozen=True)
class KernelReport:
    """All kernels of a step that XLA wrote."""

    rows: tuple[KernelRow, ...]
    """Those that take longest first."""
    step: float
    """Seconds of the step, by the longest clock of each kernel."""
    without: float
    """Seconds of the step by bytes and FLOPs alone."""
    libraries: int
    """Launches of kernels of cuBLAS and cuDNN in a step, whose code XLA doesn't have."""
    own_products: int
    """Matmul kernels that XLA wrote in Triton: on a GPU it measures several and takes the fastest, here it guesses."""

    @property
    def by_instructions(self) -> dict[str, float]:
        """Seconds that the instructions of an operation's kernel take, by the operation's name."""
        return by_instructions(self.rows)

    @property
    def faulty(self) -> tuple[KernelRow, ...]:
        """Kernels with faults."""
        return tuple(row for row in self.rows if row.faults)


def by_instructions(rows: Iterable[KernelRow]) -> dict[str, float]:
    """Returns the seconds that the instructions of operations' kernels take, but not of matmuls, by name."""
    # A matmul's time is that of its FLOPs: its loop over tiles is not followed.
    return {name: row.by_instructions for row in rows if not row.by_products for name in row.instructions}


def check_kernels(target: Target) -> None:
    """Checks that the kernels of a target's programs can be read, before seconds of compiling.

    Raises:
      UserError: it is not a GPU, its rates are not known, or CUDA's tools are missing.
    """
    if target.server is None:
        raise UserError(f"--kernels needs a GPU program, and --target is {target.name}: add --target h100x8")
    rates_of(target.server.gpu.compute_capability)
    for tool in ("ptxas", "nvdisasm"):
        find_tool(tool)


def why_unread(target: Target, folder: Path | None = None) -> str | None:
    """Returns why the kernels of a GPU program are not read unless the user asks for it; None where they are.

    Args:
      target: a GPU.
      folder: to which XLA wrote the kernels, once it has.
    """
    try:
        check_kernels(target)
    except UserError as e:
        return str(e)
    written = len(list(folder.glob("*.ptx"))) if folder else 0
    if written <= MOST_READ:
        return None
    return f"the machine code of {written} kernels takes seconds to read, and was left out: --kernels reads it"


def audit(step: CompiledStep, roofline: Roofline, folder: Path) -> KernelReport:
    """Reads the kernels of a compiled step.

    Args:
      step: compiled with `DUMP_TO`.
      roofline: of the step; from now on it knows the seconds that the kernels' instructions take.
      folder: to which XLA wrote.

    Raises:
      UserError: CUDA's tools are missing, or XLA's files can't be read.
    """
    assert step.target.server is not None
    gpu = step.target.server.gpu
    dumped = read(folder, step.module.name)
    assembled = assemble(dumped.files, ARCHITECTURES[gpu.compute_capability], folder)
    reader = _Reader(roofline, dumped, assembled, SourceLines.of(step.text), gpu)
    # Before `use`, which adds the instructions' clock.
    without = roofline.run().seconds
    found: dict[str, list[_Site]] = {}
    libraries = 0.0
    for site in map(_Site._make, executed(roofline, roofline.module.entry, 1, in_loop=False)):
        kernel = kernel_of(dumped, site.instruction)
        # What XLA did not write is a library's, or a copy.
        if kernel in assembled:
            found.setdefault(kernel, []).append(site)
        elif site.instruction.opcode == "custom-call":
            libraries += site.times
    rows = [reader.row(name, sites) for name, sites in found.items()]
    roofline.use(by_instructions(rows))
    return KernelReport(
        rows=tuple(sorted(rows, key=lambda row: -row.seconds)),
        step=roofline.run().seconds,
        without=without,
        libraries=round(libraries),
        own_products=sum(row.by_products > 0 for row in rows),
    )


def kernel_of(dumped: Dump, instruction: Instruction) -> str:
    """Returns the name of the kernel of an operation: as XLA says, or made from the operation's name."""
    return dumped.of_instruction.get(instruction.name) or re.sub(r"\W", "_", instruction.name)


class _Site(NamedTuple):
    """Where a kernel is launched."""

    computation: Computation
    instruction: Instruction
    times: float
    in_loop: bool


@dataclass(frozen=True)
class _Reader:
    """Everything that a kernel's row is made from."""

    roofline: Roofline
    dumped: Dump
    assembled: Mapping[str, Assembled]
    lines: SourceLines
    gpu: Gpu

    def row(self, name: str, sites: list[_Site]) -> KernelRow:
        """Returns a kernel's row; phase, cause and source are those of its first operation."""
        roofline, (computation, instruction, _, in_loop) = self.roofline, sites[0]
        phase, op_name, _ = locate(computation, instruction)
        moved = bytes_moved(roofline.module, computation, instruction)
        products = products_of(roofline.module, computation, instruction)
        by_bytes, constants = roofline.machines[2].passes(moved), roofline.machines[2].constants
        launch = self.dumped.launches[name]
        machine = machine_of(self.dumped.ptx[name], self.assembled[name], launch, self.gpu, is_matmul=bool(products))
        return KernelRow(
            machine=machine,
            instructions=tuple(dict.fromkeys(site.instruction.name for site in sites)),
            count=round(sum(site.times for site in sites)),
            phase=phase,
            cause=cause_of(roofline.module, instruction, phase, in_loop, is_small=by_bytes < roofline.launch),
            op_name=op_name,
            source=self.lines.source_of(roofline.module, instruction),
            bytes=moved,
            by_bytes=by_bytes,
            # A training run has this share of the speed of kernels alone, as for matmuls and memory.
            by_instructions=machine.longest / constants.training,
            by_products=sum(roofline.product_seconds(product) for product in products),
            least=roofline.launch,
        )
