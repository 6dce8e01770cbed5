"""Hybrid models: GPT's embedding and head, and a stack for each kind of layers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.parts.delta_net import DeltaNetPart
from mtjax.analysis.parts.mamba import MambaPart
from mtjax.analysis.parts.part import Norms, Part
from mtjax.analysis.parts.shared_block import BlockAttentionPart, BlockMLPPart, BlockPart, ProjectionPart
from mtjax.config import Model
from mtjax.config.adapters import adapter_rank, is_trainable
from mtjax.config.layer_pattern import SHARED, SIDE_BY_SIDE, loops_of_pattern
from mtjax.config.shared_blocks import num_blocks
from mtjax.config.ssm import letters_of
from mtjax.families.gpt.costs import decoder, feed_forward, mlp, self_attention
from mtjax.layout.stacks import stacks_of

PARTS: Mapping[str, Callable[[Model, str], Part]] = {
    "mamba": lambda model, _: MambaPart(model, Norms.of(model), adapter_rank(model, "mamba")),
    "delta": lambda model, _: DeltaNetPart(model, Norms.of(model), adapter_rank(model, "delta")),
    "attention": lambda model, kind: self_attention(model, model.sequence_length, is_causal=True, kind=kind),
    "mlp": lambda model, _: mlp(model, model.sequence_length),
    "experts": lambda model, _: feed_forward(model, model.sequence_length),
}
"""Mixer -> its component in layers of a kind."""


def hybrid(model: Model) -> Anatomy:
    """Builds the anatomy of a hybrid model."""
    blocks = _block_parts(model) if num_blocks(model) else ()

    def parts(kind: str) -> tuple[Part, ...]:
        if kind in SHARED.values():
            return *blocks, ProjectionPart(model.hidden_size, model.sequence_length), PARTS["mamba"](model, kind)
        mixers = ("mamba", "attention") if kind == SIDE_BY_SIDE else (kind,)
        return tuple(PARTS[mixer](model, kind) for mixer in mixers)

    stacks = [StackParts.of(stack, model, *parts(stack.path)) for stack in stacks_of(model)]
    idle = _layers_below_adapters(model, {stack.letter for stack in stacks if not _learns(model, stack)})
    stacks = (replace(stack, idle=sum(number < idle for number in stack.layer_numbers)) for stack in stacks)
    anatomy = decoder(model, tuple(stacks))
    # Each shared block is counted once, however many layers read it; the embeddings that all read, with the first.
    shared_blocks = (
        BlockPart(f"block_{n + 1}", blocks, keeps_embeddings=n == 0) for n in range(num_blocks(model)) if blocks
    )
    return replace(anatomy, embed=(*anatomy.embed, *shared_blocks))


def _learns(model: Model, stack: StackParts) -> bool:
    """Returns whether the layers of a stack have trained weights."""
    return any(is_trainable(model, w.name) for part in stack.parts for w in (*part.weights, *part.shared_weights))


def _layers_below_adapters(model: Model, frozen: set[str]) -> int:
    """Returns how many layers have no backward pass: those below the first with adapters, if none is in a loop with
    it; `frozen` are the letters of layers without adapters."""
    count = 0
    for unit, times in loops_of_pattern(letters_of(model)) if frozen else ():
        if not set(unit) <= frozen:
            below = len(unit) - len(unit.lstrip("".join(frozen)))
            # A loop has one backward pass for all its layers.
            return count + (below if times == 1 else 0)
        count += len(unit) * times
    return 0


def _block_parts(model: Model) -> tuple[BlockAttentionPart, BlockMLPPart]:
    """Returns what a layer computes with a shared block."""
    attention: Any = PARTS["attention"](model, "")
    low = model.block_rank if model.block_attention_adapters else 0
    inner: Any = PARTS["mlp"](model, "")
    return BlockAttentionPart(**vars(attention), low=low), BlockMLPPart(**vars(inner), low=model.block_rank)
