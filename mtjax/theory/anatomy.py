"""The parts of a model: those before its stacks of layers, the stacks, and those after them."""

from collections.abc import Iterator
from dataclasses import dataclass

from mtjax.config import Model
from mtjax.theory.layout import LAYERS
from mtjax.theory.parts.part import Part, Weight


@dataclass(frozen=True, eq=False)
class Stack:
    """Layers that are alike."""

    path: str
    """Dotted name of the stack's parameters."""
    layers: int
    tokens: int
    """Tokens of a sample."""
    hidden: int
    """Width of the residual stream."""
    parts: tuple[Part, ...]
    """The parts of a layer, in the order in which they run."""
    side: str = ""
    """Prefix of the words of its sizes in formulas."""
    is_post_norm: bool = False
    """A norm follows each residual add, and needs its input again in the backward pass."""
    numbers: tuple[int, ...] = ()
    """Of its layers, among those of all stacks of its section; 0, 1, ... when empty."""
    among: int | None = None
    """Layers of all stacks of its section; its own when None."""
    is_encoder: bool = False
    """Whether it has read a text before another stack begins to write."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in the model."""
        return self.numbers or tuple(range(self.layers))

    @property
    def weights(self) -> list[Weight]:
        """Stacked along `layers`, by their names in the model."""
        return [
            Weight(f"{self.path}.layers.{w.name}", (LAYERS, *w.names), (self.layers, *w.shape))
            for part in self.parts
            for w in part.weights
        ]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a model. `mtjax.theory.families.registry.anatomy_of` makes only one for each model, which can so be
    compared, and used as a key of caches, by identity."""

    model: Model
    embed: tuple[Part, ...]
    stacks: tuple[Stack, ...]
    head: tuple[Part, ...]

    @property
    def outside(self) -> tuple[Part, ...]:
        """The parts that are not in layers."""
        return (*self.embed, *self.head)

    @property
    def sections(self) -> tuple[tuple[Stack, ...], ...]:
        """The stacks of each section: sections run one after the other, the layers of one's stacks by their numbers."""
        together = tuple(stack for stack in self.stacks if stack.among is not None)
        return (together,) if together else tuple((stack,) for stack in self.stacks)

    @property
    def decoder_stacks(self) -> tuple[Stack, ...]:
        """Those that read what is written."""
        return tuple(stack for stack in self.stacks if not stack.is_encoder)

    @property
    def weights(self) -> list[Weight]:
        """Every parameter of the model, by its dotted name, with logical names and shape."""
        stacked = [w for stack in self.stacks for w in stack.weights]
        return [*(w for part in self.outside for w in part.weights), *stacked]

    def layer_parts(self) -> Iterator[tuple[Stack, Part]]:
        """The parts of a layer of every stack."""
        return ((stack, part) for stack in self.stacks for part in stack.parts)
