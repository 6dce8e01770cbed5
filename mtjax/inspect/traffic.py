"""Memory traffic of an operation: bytes of operands and results, of slices only the slice."""

from mtjax.inspect.hlo import Computation, Instruction, Module

# Inside a kernel these happen in registers: what counts are the bytes of the array that comes from memory.
_VIEWS = ("bitcast", "reshape", "copy", "convert")


_ONE_SCATTER = 3
"""Operands of a scatter into one array: the array, indices, and updates."""


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Returns the bytes read and written by one execution of an operation."""
    if instruction.opcode == "fusion":
        fused = next(iter(module.callees(instruction)), None)
        if fused is not None:
            return _fusion(fused)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        # The slice is read and written; its operand may be the stack of all layers, of which nothing else is touched.
        return 2 * instruction.bytes
    if instruction.opcode == "dynamic-update-slice":
        # XLA updates in place where it can, and in the stacks of loops it can.
        return 2 * computation.by_name[instruction.operands[1]].bytes
    # A broadcast reads next to nothing.
    if instruction.opcode in ("iota", "broadcast", "partition-id"):
        return instruction.bytes
    return instruction.bytes + sum(a.bytes for a in computation.operand_arrays(instruction))


def _fusion(fused: Computation) -> int:
    """Returns the bytes that a fused kernel reads of its parameters, and writes."""
    return sum(_read(fused, p) for p in fused.parameters) + _written(fused, fused.root)


def _read(fused: Computation, value: Instruction) -> int:
    """Returns the bytes read of a value: the slices, where all its users only slice it; in its own type, also where it
    is converted first."""
    users = fused.users.get(value.name, ())
    if not users:
        return _written(fused, value) if value.name == fused.root.name else 0
    read = 0
    for user in users:
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            read += user.bytes
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            # In place it reads nothing. Otherwise it is computed in registers, and what reads it reads the array.
            read += 0 if _is_result(fused, user) else _read(fused, user)
        elif user.opcode == "scatter" and user.operands[0] == value.name and len(user.operands) == _ONE_SCATTER:
            read += fused.by_name[user.operands[2]].bytes  # the rows to which updates are added
        elif user.opcode in _VIEWS and user.arrays[0].elements == value.arrays[0].elements:
            # Scaled to this value's type: after a conversion to float32 the same elements have twice the bytes.
            read += _read(fused, user) * value.bytes // max(user.bytes, 1)
        else:
            return value.bytes
    return min(read, value.bytes)


def _is_result(fused: Computation, value: Instruction) -> bool:
    """Returns whether a value, or a view of it, is a result of the kernel, and nothing else in the kernel reads it."""
    users = fused.users.get(value.name, ())
    return all(user.opcode == "tuple" or (user.opcode == "bitcast" and _is_result(fused, user)) for user in users)


def _is_parameter(fused: Computation, name: str) -> bool:
    """Returns whether a value is a parameter of the kernel, or a view of one, and so may be written in place."""
    value = fused.by_name[name]
    while value.opcode in _VIEWS and value.operands[0] in fused.by_name:
        value = fused.by_name[value.operands[0]]
    return value.opcode == "parameter"


def _written(fused: Computation, root: Instruction) -> int:
    """Returns the bytes that a fused kernel writes; updates in place count as the updated part."""
    if root.opcode == "tuple":
        return sum(_written(fused, fused.by_name[name]) for name in root.operands)
    if root.opcode == "dynamic-update-slice":
        return fused.by_name[root.operands[1]].bytes
    if root.opcode == "scatter" and len(root.operands) == _ONE_SCATTER and _is_parameter(fused, root.operands[0]):
        return fused.by_name[root.operands[2]].bytes
    if root.opcode == "bitcast" and root.operands[0] in fused.by_name:
        return _written(fused, fused.by_name[root.operands[0]])
    # Passed through, not written.
    if root.opcode == "parameter":
        return 0
    return root.bytes
