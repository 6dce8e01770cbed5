"""The stacks of layers of a model: their parameters' paths, how many layers they have, and which."""

from dataclasses import dataclass, replace
from functools import cache

from mtjax.config import Model
from mtjax.config.families import kind_of
from mtjax.config.layer_pattern import KIND_OF
from mtjax.config.retro import first_retro_layer, later_retro_layers, neighbour_tokens, plain_layers
from mtjax.config.sizes import decoder_layers, decoder_length, dense_layers, main_layers
from mtjax.config.ssm import letters_of, numbers_of

STACK = "stack"
"""Path of the stack of layers; in a model with dense and expert layers, of those with experts."""
DENSE = "dense"
"""Path of the stack of dense layers in a model with experts; with an underscore, the prefix of its symbols."""
ENCODER, DECODER = "encoder", "decoder"
"""In a model with both, the modules of the stacks; with an underscore, the prefix of the decoder's symbols."""


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
    """Numbers of its layers in its section, which may interleave two stacks; 0, 1, ... when empty."""
    stream: str | None = None
    """Prefix of the symbol of its tokens; `side` when None."""
    among: int | None = None
    """Layers of all stacks of its section; None where it is the only one."""
    is_encoder: bool = False
    """Whether it encodes a text that another stack reads."""

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of its layers in its section."""
        return self.numbers or tuple(range(self.layers))


@cache
def stacks_of(model: Model) -> tuple[LayerStack, ...]:
    """Returns a model's stacks of layers, in the order of their sections."""
    tokens = model.sequence_length
    if kind_of(model) == "encoder-decoder":
        encoder = LayerStack(f"{ENCODER}.{STACK}", model.num_layers, tokens, is_encoder=True)
        side = f"{DECODER}_"
        return encoder, LayerStack(f"{DECODER}.{STACK}", decoder_layers(model), decoder_length(model), side=side)
    if model.family == "retro":
        return _stacks_of_retro(model)
    if letters := letters_of(model):
        return _stacks_of_pattern(model, letters)
    dense, others = dense_layers(model), main_layers(model)
    if not dense:
        return (LayerStack(STACK, model.num_layers, tokens),)
    last = LayerStack(STACK, len(others), tokens, numbers=others, among=model.num_layers)
    return replace(last, path=DENSE, layers=len(dense), side=f"{DENSE}_", numbers=dense), last


def _stacks_of_pattern(model: Model, letters: str) -> tuple[LayerStack, ...]:
    """Returns a stack for each kind of layers of a hybrid model; the last has no prefix, whose symbols are those of the
    embedding and the head."""
    kinds = [(kind, numbers_of(model, letter)) for letter, kind in KIND_OF.items() if letter in letters]

    def stack(kind: str, numbers: tuple[int, ...], side: str = "") -> LayerStack:
        return LayerStack(kind, len(numbers), model.sequence_length, side, numbers=numbers, among=model.num_layers)

    *others, last = kinds
    return (*(stack(kind, numbers, f"{kind}_") for kind, numbers in others), stack(*last))


ENCODER_FIRST, FIRST_ATTENTION, FIRST_REST = "encoder_first", "first_attention", "first_rest"
"""Paths of Retro's first encoder layer, which also reads the chunk, and of the two parts of the first layer with
chunked cross-attention: self-attention, and what follows the encoder."""
PLAIN, RETRO = "plain", "retro"
"""Paths of its layers without chunked cross-attention, and of the other ones with it."""


def _stacks_of_retro(model: Model) -> tuple[LayerStack, ...]:
    """Returns the stacks of a Retro, in the order in which they first run; the last has no prefix. In their section the
    encoder runs within the first layer with chunked cross-attention."""
    first, each, read = first_retro_layer(model), model.sequence_length, neighbour_tokens(model)
    encoding = model.retro_encoder_layers
    found = [
        (PLAIN, plain_layers(model), each),
        (FIRST_ATTENTION, (first,), each),
        (ENCODER_FIRST, (0,), read),
        (ENCODER, tuple(range(1, encoding)), read),
        (RETRO, later_retro_layers(model), each),
        (FIRST_REST, (first,), each),
    ]

    def stack(path: str, numbers: tuple[int, ...], tokens: int) -> LayerStack:
        side, among = (
            "" if path == FIRST_REST else f"{path}_",
            encoding if path.startswith(ENCODER) else model.num_layers,
        )
        stream = f"{ENCODER_FIRST}_" if path.startswith(ENCODER) else ""
        return LayerStack(path, len(numbers), tokens, side, numbers, stream, among, bool(stream))

    return tuple(stack(*one) for one in found if one[1])


def sections_of(model: Model) -> tuple[tuple[LayerStack, ...], ...]:
    """Returns the stacks of each section: sections run one after the other, its layers by their numbers."""
    stacks = stacks_of(model)
    return (stacks,) if stacks[0].among is not None else tuple((stack,) for stack in stacks)
