"""How long the scheduled program should take: a walk over its operations with two clocks, computing and sending.

Each operation takes the longer of its products at the FLOP/s that a product of its size reaches and its bytes at the
memory's speed; where its kernel's machine code was read, also of that kernel's instructions. A collective takes latency
plus bytes over the bandwidth of the slowest link it crosses; from its start it runs in parallel with whatever the
schedule puts before its done. One collective is sent at a time - or one inside servers and one between them, in a
program that has streams for both. Speeds and latencies are those of `analysis.machine.Constants` and
`analysis.hardware`, each with its source; one of them, `training`, is fitted to ten published runs on A100
(docs/notes/plan.md), none to a program that is walked here. Caches are not modelled: every operand comes from memory.
Computation during a collective takes longer, because they share the device.

Stages of a pipeline wait for each other in every tick, so a tick takes what the slowest stage takes for the branches
that are its in that tick.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mtjax.analysis.hardware import Server
from mtjax.analysis.machine import Constants, Machine
from mtjax.analysis.traffic import Transfer
from mtjax.inspect.collectives import Collective, computes, is_started
from mtjax.inspect.hlo import Computation, Instruction, Module
from mtjax.inspect.hlo_walk import attention_choice, executions
from mtjax.inspect.phases import OTHER, locate
from mtjax.inspect.products import BatchedMatmul, products_of
from mtjax.inspect.traffic import bytes_moved
from mtjax.layout.attention_kernel import WINDOWED


@dataclass(frozen=True)
class Event:
    """An operation on one of the two clocks, for a timeline; seconds from the start of its computation."""

    name: str
    label: str
    phase: str
    stream: str
    """ "compute", "send", or "wait" where computing stands still for a collective."""
    start: float
    end: float


@dataclass
class Spent:
    """Seconds by cause."""

    products: float = 0.0
    memory_bound: float = 0.0
    exposed: float = 0.0
    """Computing waited for a collective."""
    hidden: float = 0.0
    """A collective ran while something was computed."""
    contention: float = 0.0
    """What was computed meanwhile took longer by this."""

    @property
    def total(self) -> float:
        """What they add to the step."""
        return self.products + self.memory_bound + self.exposed + self.contention

    def add(self, other: "Spent", times: float = 1) -> None:
        """Adds `times` another."""
        self.products += times * other.products
        self.memory_bound += times * other.memory_bound
        self.exposed += times * other.exposed
        self.hidden += times * other.hidden
        self.contention += times * other.contention


Taken = frozenset[str]
"""The conditionals on the stage of which the first branch is taken, by their names."""


NONE_TAKEN: Taken = frozenset()


class Execution(NamedTuple):
    """What an instruction runs, and how often."""

    computation: Computation
    taken: Taken
    times: float
    """Of a branch that the layer's number selects, the share of layers that take it."""


@dataclass
class Walked:
    """One execution of a computation."""

    seconds: float = 0.0
    phases: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    by_axes: dict[str, Spent] = field(default_factory=lambda: defaultdict(Spent))
    """Exposed and hidden seconds of the collectives over each set of axes."""
    events: list[Event] = field(default_factory=list)


class Roofline:
    """Walks a module's computations on the GPUs of a server."""

    def __init__(
        self,
        module: Module,
        collectives: list[Collective],
        server: Server,
        constants: Constants | None = None,
        *,
        side_by_side: bool = False,
        windowed: float = 1.0,
    ) -> None:
        """See the class.

        Args:
          module: the program.
          collectives: all of its collectives.
          server: the hardware.
          constants: what the server's datasheet does not say; measured ones when None.
          side_by_side: whether collectives inside and between servers are in flight at once.
          windowed: share of the layers that have a window, of those whose number selects the attention kernel.
        """
        self.module, self.server, self.side_by_side, self.windowed = module, server, side_by_side, windowed
        # Peaks of matmuls depend on the bytes of an element; 8 bits have a factor of their own in `Machine.product`.
        self.machines = {size: Machine(server, size, constants) for size in (2, 4)}
        self.launch = self.machines[2].constants.launch
        self.collectives: Mapping[str, Collective] = {c.name: c for c in collectives}
        self.by_instructions: Mapping[str, float] = {}
        self.walked: dict[tuple[str, Taken], Walked] = {}
        self._on_stage: dict[str, Taken] = {}

    def use(self, by_instructions: Mapping[str, float]) -> None:
        """Takes account of a third clock: the seconds that the instructions of operations' kernels take, by name."""
        self.by_instructions = by_instructions
        # What was walked before was timed with two clocks.
        self.walked.clear()

    def run(self) -> Walked:
        """The entire step."""
        return self.walk(self.module.entry)

    def walk(self, computation: Computation, taken: Taken = NONE_TAKEN) -> Walked:
        """One execution of a computation, remembered by its name and the branches on the stage that are taken in it."""
        # Without branches that the computation does not contain, so that a layer's body is walked once and not once per
        # tick.
        key = (computation.name, taken & self._branches_on_stage(computation))
        if key not in self.walked:
            self.walked[key] = _Clock(self, computation, key[1]).run()
        return self.walked[key]

    def runs(self, instruction: Instruction, taken: Taken) -> Iterator[Execution]:
        """Yields what a loop, a call or a conditional runs.

        Loops run their body as often as XLA says, a loop over ticks with the branches of the slowest stage in each
        tick. Of two attention kernels, for usual and unusual documents, the first runs; of two for layers with and
        without a window, each for its share of the layers; of other branches that do not depend on the stage, the
        longest.
        """
        callees = list(self.module.callees(instruction))
        if instruction.opcode == "conditional":
            branch = self.module.stage_branches.get(instruction.name)
            if branch is not None and len(branch.by_tick) != 1:
                is_true = instruction.name in taken
                callees = [c for c in callees if self.module.is_true_branch(instruction, c) == is_true]
            elif branch is not None:  # a single tick, which is not a loop: what any stage takes
                (stages,) = branch.by_tick
                callees = [c for c in callees if self.module.is_true_branch(instruction, c) in stages]
            elif (choice := attention_choice(instruction)) == WINDOWED:
                for callee in callees:
                    is_windowed = self.module.is_true_branch(instruction, callee)
                    yield Execution(callee, taken, self.windowed if is_windowed else 1 - self.windowed)
                return
            elif choice:
                callees = [c for c in callees if self.module.is_true_branch(instruction, c)]
            # Branches that depend on data: what is not known counts as long as it may take.
            slowest = max(callees, key=lambda callee: self.walk(callee, taken).seconds)
            yield Execution(slowest, taken, 1)
            return
        times, _ = executions(instruction)
        condition = (instruction.attribute("condition") or "").lstrip("%")
        for callee in callees:
            if callee.name == condition:
                continue
            if instruction.opcode == "while" and (inner := self._branches_on_stage(callee)):
                # Ticks with the same branches take the same time; a timetable has hundreds of ticks and a few kinds.
                ticks = Counter(self._slowest(callee, inner, tick) for tick in range(times))
                yield from (Execution(callee, of_tick, count) for of_tick, count in ticks.items())
            else:
                yield Execution(callee, taken, times)

    def _slowest(self, body: Computation, inner: Taken, tick: int) -> Taken:
        """The branches that the stage takes that needs longest for a tick."""
        tables = {name: self.module.stage_branches[name].by_tick[tick] for name in sorted(inner)}
        by_stage = zip(*tables.values(), strict=True)
        options = dict.fromkeys(
            frozenset(name for name, is_taken in zip(tables, of_stage, strict=True) if is_taken)
            for of_stage in by_stage
        )
        return max(options, key=lambda option: self.walk(body, option).seconds)

    def _branches_on_stage(self, computation: Computation) -> Taken:
        """The conditionals on the stage in a computation and in what its conditionals run."""
        if computation.name not in self._on_stage:
            found: set[str] = set()
            for instruction in computation.instructions:
                if instruction.name in self.module.stage_branches:
                    found.add(instruction.name)
                if instruction.opcode == "conditional":
                    found.update(*map(self._branches_on_stage, self.module.callees(instruction)))
            self._on_stage[computation.name] = frozenset(found)
        return self._on_stage[computation.name]

    def seconds(self, computation: Computation, instruction: Instruction) -> tuple[float, bool]:
        """Seconds of an operation that calls no loop, and whether products determine them."""
        products = products_of(self.module, computation, instruction)
        computing = sum(self.product_seconds(product) for product in products)
        moving = self.machines[2].passes(bytes_moved(self.module, computation, instruction))
        others = self.by_instructions.get(instruction.name, 0.0)
        # A kernel loads, computes and stores at once, so that the slowest of these is its time.
        return max(computing, moving, others, self.launch), computing >= moving

    def product_seconds(self, product: BatchedMatmul) -> float:
        """Seconds of a product."""
        machine = self.machines[4 if product.element_bytes == 4 else 2]
        if product.own_attention:
            return machine.own_attention(*product.own_attention)
        if product.is_flash:
            return machine.flash(product.flops * product.computed_share)
        return machine.product(product.m, product.k, product.n, product.batch, is_float8=product.element_bytes == 1)

    def collective_seconds(self, collective: Collective) -> float:
        """Seconds of one execution of a collective on the links that it crosses."""
        ways = collective.group_size
        if ways <= 1:
            return 0.0
        transfer = Transfer("", ways, collective.kind, "", 1, collective.sent_bytes, 1)
        return self.machines[2].transfer(transfer, inside=max(1, ways // collective.servers))


class _Clock:
    """One walk down a computation's schedule."""

    def __init__(self, roofline: Roofline, computation: Computation, taken: Taken) -> None:
        self.roofline, self.computation, self.taken = roofline, computation, taken
        self.now = 0.0
        self.sending_until: dict[bool, float] = defaultdict(float)
        """By whether it is between servers, where both may send at a time."""
        self.in_flight: dict[str, tuple[float, float]] = {}
        self.result = Walked()

    def run(self) -> Walked:
        for instruction in self.computation.instructions:
            self._step(instruction)
        self.result.seconds = self.now
        return self.result

    def _step(self, instruction: Instruction) -> None:
        collective = self.roofline.collectives.get(instruction.name)
        if collective is not None:
            self._send(instruction, collective)
        elif instruction.opcode.endswith("-done"):
            self._finish(instruction)
        elif instruction.opcode in ("while", "call", "conditional"):
            self._enter(instruction)
        elif computes(instruction):
            seconds, by_products = self.roofline.seconds(self.computation, instruction)
            phase = locate(self.computation, instruction)[0]
            spent = self.result.phases[phase]
            if by_products:
                spent.products += seconds
            else:
                spent.memory_bound += seconds
            self._event(instruction, instruction.opcode, phase, "compute", self.now, self.now + seconds)
            self.now += seconds

    def _send(self, instruction: Instruction, collective: Collective) -> None:
        link = self.roofline.side_by_side and collective.servers > 1
        # NCCL's kernels of one stream run one after the other.
        start = max(self.now, self.sending_until[link])
        end = start + self.roofline.collective_seconds(collective)
        self.sending_until[link] = end
        over = "+".join(collective.axes) if collective.axes else "?"
        self._event(instruction, f"{collective.kind} over {over}", collective.phase, "send", start, end)
        self.in_flight[instruction.name] = (start, end)
        if not is_started(instruction):
            self._wait(instruction.name, collective)

    def _finish(self, instruction: Instruction) -> None:
        for name in instruction.operands:
            if name in self.in_flight:
                self._wait(name, self.roofline.collectives[name])

    def _wait(self, name: str, collective: Collective) -> None:
        start, end = self.in_flight.pop(name)
        waited = max(0.0, end - self.now)
        hidden = max(0.0, end - start - waited)
        # What is computed takes longer: by all of it where it ends last, by what is more than the wait where it waits.
        slowed = max(0.0, self.roofline.machines[2].contention(hidden) - waited)
        sent = Spent(exposed=waited, hidden=hidden, contention=slowed)
        self.result.phases[collective.phase].add(sent)
        self.result.by_axes["+".join(collective.axes or ("?",))].add(sent)
        if waited:
            self.result.events.append(Event(name, "waits", collective.phase, "wait", self.now, end))
        self.now += waited + slowed

    def _enter(self, instruction: Instruction) -> None:
        """Adds what a loop, a call or a conditional runs."""
        for computation, taken, times in self.roofline.runs(instruction, self.taken):
            walked = self.roofline.walk(computation, taken)
            for phase, spent in walked.phases.items():
                self.result.phases[phase].add(spent, times)
            for axes, spent in walked.by_axes.items():
                self.result.by_axes[axes].add(spent, times)
            end = self.now + times * walked.seconds
            if walked.seconds:
                self._event(instruction, f"{instruction.opcode} x{times:g}", OTHER, "compute", self.now, end)
            self.now = end

    def _event(self, instruction: Instruction, label: str, phase: str, stream: str, start: float, end: float) -> None:
        self.result.events.append(Event(instruction.name, label, phase, stream, start, end))
