"""Assignment of layers to pipeline stages, and the order in which their parameters are stacked."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

from mtjax.config import Model, Parallel
from mtjax.config.layer_pattern import common_pattern
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.stacks import LayerStack, stacks_of

PADDING = -1
"""In place of a layer's number: an empty slot of a stage that has fewer layers than others."""


@dataclass(frozen=True)
class LayerOrder:
    """The layers of a stack on the pipeline stages.

    All stages have the same number of slots for layers, so that a mesh axis can shard the stack; empty slots are
    skipped.
    """

    numbers: tuple[tuple[tuple[int, ...], ...], ...]
    """[stage][chunk][slot]: number of the layer in the model, or `PADDING`."""
    pattern: str = ""
    """Letters of the slots of a chunk of its section, where that has several stacks."""

    @property
    def flat(self) -> tuple[int, ...]:
        """Numbers of the layers in the order in which their parameters are stacked: stage by stage."""
        return tuple(number for stage in self.numbers for chunk in stage for number in chunk)

    @property
    def num_slots(self) -> int:
        """Slots for layers in a chunk."""
        return len(self.numbers[0][0])

    @property
    def is_padded(self) -> bool:
        """Whether some stages have fewer layers than others."""
        return PADDING in self.flat

    @property
    def is_plain(self) -> bool:
        """Whether parameters are stacked in the order of the layers."""
        return not self.is_padded and list(self.flat) == sorted(self.flat)

    def chunk_pattern(self, pattern: str) -> str:
        """Returns the letters of the slots of a chunk, in a section with this pattern: the same for all chunks, as all
        stages run one program, with the layers of each."""
        chunks = range(len(self.numbers[0]))
        # Chunk by chunk, as the layers follow each other in the model.
        each = (self.numbers[stage][chunk] for chunk in chunks for stage in range(len(self.numbers)))
        return common_pattern(tuple("".join(pattern[n] for n in chunk if n != PADDING) for chunk in each))

    def of(self, letter: str, pattern: str) -> "LayerOrder":
        """Returns the order of the layers of one letter, in a section with this pattern."""
        slots = self.chunk_pattern(pattern)

        def with_padding(chunk: tuple[int, ...]) -> tuple[int, ...]:
            """Puts each layer into the next slot of its letter; returns the numbers in the slots of `letter`."""
            waiting = [number for number in chunk if number != PADDING]
            # `slots` has the letters of every chunk in their order, so that no layer is left over.
            numbers = [waiting.pop(0) if waiting and pattern[waiting[0]] == slot else PADDING for slot in slots]
            return tuple(number for number, slot in zip(numbers, slots, strict=True) if slot == letter)

        return LayerOrder(tuple(tuple(map(with_padding, stage)) for stage in self.numbers), slots)

    @property
    def in_stack(self) -> "LayerOrder":
        """The order with layers numbered in their stack: 0, 1, 2 ..."""
        # Numbers of layers in the model have gaps where other stacks have layers.
        index = {number: i for i, number in enumerate(sorted(set(self.flat) - {PADDING}))} | {PADDING: PADDING}
        return LayerOrder(tuple(tuple(tuple(map(index.__getitem__, c)) for c in stage) for stage in self.numbers))

    @cached_property
    def layers_of_chunks(self) -> tuple[int, ...]:
        """Layers of each chunk, without empty slots: stage by stage."""
        return tuple(sum(number != PADDING for number in chunk) for stage in self.numbers for chunk in stage)

    def layers_on(self, stage: int) -> int:
        """Returns the number of layers of a stage."""
        return sum(number != PADDING for chunk in self.numbers[stage] for number in chunk)


@cache
def layer_order(layers: int, stages: int = 1, chunks: int = 1, per_stage: tuple[int, ...] | None = None) -> LayerOrder:
    """Returns the order of a section's layers: chunk by chunk over the stages.

    Args:
      layers: of the section.
      stages: of the pipeline.
      chunks: of each stage.
      per_stage: layers of each stage, each a multiple of `chunks`; equal shares when None.
    """
    counts = per_stage or (layers // stages,) * stages
    # All stages have the slots of the largest, as a mesh axis shards the stack in equal parts.
    slots, first = max(counts) // chunks, 0
    numbers: list[list[tuple[int, ...]]] = [[() for _ in range(chunks)] for _ in range(stages)]
    for chunk in range(chunks):
        for stage, count in enumerate(counts):
            layer_range = range(first, first + count // chunks)
            numbers[stage][chunk] = (*layer_range, *(PADDING,) * (slots - len(layer_range)))
            first += len(layer_range)
    return LayerOrder(tuple(tuple(stage) for stage in numbers))


def balanced_layers(layers: int, stages: int, chunks: int = 1) -> tuple[int, ...] | None:
    """Returns the layers of each stage, as equal as possible; None if no multiples of `chunks` add up to `layers`."""
    groups, remainder = divmod(layers, chunks)
    share, larger = divmod(groups, stages)
    if remainder or not share:
        return None
    # Stages in the middle have the larger share: the first also has the embedding, and the last the losses.
    from_middle = sorted(range(stages), key=lambda stage: abs(2 * stage - stages + 1))
    return tuple(chunks * (share + (stage in from_middle[:larger])) for stage in range(stages))


@cache
def stack_order(
    stack: LayerStack, stages: int = 1, chunks: int = 1, per_stage: tuple[int, ...] | None = None
) -> LayerOrder:
    """Returns the order of a stack's layers, with its section distributed over the stages as in `layer_order`."""
    if stack.pattern:
        return layer_order(len(stack.pattern), stages, chunks, per_stage).of(stack.letter, stack.pattern)
    # Retro's stacks run on one stage.
    return LayerOrder(((stack.numbers,),)) if stack.numbers else layer_order(stack.layers, stages, chunks, per_stage)


def order_in_plan(stack: LayerStack, plan: Plan) -> LayerOrder:
    """Returns the order of a stack's layers on the stages of a plan."""
    return stack_order(stack, plan.mesh.stage, plan.chunks, plan.layers_per_stage)


def layers_in_chunk(stack: LayerStack, plan: Plan) -> int:
    """Returns the slots for a stack's layers in a chunk; without pipeline, or in Megatron, all layers of a stage."""
    if not plan.is_staged:
        return -(-stack.layers // plan.mesh.stage)
    return order_in_plan(stack, plan).num_slots


def layers_of_chunks(section: tuple[LayerStack, ...], plan: Plan) -> list[tuple[int, ...]]:
    """Returns how many layers of each stack of a section every chunk runs, without empty slots, stage by stage; without
    pipeline, or in Megatron, those of a stage."""
    if not plan.is_staged:
        return [tuple(layers_in_chunk(stack, plan) for stack in section)]
    return list(zip(*(order_in_plan(stack, plan).layers_of_chunks for stack in section), strict=True))


def layers_of_stage(stack: LayerStack, plan: Plan) -> int:
    """Returns the slots for a stack's layers on a stage, those of all its chunks."""
    return layers_in_chunk(stack, plan) * (plan.chunks if plan.is_staged else 1)


def layer_numbers(model: Model, name: str) -> tuple[int, ...]:
    """Returns the numbers of the layers whose parameters an array stacks, by its dotted name; () if it stacks none."""
    return next((stack.layer_numbers for stack in stacks_of(model) if f".{stack.path}.layers." in f".{name}"), ())


Orders = Mapping[str, LayerOrder]
"""Dotted name of a stack's parameters -> order."""

PLAIN: Orders = MappingProxyType({})
"""Every stack in the order of its layers."""


def layer_orders(model: Model, parallel: Parallel) -> Orders:
    """Returns the orders of the stacks of a run that are not in the order of their layers; layers count from 0 in each
    stack."""
    stages = parse_mesh(parallel.mesh).stage
    # Without stages every stack is in the model's order, and checkpoints need no entry.
    orders = {
        stack.path: stack_order(stack, stages, parallel.chunks, parallel.layers_per_stage).in_stack
        for stack in stacks_of(model)
        if stages > 1
    }
    return {path: order for path, order in orders.items() if not order.is_plain}


def order_of(name: str, orders: Orders) -> LayerOrder | None:
    """Returns the order in which an array's layers are stacked, by its dotted name; None for the layers' order."""
    return next((order for path, order in orders.items() if f".{path}.layers." in f".{name}"), None)
