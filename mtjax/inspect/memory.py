"""Bytes per device: what the compiler planned, split as far as the program shows, and the formulas."""

from dataclasses import dataclass, replace

from mtjax.config import Model
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo import Array, Module
from mtjax.theory.counts import trainable_counts
from mtjax.theory.memory import Memory, stage_memory
from mtjax.theory.teacher_cost import table_bytes, weight_bytes


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    parameters: int
    """Part of the arguments."""
    optimizer: int
    """Part of the arguments."""
    other_arguments: int
    """Batch, step counter, random key."""
    gradients: int
    """Part of the temporaries: one float32 copy of what this device sums; by count, not read from the compiler."""
    activations: int
    """The rest of the temporaries: activations and workspaces."""
    capacity: int | None
    """Bytes that the target's device has; None when unknown."""
    formula: Memory
    """What the formulas say about the same plan."""
    beside: int = 0
    """Weights of a teacher that lie there without being the step's, by formula."""

    @property
    def fits(self) -> bool | None:
        """Whether the peak, with what lies beside it, is within the capacity; None when that is unknown."""
        return None if self.capacity is None else self.peak + self.beside <= self.capacity


def memory_report(step: CompiledStep, capacity: int | None, teacher: Model | None = None) -> MemoryReport:
    """The memory of a compiled step.

    Args:
      step: any compiled step.
      capacity: bytes of the device that will run it, or None.
      teacher: whose output table alone the step reads.
    """
    stats = step.memory
    arguments = argument_arrays(step.module)
    parameters = sum(a.bytes for name, a in arguments if name.startswith("state.parameters"))
    optimizer = sum(a.bytes for name, a in arguments if name.startswith("state.optimizer"))
    plan = step.plan
    moments = plan.precision.optimizer / plan.precision.gradients  # of a gradient's size
    in_parts = plan.zero > 0 and plan.reduces_in_backward
    whole = plan.precision.gradients * trainable_counts(step.anatomy, plan).all
    gradients = min(int(optimizer / moments) if in_parts else whole, stats.temporaries)
    return MemoryReport(
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
        formula=stage_memory(step.anatomy, plan),
        beside=round(weight_bytes(replace(plan, teacher=teacher)) - table_bytes(step.anatomy, plan)) if teacher else 0,
    )


def argument_arrays(module: Module) -> list[tuple[str, Array]]:
    """Name and local array of each of the program's arguments: "state.parameters['embedding']"."""
    return [(p.op_name, array) for p in module.entry.parameters for array in p.arrays]
