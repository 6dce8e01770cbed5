"""Where in the step an operation belongs, read from the scopes that jax leaves in `op_name`.

A path like `jit(step)/.../transpose(jvp(layers))/while/body/.../rematted_computation/mlp/dot_general` says: the
backward pass (`transpose`) of the layer scan, computing the forward pass again (`rematted_computation`), in the MLP.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator

from mtjax.inspect.hlo import Computation, Instruction
from mtjax.theory.contract import GRADIENTS, LAYER_RECOMPUTE, OPTIMIZER, OTHER, PARAMETERS, SAMPLING, STAGES

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
"""A branch on the stage: what stands in it belongs to the phase around it."""
_NEIGHBOURS = 60
"""How many instructions are asked, nearest first, when one has lost its own name."""


def phase_of(op_name: str) -> str | None:
    """The phase that a path of scopes names, by its innermost scope; None when it names none.

    Where XLA combined operations of several phases, the phase of most of them.
    """
    phases = Counter(phase for path in combined_paths(op_name) if (phase := _phase_of_path(path)))
    return phases.most_common(1)[0][0] if phases else None


def combined_paths(op_name: str) -> list[str]:
    """The paths of a combined operation: "jit(f)/(a/x:b/y)" is jit(f)/a/x and jit(f)/b/y."""
    colon = op_name.find(":")
    if colon < 0 or not op_name.endswith(")"):
        return [op_name]
    depth = 0
    for place in range(colon, -1, -1):
        depth += {")": 1, "(": -1}.get(op_name[place], 0)
        if depth < 0:
            return [op_name[:place] + path for path in op_name[place + 1 : -1].split(":")]
    return [op_name]


def _phase_of_path(path: str) -> str | None:
    scopes = _SCOPE.findall(_BRANCH.sub("", path))
    if not scopes:
        return None
    scope = _SCOPES[scopes[-1]]
    if scope in (GRADIENTS, OPTIMIZER, PARAMETERS, SAMPLING, STAGES):
        return scope
    if scope == "layer" and "rematted_computation" in path:
        return LAYER_RECOMPUTE
    return f"{scope} {'backward' if 'transpose(' in path else 'forward'}"


def locate(computation: Computation, instruction: Instruction) -> tuple[str, str, bool]:
    """Phase and path of an instruction, and whether the path is its own.

    XLA drops the names of operations that it combines or creates. Then the nearest producer or consumer that names a
    phase decides, producers first: a sum belongs to what it sums.
    """
    phase = phase_of(instruction.op_name)
    if phase or instruction.op_name:
        return phase or OTHER, instruction.op_name, True
    for neighbour in _nearest(computation, instruction):
        phase = phase_of(neighbour.op_name)
        if phase:
            return phase, neighbour.op_name, False
    return OTHER, "", False


def _nearest(computation: Computation, start: Instruction) -> Iterator[Instruction]:
    """Instructions around one, by distance. Ends at the computation's edges, and at loops: those that name a phase are
    what XLA has moved a sum out of."""
    queue, seen = deque([start]), {start.name}
    while queue and len(seen) < _NEIGHBOURS:
        current = queue.popleft()
        producers = [computation.by_name[n] for n in current.operands if n in computation.by_name]
        for neighbour in (*producers, *computation.users.get(current.name, ())):
            if neighbour.name in seen or neighbour.opcode in ("parameter", "tuple", "constant"):
                continue
            seen.add(neighbour.name)
            if neighbour.opcode != "while":
                queue.append(neighbour)
            yield neighbour
