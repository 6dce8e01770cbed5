"""bf16 reductions in CPU programs: XLA promotes them to f32, and calls the reducer "..._promoted".

The program then sends f32, where a GPU would send bf16. XLA combines reductions after the promotion, and the combined
operation has the reducer of one of them. Therefore, of several arrays, those are counted as promoted that are converted
from bf16, and that all readers convert to bf16; where XLA has removed either conversion, the program does not show it.
"""

from collections.abc import Iterator

from mtjax.inspect.hlo import Computation, Instruction, Module

_PROMOTED = "_promoted"
_VIEWS = ("bitcast", "reshape", "copy", "transpose")
NARROW = "bf16"


def widened_sums(module: Module, computation: Computation, instruction: Instruction) -> tuple[bool, ...]:
    """Returns for each operand of an all-reduce or reduce-scatter whether it is a promoted bf16 reduction."""
    if len(instruction.operands) == 1:
        # With several operands, the reducer is that of one of them and tells nothing about the others.
        return ((instruction.attribute("to_apply") or "").endswith(_PROMOTED),)
    results: dict[int, str] = {}
    for user in computation.users.get(instruction.name, ()):
        if user.opcode == "get-tuple-element":
            results[int(user.attribute("index") or 0)] = user.name
    return tuple(
        number in results
        and _comes_out_of_bf16(module, computation, operand)
        and _is_rounded_by_all(module, computation, results[number])
        for number, operand in enumerate(instruction.operands)
    )


def _comes_out_of_bf16(module: Module, computation: Computation, name: str) -> bool:
    """Returns whether a value was converted from bf16."""
    made_by = _made_by(module, computation, name)
    return any(i.opcode == "convert" and _reads(inside, i) == NARROW for inside, i in made_by)


def _reads(computation: Computation, instruction: Instruction) -> str:
    arrays = computation.operand_arrays(instruction)
    return arrays[0].dtype if arrays else ""


def _made_by(module: Module, computation: Computation, name: str) -> Iterator[tuple[Computation, Instruction]]:
    """Yields the operation that computes a value, and those before it as long as they are views or conversions."""
    index = None
    while name in computation.by_name:
        instruction = computation.by_name[name]
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attribute("index") or 0)
        elif instruction.opcode == "fusion":
            computation = next(iter(module.callees(instruction)))
            root = computation.root
            # The index belongs to the get-tuple-element that read the fusion; inside, a new chain begins.
            name = root.operands[index] if index is not None and root.opcode == "tuple" else root.name
            index = None
            continue
        else:
            yield computation, instruction
            if instruction.opcode not in (*_VIEWS, "convert"):
                return
        name = instruction.operands[0]


def _is_rounded_by_all(module: Module, computation: Computation, name: str) -> bool:
    """Returns whether all readers of a value convert it to bf16."""
    users = computation.users.get(name, ())
    # A value without readers is not a rounded one: a result that leaves the computation has no users here.
    return bool(users) and all(_rounds(module, computation, user, name) for user in users)


def _rounds(module: Module, computation: Computation, user: Instruction, name: str) -> bool:
    if user.opcode == "convert":
        return user.arrays[0].dtype == NARROW
    if user.opcode in _VIEWS:
        return _is_rounded_by_all(module, computation, user.name)
    if user.opcode != "fusion":
        return False
    fused = next(iter(module.callees(user)))
    parameters = (p for p, operand in zip(fused.parameters, user.operands, strict=True) if operand == name)
    return all(_is_rounded_by_all(module, fused, parameter.name) for parameter in parameters)
