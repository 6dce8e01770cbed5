"""Hybrid models: GPT's embedding and head, and a stack for each kind of layers."""

from collections.abc import Callable, Mapping

from mtjax.analysis.anatomy import Anatomy, Stack
from mtjax.analysis.families.decoder import decoder, feed_forward, mlp, self_attention
from mtjax.analysis.parts.delta_net import DeltaNet
from mtjax.analysis.parts.mamba import Mamba
from mtjax.analysis.parts.part import Norms, Part
from mtjax.config import Model
from mtjax.config.adapters import adapter_rank
from mtjax.config.layer_pattern import SIDE_BY_SIDE
from mtjax.layout.stacks import stacks_of

PARTS: Mapping[str, Callable[[Model, str], Part]] = {
    "mamba": lambda model, _: Mamba(model, Norms.of(model), adapter_rank(model, "mamba")),
    "delta": lambda model, _: DeltaNet(model, Norms.of(model)),
    "attention": lambda model, kind: self_attention(model, model.sequence_length, is_causal=True, kind=kind),
    "mlp": lambda model, _: mlp(model, model.sequence_length),
    "experts": lambda model, _: feed_forward(model, model.sequence_length),
}
"""Mixer -> its component in layers of a kind."""


def hybrid(model: Model) -> Anatomy:
    """Builds the anatomy of a hybrid model."""
    kinds = {SIDE_BY_SIDE: ("mamba", "attention")}
    stacks = (
        Stack.of(stack, model, *(PARTS[mixer](model, stack.path) for mixer in kinds.get(stack.path, (stack.path,))))
        for stack in stacks_of(model)
    )
    return decoder(model, tuple(stacks))
