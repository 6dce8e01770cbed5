"""Hybrid models: GPT's embedding and head, and a stack for each kind of layers."""

from collections.abc import Callable, Mapping

from mtjax.analysis.anatomy import Anatomy, Stack
from mtjax.analysis.families.decoder import decoder, feed_forward, mlp, self_attention
from mtjax.analysis.parts.mamba import Mamba
from mtjax.analysis.parts.part import Norms, Part
from mtjax.config import Model
from mtjax.layout.stacks import stacks_of

PARTS: Mapping[str, Callable[[Model], Part]] = {
    "mamba": lambda model: Mamba(model, Norms.of(model)),
    "attention": lambda model: self_attention(model, model.sequence_length, is_causal=True),
    "mlp": lambda model: mlp(model, model.sequence_length),
    "experts": lambda model: feed_forward(model, model.sequence_length),
}
"""Kind of layers -> the component of one."""


def hybrid(model: Model) -> Anatomy:
    """Builds the anatomy of a hybrid model."""
    return decoder(model, tuple(Stack.of(stack, model, PARTS[stack.path](model)) for stack in stacks_of(model)))
