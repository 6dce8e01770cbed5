"""The stacks of layers of a model: their parameters' paths, how many layers they have, and which."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mtjax.config import Model
from mtjax.config.families import kind_of
from mtjax.config.layer_pattern import KIND_OF, loops_of_pattern
from mtjax.config.sizes import decoder_layers, decoder_length, dense_layers
from mtjax.config.ssm import letters_of
from mtjax.families.registry import FAMILIES, load_part

STACK = "stack"
"""Path of the stack of layers; in a model with dense and expert layers, of those with experts."""
DENSE = "dense"
"""Path of the stack of dense layers in a model with experts; with an underscore, the prefix of its symbols."""
FEWEST_PREFETCHED = 4
"""Layers of one kind from which a loop over them prefetches: the last is outside the loop, and XLA unrolls loops of two
iterations or fewer on CPUs."""
ENCODER, DECODER = "encoder", "decoder"
"""In a model with both, the modules of the stacks; with an underscore, the prefix of the decoder's symbols."""

Kinds = Mapping[str, tuple[str, str]]
"""Letter of a pattern -> the path of the stack of its layers, and their kind in `mtjax.models.mixers.registry`."""
_HYBRID: Kinds = {letter: (kind, kind) for letter, kind in KIND_OF.items()}
_WITH_EXPERTS: Kinds = {"T": (DENSE, "transformer"), "X": (STACK, "transformer with experts")}
"""Kinds of a decoder in which some layers have experts: `first_dense_layers` 2 of 5 is TTXXX, `moe_every` 3 TTXTTX."""


@dataclass(frozen=True, eq=False)
class LayerStack:
    """A stack of equal layers."""

    path: str
    """Dotted name of the stack's parameters."""
    layers: int
    tokens: int
    """Tokens of a sample."""
    side: str = ""
    """Prefix of its symbols in formulas and of its settings."""
    numbers: tuple[int, ...] = ()
    """Numbers of its layers in its section, which may have several stacks; 0, 1, ... when empty."""
    stream: str | None = None
    """Prefix of the symbol of its tokens; `side` when None."""
    among: int | None = None
    """Layers of all stacks of its section; None where it is the only one."""
    is_encoder: bool = False
    """Whether it encodes a text that another stack reads."""
    kind: str = "transformer"
    """Kind of its layers."""
    pattern: str = ""
    """Letter of each layer of its section; empty in a section of one stack, and in Retro's."""
    letter: str = ""
    """Of its layers in the pattern."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in its section."""
        return self.numbers or tuple(range(self.layers))

    @property
    def has_own_loop(self) -> bool:
        """Whether its layers follow one another in the model, and run in a separate loop."""
        if not self.pattern:
            return self.among is None
        return (self.letter, self.layers) in loops_of_pattern(self.pattern)

    @property
    def can_prefetch(self) -> bool:
        """Whether its loop has enough layers to prefetch, if they are alone in it."""
        return not self.has_own_loop or self.layers >= FEWEST_PREFETCHED


@cache
def stacks_of(model: Model) -> tuple[LayerStack, ...]:
    """Returns a model's stacks of layers, in the order of their sections."""
    if stacks := FAMILIES[model.family].stacks:
        return load_part(stacks)(model)
    tokens = model.sequence_length
    if kind_of(model) == "encoder-decoder":
        encoder = LayerStack(f"{ENCODER}.{STACK}", model.num_layers, tokens, is_encoder=True)
        side = f"{DECODER}_"
        kind, layers = "transformer with cross-attention", decoder_layers(model)
        return encoder, LayerStack(f"{DECODER}.{STACK}", layers, decoder_length(model), side=side, kind=kind)
    # A pattern comes before experts: its letters say which layers have them.
    if letters := letters_of(model):
        return _stacks_of_pattern(letters, _HYBRID, tokens)
    if dense := dense_layers(model):
        return _stacks_of_pattern("".join("XT"[n in dense] for n in range(model.num_layers)), _WITH_EXPERTS, tokens)
    kind = "transformer with experts" if model.num_experts else "transformer"
    return (LayerStack(STACK, model.num_layers, tokens, kind=kind),)


def _stacks_of_pattern(pattern: str, kinds: Kinds, tokens: int) -> tuple[LayerStack, ...]:
    """Returns a stack for each kind of layers of a pattern; the last has no prefix, whose symbols are those of the
    embedding and the head."""

    def stack(letter: str, *, is_last: bool) -> LayerStack:
        numbers, (path, kind) = (
            tuple(n for n, letter_of_layer in enumerate(pattern) if letter_of_layer == letter),
            kinds[letter],
        )
        side, section = "" if is_last else f"{path}_", {"among": len(pattern), "pattern": pattern, "letter": letter}
        return LayerStack(path, len(numbers), tokens, side, numbers, kind=kind, **section)

    # In the order of `kinds`, so that symbols do not depend on which layer is first.
    letters = [letter for letter in kinds if letter in pattern]
    return tuple(stack(letter, is_last=letter == letters[-1]) for letter in letters)


def sections_of(model: Model) -> tuple[tuple[LayerStack, ...], ...]:
    """Returns the stacks of each section: sections run one after the other, its layers by their numbers."""
    stacks = stacks_of(model)
    # Stacks `among` others take turns in one section; an encoder and a decoder are a section each.
    return (stacks,) if stacks[0].among is not None else tuple((stack,) for stack in stacks)
