"""Phase of the step of an operation, read from the scopes that jax writes to `op_name`.

A path like `jit(step)/.../transpose(jvp(layers))/while/body/.../rematted_computation/mlp/dot_general` is in the
backward pass (`transpose`) of the layer scan, in the recompute (`rematted_computation`) of the MLP.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator

from mtjax.analysis.contract import GRADIENTS, LAYER_RECOMPUTE, OPTIMIZER, OTHER, PARAMETERS, SAMPLING, STAGES
from mtjax.inspect.hlo import Computation, Instruction

_SCOPES = {
    "embedding": "embedding",
    "layers": "layer",
    "loss": "loss",
    "gradients": GRADIENTS,
    "optimizer": OPTIMIZER,
    "parameters": PARAMETERS,
    "sampling": SAMPLING,
    "stages": STAGES,
}
_SCOPE = re.compile(rf"(?<![\w.])({'|'.join(_SCOPES)})(?![\w.=])")
_BRANCH = re.compile(r"(?:transpose\(|jvp\()*stages\)*/cond(?=/branch_)")
"""A branch on the stage: operations in it have the phase around it."""
_NEIGHBOURS = 60
"""Most neighbours that are searched for the phase of an instruction without a name, nearest first."""


def phase_of(op_name: str) -> str | None:
    """Returns the phase that a path of scopes names, by its innermost scope; None when it names none.

    Where XLA combined operations of several phases, the phase of most of them.
    """
    phases = Counter(phase for path in combined_paths(op_name) if (phase := _phase_of_path(path)))
    return phases.most_common(1)[0][0] if phases else None


def combined_paths(op_name: str) -> list[str]:
    """Returns the paths of a combined operation: "jit(f)/(a/x:b/y)" is jit(f)/a/x and jit(f)/b/y."""
    colon = op_name.find(":")
    if colon < 0 or not op_name.endswith(")"):
        return [op_name]
    # The parenthesis that holds the list: paths have others before it, as in "transpose(jvp(layers))".
    depth = 0
    for i in range(colon, -1, -1):
        depth += {")": 1, "(": -1}.get(op_name[i], 0)
        if depth < 0:
            return [op_name[:i] + path for path in op_name[i + 1 : -1].split(":")]
    return [op_name]


def _phase_of_path(path: str) -> str | None:
    scopes = _SCOPE.findall(_BRANCH.sub("", path))
    if not scopes:
        return None
    scope = _SCOPES[scopes[-1]]
    if scope in (GRADIENTS, OPTIMIZER, PARAMETERS, SAMPLING, STAGES):
        return scope
    # jax's name for what `jax.checkpoint` computes again.
    if scope == "layer" and "rematted_computation" in path:
        return LAYER_RECOMPUTE
    # A backward pass is the transpose of the linearized forward pass, and jax writes that into names.
    return f"{scope} {'backward' if 'transpose(' in path else 'forward'}"


def locate(computation: Computation, instruction: Instruction) -> tuple[str, str, bool]:
    """Returns the phase and path of an instruction, and whether the path is that of the instruction itself.

    XLA drops the names of operations that it combines or creates. Then the nearest producer or consumer that names a
    phase decides, producers first: a reduction has the phase of its operands.
    """
    phase = phase_of(instruction.op_name)
    # An operation with a name that tells no phase is outside of all phases; asking its neighbours would put it into
    # one.
    if phase or instruction.op_name:
        return phase or OTHER, instruction.op_name, True
    for neighbour in _nearest(computation, instruction):
        phase = phase_of(neighbour.op_name)
        if phase:
            return phase, neighbour.op_name, False
    return OTHER, "", False


def _nearest(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    """Yields the instructions around one, by distance, up to the computation's edges and loops."""
    # XLA: hoists reductions out of loops, so that the phase of a loop next to one is the reduction's.
    queue, seen = deque([start]), {start.name}
    while queue and len(seen) < _NEIGHBOURS:
        current = queue.popleft()
        producers = [computation.by_name[n] for n in current.operands if n in computation.by_name]
        for neighbour in (*producers, *computation.users.get(current.name, ())):
            # These join values of all parts of a step: across them the search would find the phase of something
            # unrelated.
            if neighbour.name in seen or neighbour.opcode in ("parameter", "tuple", "constant"):
                continue
            seen.add(neighbour.name)
            if neighbour.opcode != "while":
                queue.append(neighbour)
            yield neighbour
