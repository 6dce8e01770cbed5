"""Computing time of the layers of each kind, in models whose layers differ: read off the scopes of operations."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mtjax.analysis.anatomy import StackParts
from mtjax.analysis.contract import LAYER_PHASES
from mtjax.inspect.causes import executed
from mtjax.inspect.phases import locate
from mtjax.inspect.roofline import Roofline
from mtjax.inspect.units import duration
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_of_stage


class KindTime(NamedTuple):
    """The layers of a kind in a step, on one device."""

    letter: str
    """Of the kind in the pattern."""
    layers: int
    """On the device."""
    seconds: float
    """Of all of them, in all microbatches: forward and backward with recompute, without collectives."""
    runs: int
    """Layers x microbatches."""

    @property
    def each(self) -> float:
        """Seconds of a layer and microbatch."""
        return self.seconds / self.runs


def time_of_kinds(roofline: Roofline, stacks: Sequence[StackParts], plan: Plan) -> dict[str, KindTime]:
    """Returns the computing time of each kind of layers, by the name of their stack; {} where all layers are alike."""
    # T5's two stacks have no letters by which a table could name them.
    if len(stacks) == 1 or not all(stack.pattern for stack in stacks):
        return {}
    scope, seconds = scope_pattern([stack.path for stack in stacks]), Counter[str]()
    for computation, instruction, times, _ in executed(roofline, roofline.module.entry, 1, in_loop=False):
        phase, path, _ = locate(computation, instruction)
        # Casts and slices of parameters that a loop over layers prefetches are in its scope, too.
        if phase in LAYER_PHASES and (found := scope.search(path)):
            seconds[found[1]] += times * roofline.seconds(computation, instruction)[0]  # pyright: ignore[reportArgumentType]
    return {stack.path: _kind_time(stack, seconds, plan) for stack in stacks}


def _kind_time(stack: StackParts, seconds: Mapping[str, float], plan: Plan) -> KindTime:
    layers = layers_of_stage(stack, plan)
    return KindTime(stack.letter, layers, seconds.get(stack.path, 0.0), layers * plan.microbatches)


def scope_pattern(names: Sequence[str]) -> re.Pattern[str]:
    """Returns what finds the first of these scopes in a path of scopes: a mixer in a layer may have the name of another
    kind of layers."""
    # In the loops over layers, jax writes "jvp(layers)/while/body/closed_call/checkpoint/mamba/mamba/dot_general".
    return re.compile(rf"layers\)*/(?:[^:]*?/)??(?:\w+\()*({'|'.join(map(re.escape, names))})\)*/")


def kinds_text(kinds: Mapping[str, KindTime], step: float) -> str:
    """Returns the text on the computing time of each kind of layers, of a step of so many seconds."""
    each = (
        f"{name} ({kind.letter}) {duration(kind.each)}, {kind.layers} layers {kind.seconds / step:.1%}"
        for name, kind in sorted(kinds.items(), key=lambda item: -item[1].seconds)
    )
    return f"computing of a layer and microbatch, forward and backward, and share of the step: {'; '.join(each)}"
