"""The collectives of a compiled step: what, over which mesh axes, how often, how many bytes, behind what."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtjax.analysis.contract import LAYER_BACKWARD, LAYER_FORWARD, LAYER_RECOMPUTE, phase_over
from mtjax.analysis.traffic import RING_PASSES, ring_factor
from mtjax.errors import UserError
from mtjax.inspect.cpu_promotion import widened_sums
from mtjax.inspect.groups import Groups, axes_of, parse_groups, servers_spanned
from mtjax.inspect.hlo import Array, Computation, Instruction, Module
from mtjax.inspect.hlo_walk import Site, walk
from mtjax.inspect.phases import locate

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
ALL_TO_ALL = "all-to-all"
REDUCE_SCATTER = "reduce-scatter"
RAGGED = "ragged-all-to-all"
SUMS = (ALL_REDUCE, REDUCE_SCATTER)
KINDS = tuple(RING_PASSES)

ON_CPUS = {
    REDUCE_SCATTER: (ALL_REDUCE, "all-reduce and slice: CPU programs write a reduce-scatter that way"),
    RAGGED: (ALL_TO_ALL, "an all-to-all of what there is room for: XLA for CPUs has no ragged one"),
}
"""Kind of a collective -> what CPU programs have in its place, and how that is said."""

_IDLE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
# Attributes of operations that communicate. One of a kind that is unknown here is reported under its own name: if it
# were skipped, the contract would hold without it.
_COMMUNICATES = re.compile(r"(?:replica_groups|source_target_pairs|channel_id|is_host_transfer)=")
# Custom calls are kernels of any purpose; these names are those of communication libraries.
_LIBRARY = re.compile(r"nccl|nvshmem|mpi_|all_?reduce|all_?gather|all_?to_?all|reduce_?scatter", re.IGNORECASE)


@dataclass(frozen=True)
class Collective:
    """One collective operation of the program, with all its operands."""

    kind: str
    """Its HLO operation without `-start`; for an operation that this reader does not know, its name as printed."""
    name: str
    axes: tuple[str, ...] | None
    """Mesh axes that it spans; None when its groups do not match any set of axes."""
    group_size: int
    servers: int
    """Servers that one group touches."""
    phase: str
    op_name: str
    has_own_name: bool
    """False when XLA dropped the name, and phase and path are those of a neighbour."""
    count: int
    """Executions in a step."""
    is_exact: bool
    """False in a loop of unknown length or a branch."""
    arrays: tuple[Array, ...]
    """The full arrays that it works on: the operand of a reduction, the result of a gather, the larger buffer of
    a ragged all-to-all."""
    is_async: bool
    """Whether other work may run between its start and its end."""
    hidden_behind: tuple[str, ...]
    """Names of the operations that compute something between its start and its end."""
    narrowed: tuple[bool, ...] = ()
    """Of a sum, whether each array is of bf16 that XLA for CPUs computes in f32, by `mtjax.inspect.cpu_promotion`."""
    made_in: tuple[str | None, ...] = ()
    """Of several arrays summed in one operation, the phase of what makes each, where that has a name; () where the axes
    tell."""
    sent_share: float = 1.0
    """Of its arrays, what is expected to be sent, where that is known at run time."""

    @property
    def elements(self) -> int:
        """Elements of one execution, all operands together."""
        return sum(a.elements for a in self.arrays)

    @property
    def payload_bytes(self) -> int:
        """Bytes of one execution, all operands together."""
        return sum(a.bytes for a in self.arrays)

    @property
    def sent_bytes(self) -> float:
        """Of them, those that are expected to be sent; before a ragged all-to-all XLA has ranks tell each other where
        rows go, 8 bytes each."""
        beside = 8 * self.group_size if self.kind == RAGGED else 0
        return self.payload_bytes * self.sent_share + beside

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends in one execution, by the ring algorithms."""
        return self.sent_bytes * ring_factor(self.kind, self.group_size)

    @property
    def is_known(self) -> bool:
        """Whether kind, axes and count are all certain."""
        return self.kind in KINDS and self.axes is not None and self.is_exact


def find_collectives(
    module: Module, mesh: Mapping[str, int], devices_per_server: int, ragged_share: float = 1.0
) -> list[Collective]:
    """Finds all collectives, in order of execution.

    Args:
      module: an optimized program.
      mesh: ways of each mesh axis, outermost first; places of the mesh are the program's partitions.
      devices_per_server: neighbours in the mesh that share a server.
      ragged_share: expected share of a ragged all-to-all's buffer that is sent.
    """
    candidates = (_collective(site, module, mesh, devices_per_server) for site in walk(module))
    found = [c for c in candidates if c is not None]
    return [replace(c, sent_share=ragged_share) if c.kind == RAGGED else c for c in found]


def _collective(site: Site, module: Module, mesh: Mapping[str, int], per_server: int) -> Collective | None:
    instruction = site.instruction
    kind = collective_kind(instruction)
    if kind is None:
        return None
    try:
        groups = parse_groups(instruction.attributes, module.num_partitions)
    except UserError:
        # Groups in an unknown syntax: as if of all devices, and axes None make it a violation.
        axes, groups = None, Groups((tuple(range(module.num_partitions)),))
    else:
        groups = groups or Groups((tuple(range(module.num_partitions)),))
        axes = axes_of(groups, mesh)
    # An operation without a "-start" of its own, such as an all-to-all, is inside an async-start, which has the name
    # and the place in the schedule.
    holder = starter(site)
    phase, op_name, has_own_name = locate(site.computation, instruction)
    if phase == "other" and holder is not site:
        phase, op_name, has_own_name = locate(holder.computation, holder.instruction)
    phase = _called_again(site, phase)
    # What surrounds it in the schedule may be another part of the step.
    by_axes = None if has_own_name else phase_over(kind, axes)
    phase = by_axes or phase
    # The operation itself, not its holder, has the operands.
    arrays = _payload(module, site.computation, instruction, kind)
    narrowed = widened_sums(module, site.computation, instruction) if kind in SUMS else ()
    window = overlap_window(holder.computation, holder.instruction) if is_started(holder.instruction) else ()
    return Collective(
        kind=kind,
        name=holder.instruction.name,
        axes=axes,
        # A rank of a permute talks to one other, whatever the number of pairs.
        group_size=groups.size if not groups.is_pairs else 2,
        servers=servers_spanned(groups, per_server),
        phase=phase,
        op_name=op_name,
        has_own_name=has_own_name,
        count=site.count,
        is_exact=site.is_exact,
        arrays=arrays,
        is_async=is_started(holder.instruction),
        hidden_behind=tuple(i.name for i in window if computes(i)),
        made_in=_made_in(module, site.computation, instruction) if kind in SUMS and not by_axes else (),
        # One operand that XLA put together from several arrays has one type.
        narrowed=narrowed * len(arrays) if len(narrowed) == 1 else narrowed,
    )


def _called_again(site: Site, phase: str) -> str:
    """Returns the phase of an operation that calls itself a layer's forward pass: another where a loop inside a layer
    runs it.

    What is lowered once, for the forward pass, may be called in the backward pass too, under the names of the former.
    """
    loops = [caller for caller in site.callers if caller.instruction.opcode == "while"]
    around = locate(loops[-1].computation, loops[-1].instruction)[0] if loops else phase
    return around if phase == LAYER_FORWARD and around in (LAYER_RECOMPUTE, LAYER_BACKWARD) else phase


def collective_kind(instruction: Instruction) -> str | None:
    """Returns the kind of a collective, "all-reduce" for `all-reduce-start` too; None for its `-done` and for other
    work.

    Operations that this reader does not know but that name devices or a channel count, under their own name.
    """
    opcode = instruction.opcode
    # The other half of what was counted at its start.
    if opcode.endswith(("-done", "-update")):
        return None
    base = opcode.removesuffix("-start")
    if base in KINDS:
        return base
    if opcode == "custom-call":
        target = instruction.attribute("custom_call_target") or ""
        return f"custom-call {target}" if _LIBRARY.search(target) else None
    # These print attributes of what they contain, which is walked by itself.
    if opcode not in ("async-start", "fusion", "call", "while") and _COMMUNICATES.search(instruction.attributes):
        return opcode
    return None


def starter(site: Site) -> Site:
    """Returns the place in the schedule at which a collective begins: the `async-start` around it, or itself."""
    wrapped = [c for c in site.callers if c.instruction.opcode == "async-start"]
    return wrapped[-1] if wrapped else site


def is_started(instruction: Instruction) -> bool:
    """Returns whether other work may run before this operation is done; GPU programs mark some starts as
    synchronous."""
    return instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes


def overlap_window(computation: Computation, start: Instruction) -> tuple[Instruction, ...]:
    """Returns the instructions scheduled between an operation's start and its done, which ends after `-update`s."""
    # Each "-update" passes its own name on to what finally ends the operation.
    ends, names = -1, {start.name}
    for position, instruction in enumerate(computation.instructions):
        if instruction.opcode.endswith(("-done", "-update")) and names & set(instruction.operands):
            ends = position
            names.add(instruction.name)
    begins = computation.instructions.index(start)
    return computation.instructions[begins + 1 : ends] if ends > begins else ()


def computes(instruction: Instruction) -> bool:
    """Returns whether an instruction keeps the device busy: not a view, a constant or a collective's other half."""
    if instruction.opcode in _IDLE or instruction.opcode.endswith(("-done", "-update")):
        return False
    return collective_kind(instruction) is None and instruction.opcode != "async-start"


def _payload(module: Module, computation: Computation, instruction: Instruction, kind: str) -> tuple[Array, ...]:
    operands = computation.operand_arrays(instruction)
    if kind == ALL_REDUCE and len(operands) == 1:
        return _packed(module, computation, instruction.operands[0]) or operands
    if kind == ALL_TO_ALL and len(operands) > 1 and not instruction.dimensions("dimensions"):
        # One operand for each rank: parts of the array that is exchanged.
        return (replace(operands[0], dims=(len(operands), *operands[0].dims)),)
    if kind == RAGGED and len(operands) > 1:  # rows, room for those that come, and four small tables
        return (max(operands[:2], key=lambda array: array.elements),)
    if kind != ALL_GATHER:
        return operands or instruction.arrays
    # A start's result is (operands, results).
    return instruction.arrays[len(operands) :] if instruction.opcode.endswith("-start") else instruction.arrays


def _made_in(module: Module, computation: Computation, instruction: Instruction) -> tuple[str | None, ...]:
    """Returns the phases of what makes the arrays of a sum of several; what is gathered may come from a phase
    before."""
    names = instruction.operands
    if len(names) == 1:
        names = _packed_names(module, computation, names[0])
    found = [computation.by_name.get(_seen_through(computation, name)) for name in names]
    located = [None if maker is None else locate(computation, maker) for maker in found]
    # A neighbour's phase would not be that of the array.
    return tuple(None if phase is None or not phase[2] else phase[0] for phase in located)


def _packed_names(module: Module, computation: Computation, name: str) -> tuple[str, ...]:
    """Returns the names of the arrays of which XLA has made a single one, as far as they come out of its fusion
    unchanged."""
    found = _packing(module, computation, name)
    if found is None:
        return ()
    packer, inside = found
    if inside is computation:
        return packer.operands
    read = (inside.by_name[_seen_through(inside, operand)] for operand in packer.operands)
    given = computation.by_name[name].operands
    return tuple(given[int(i.operands[0])] if i.opcode == "parameter" else "" for i in read)


def _seen_through(computation: Computation, name: str) -> str:
    """Returns what an array is a view of."""
    while (maker := computation.by_name.get(name)) is not None and maker.opcode in ("bitcast", "reshape"):
        name = maker.operands[0]
    return name


def _packed(module: Module, computation: Computation, name: str) -> tuple[Array, ...]:
    """Returns the arrays of which XLA has made a single one, to sum them in one operation; none where it has not."""
    found = _packing(module, computation, name)
    return found[1].operand_arrays(found[0]) if found else ()


def _packing(module: Module, computation: Computation, name: str) -> tuple[Instruction, Computation] | None:
    """Returns what makes one array of several, and the computation in which it stands: this, or that of a fusion."""
    maker = computation.by_name.get(name)
    # Or the fusion that concatenates them: its root, with parameters for what comes from outside.
    if maker is not None and maker.opcode == "fusion":
        computation = next(iter(module.callees(maker)), computation)
        maker = computation.root
    return (maker, computation) if maker is not None and maker.opcode == "concatenate" else None
