"""Components of a model: those before its stacks of layers, the stacks, and those after them."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from mtjax.analysis.parts.part import Part, Weight
from mtjax.config import Model
from mtjax.config.adapters import is_trainable
from mtjax.config.sizes import layer_parallel, norms_outputs
from mtjax.families.registry import FAMILIES, load_part
from mtjax.layout.layouts import LAYERS
from mtjax.layout.stacks import LayerStack


@dataclass(frozen=True, eq=False, kw_only=True)
class StackParts(LayerStack):
    """A stack of equal layers with the components of one."""

    hidden: int
    """Width of the residual stream."""
    parts: tuple[Part, ...]
    """Components of a layer, in the order in which they run."""
    norms_outputs: bool = False
    """Whether a norm follows each sublayer, or each residual add, and needs its input in the backward pass."""
    idle: int = 0
    """Layers without a backward pass, because nothing in them and below them is trained."""
    parallel: str = "no"
    """The setting parallel_residual: whether the components read the same hidden states."""

    @classmethod
    def of(cls, stack: LayerStack, model: Model, *parts: Part) -> "StackParts":
        """Returns a model's stack with the components of a layer."""
        rest = {"hidden": model.hidden_size, "parts": parts, "parallel": layer_parallel(model, stack.path)}
        return cls(**vars(stack), **rest, norms_outputs=norms_outputs(model))

    def learning_layers(self, stages: int) -> int:
        """Returns how many layers of a stage have a backward pass: stages send each other every gradient."""
        return self.layers // stages - (self.idle if stages == 1 else 0)

    @property
    def sublayers(self) -> tuple[Part, ...]:
        """The components of a layer that add to the residual stream."""
        return self.parts

    @property
    def unread(self) -> tuple[Part, ...]:
        """The components of a layer whose outputs its backward pass does not need."""
        if self.norms_outputs:
            return ()
        # The next sublayer's norm reads a sublayer's output. That of the last one is read by the next layer alone, and
        # the input of each layer is saved.
        return self.sublayers[-1:] if self.parallel == "no" else self.sublayers

    def joined(self, part: Part) -> dict[str, bool]:
        """Returns what of a component of a parallel layer is summed with the next one's: `ResidualStream`'s fields."""
        is_first = part is self.parts[0] and self.parallel != "no"
        return {"joins_output": is_first, "joins_input": is_first and self.parallel == "one_norm"}

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Its parameters, stacked along `layers`, with their names in the model."""
        return tuple(
            Weight(f"{self.path}.layers.{w.name}", (LAYERS, *w.names), (self.layers, *w.shape))
            for part in self.parts
            for w in part.weights
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Predictors(StackParts):
    """Layers of multi-token prediction, which are not stacked: each is a module of its own, and runs with the head. The
    first component of a layer combines its inputs."""

    @property
    def sublayers(self) -> tuple[Part, ...]:
        """The components after the first one."""
        return self.parts[1:]

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Their parameters, with their names in the model: `mtp_1.projection.weight`, `mtp_1.layer.mlp.up.weight`."""
        combined, *layer = self.parts
        names = {w.name: w for w in combined.weights}
        names |= {f"layer.{w.name}": w for part in layer for w in part.weights}
        numbers = range(1, self.layers + 1)
        return tuple(Weight(f"{self.path}{k}.{name}", w.names, w.shape) for k in numbers for name, w in names.items())


@dataclass(frozen=True, eq=False)
class Anatomy:
    """Components of a model. `anatomy_of` builds one for each model, which is compared, and used as a key of caches, by
    identity."""

    model: Model
    embed: tuple[Part, ...]
    stacks: tuple[StackParts, ...]
    head: tuple[Part, ...]
    predictors: Predictors | None = None
    """Layers of multi-token prediction; their lookups and losses are among the components of the head."""

    @cached_property
    def outside_weights(self) -> tuple[Weight, ...]:
        """Parameters outside the stacks, of which every pipeline stage has all."""
        ahead = self.predictors.weights if self.predictors else ()
        return (*(w for part in self.outside for w in part.weights), *ahead)

    @property
    def all_stacks(self) -> tuple[StackParts, ...]:
        """The stacks, and the layers of multi-token prediction."""
        return (*self.stacks, *([self.predictors] if self.predictors else []))

    @property
    def outside(self) -> tuple[Part, ...]:
        """The components outside the layers."""
        return (*self.embed, *self.head)

    @property
    def sections(self) -> tuple[tuple[StackParts, ...], ...]:
        """The stacks of each section: sections run one after the other, the layers of a section by their numbers."""
        of_one_section = tuple(stack for stack in self.stacks if stack.among is not None)
        return (of_one_section,) if of_one_section else tuple((stack,) for stack in self.stacks)

    @property
    def sent_with_streams(self) -> int:
        """Arrays of a stream's size that pipeline stages send with it: embeddings that shared blocks read."""
        return int(any(part.is_read_by_layers for part in self.embed))

    @property
    def decoder_stacks(self) -> tuple[StackParts, ...]:
        """The stacks of the decoder, which generation runs for every token."""
        return tuple(stack for stack in self.stacks if not stack.is_encoder)

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every parameter of the model, by its dotted name, with logical names and shape."""
        stacked = [w for stack in self.stacks for w in stack.weights]
        return (*self.outside_weights, *stacked)

    def is_frozen(self, part: Part, stack: StackParts | None = None) -> bool:
        """Returns whether a component has no trained weights but adapters; one without weights is as the embedding."""
        if self.model.lora_rank:
            return True
        path = "" if stack is None else f"{stack.path}.layers."
        names = [f"{path}{weight.name}" for weight in part.weights] or ["embedding"]
        return not any(is_trainable(self.model, name) for name in names)

    def frozen_parts(self, stack: StackParts) -> tuple[bool, ...]:
        """Returns `is_frozen` of each component of a layer."""
        return tuple(self.is_frozen(part, stack) for part in stack.parts)

    @property
    def learns_below(self) -> bool:
        """Whether anything below the layers that have a backward pass is trained."""
        if self.model.retro_frozen == "decoder":
            return True  # the norm that the encoder reads, and above it whatever is in a layer
        below = [w.name for part in self.embed for w in part.weights if not part.is_read_by_layers]
        return any(is_trainable(self.model, name) for name in below)

    @property
    def first_learning(self) -> int:
        """Number of the first layer that has a backward pass, also where nothing below the layers is trained."""
        return min(stack.layer_numbers[stack.idle] for stack in self.stacks if stack.idle < stack.layers)

    def learns_before(self, stack: StackParts, part: Part) -> bool:
        """Returns whether a weight before a component is trained: below the layers, in its layer, or in the layers of
        another stack, if the first layer is one of those."""
        before = stack.parts[: stack.parts.index(part)]
        is_above = stack is not self.stacks[0] and stack.among is not None and self.first_learning not in stack.numbers
        weights = [w for p in before for w in (*p.weights, *p.shared_weights)]
        return self.learns_below or is_above or any(is_trainable(self.model, w.name) for w in weights)

    def layer_parts(self) -> Iterator[tuple[StackParts, Part]]:
        """Returns the components of a layer of every stack."""
        return ((stack, part) for stack in self.stacks for part in stack.parts)


@cache
def anatomy_of(model: Model) -> Anatomy:
    """Returns the components of a model, by its family.

    Raises:
      UserError: the vocabulary's size is not known yet.
    """
    return load_part(FAMILIES[model.family].costs)(model)


def gpt(layers: int, hidden: int, heads: int, sequence: int, vocab: int, *, tied_embeddings: bool = True) -> Anatomy:
    """Returns a GPT-2 of these sizes, as tables of published runs give them; `vocab` is the padded size."""
    return anatomy_of(
        Model(
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            sequence_length=sequence,
            vocab_size=vocab,
            vocab_multiple=1,
            tie_embeddings=tied_embeddings,
        )
    )
