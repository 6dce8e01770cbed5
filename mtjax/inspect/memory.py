"""Memory per device: the compiler's allocation, divided by kind as far as the program shows it, and the formulas."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from mtjax.analysis.counts import trainable_counts
from mtjax.analysis.memory import Memory, stage_memory
from mtjax.analysis.optimizer import exposed_host_bytes, host_bytes, host_reads
from mtjax.analysis.teacher_cost import table_bytes, weight_bytes
from mtjax.config import Model
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo import Array, Module
from mtjax.inspect.host_copies import exposed_bytes, host_copies, hosted_arguments
from mtjax.layout.gpu_memory import USABLE_MEMORY


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    parameters: int
    """Included in `arguments`."""
    optimizer: int
    """Included in `arguments`."""
    other_arguments: int
    """Batch, step counter, random key."""
    gradients: int
    """Included in `temporaries`: one float32 copy of the device's gradients; by count, not read from the compiler."""
    activations: int
    """Remaining temporaries: activations and workspaces."""
    capacity: int | None
    """Memory of the target's device; None when unknown."""
    formula: Memory
    """Memory of the same plan by formula."""
    host: int = 0
    """States in the host's memory."""
    host_reads: int = 0
    """Bytes that a step reads from the host's memory."""
    host_writes: int = 0
    """Bytes that a step writes to the host's memory."""
    host_formula: int = 0
    """Of `host` and `host_writes`, by formula."""
    host_reads_formula: int = 0
    """Of `host_reads`, by formula."""
    host_exposed: int = 0
    """Bytes on their way while a step waits for them; of two that cross in opposite directions, those of the longer."""
    host_exposed_formula: int = 0
    """Of `host_exposed`, by formula."""
    beside: int = 0
    """A teacher's weights on the device that are not arguments of the step, by formula."""

    @property
    def usable(self) -> int | None:
        """Bytes of the capacity that a run may take, as in training and planning; None when the capacity is unknown."""
        return None if self.capacity is None else int(USABLE_MEMORY * self.capacity)

    @property
    def fits(self) -> bool | None:
        """Whether the peak, with `beside`, is within `usable`; None when that is unknown."""
        return None if self.usable is None else self.peak + self.beside <= self.usable


def memory_report(step: CompiledStep, capacity: int | None, teacher: Model | None = None) -> MemoryReport:
    """Returns the memory of a compiled step.

    Args:
      step: any compiled step.
      capacity: bytes of the device that will run it, or None.
      teacher: the teacher's model, of which the step reads the output table only.
    """
    stats = step.memory
    hosted = hosted_arguments(step.text) if stats.host else set[str]()
    arguments = argument_arrays(step.module, without=hosted)
    parameters = sum(a.bytes for name, a in arguments if name.startswith("state.parameters"))
    optimizer = sum(a.bytes for name, a in arguments if name.startswith("state.optimizer"))
    plan = step.plan
    formula = stage_memory(step.anatomy, plan)
    # A gradient is sharded like the moments, so one optimizer array's bytes are those of the gradients. Other
    # optimizers have moments of other shapes.
    moments = plan.precision.optimizer / plan.precision.gradients  # of a gradient's size
    is_plain = plan.optimizer.name == "adamw" and not plan.offloads_optimizer
    shard = optimizer / moments if is_plain else formula.gradients
    are_sharded = plan.zero > 0 and plan.reduces_in_backward
    full = plan.precision.gradients * trainable_counts(step.anatomy, plan).all
    # The compiler's temporaries are one number, so gradients are counted and the rest is called activations, which must
    # not become negative.
    gradients = min(int(shard) if are_sharded else full, stats.temporaries)
    reads, writes = host_copies(step.text, step.module)
    return MemoryReport(
        host=stats.host,
        host_reads=reads,
        host_writes=writes,
        host_formula=round(host_bytes(step.anatomy, plan)),
        host_reads_formula=round(host_reads(step.anatomy, plan)),
        host_exposed=exposed_bytes(step.text, step.module),
        host_exposed_formula=round(exposed_host_bytes(step.anatomy, plan)),
        arguments=stats.arguments,
        outputs=stats.outputs,
        aliased=stats.aliased,
        temporaries=stats.temporaries,
        peak=stats.peak,
        parameters=parameters,
        optimizer=optimizer,
        other_arguments=stats.arguments - parameters - optimizer,
        gradients=gradients,
        activations=stats.temporaries - gradients,
        capacity=capacity,
        formula=formula,
        beside=round(weight_bytes(replace(plan, teacher=teacher)) - table_bytes(step.anatomy, plan)) if teacher else 0,
    )


def argument_arrays(module: Module, without: Collection[str] = ()) -> list[tuple[str, Array]]:
    """Returns the name and local array of each of the program's arguments, "state.parameters['embedding']", but of
    those whose names in the program are `without`."""
    return [(p.op_name, array) for p in module.entry.parameters if p.name not in without for array in p.arrays]


def host_violations(memory: MemoryReport, *, saves_inputs: bool = False) -> list[str]:
    """Returns one sentence for each difference of the copies from and to the host's memory from the formula.

    Args:
      memory: of the step.
      saves_inputs: whether layers' inputs are saved there as well, whose copies no formula has.
    """
    found = {"keeps": (memory.host, memory.host_formula)}
    if not saves_inputs:
        found["reads"] = memory.host_reads, memory.host_reads_formula
        found["writes"] = memory.host_writes, memory.host_formula
    violations = [
        f"a step {does} {size:,} bytes of the host's memory instead of {formula:,}"
        for does, (size, formula) in found.items()
        # To the byte: a state that silently stays on the device, or is copied twice, has no other symptom than time.
        if size != formula
    ]
    if not saves_inputs and memory.host_exposed > memory.host_exposed_formula:
        violations.append(
            f"a step waits for {memory.host_exposed:,} bytes from and to the host's memory instead of "
            f"{memory.host_exposed_formula:,}: reads and writes do not overlap"
        )
    return violations
