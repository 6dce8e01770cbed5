"""Retro: a GPT some of whose layers read neighbours, and the encoder of these."""

from dataclasses import replace
from typing import Any

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.parts.embedding import LookupPart
from mtjax.analysis.parts.part import Norms, Part
from mtjax.config import Model
from mtjax.config.layer_pattern import runs_of
from mtjax.config.sizes import attention_biases, head_dim, norm_vectors
from mtjax.families.gpt.costs import decoder, mlp, self_attention
from mtjax.families.retro.config import (
    first_retro_layer,
    later_retro_layers,
    letters_of_retro,
    neighbour_length,
    neighbour_tokens,
)
from mtjax.families.retro.cost_parts import (
    AskingPart,
    ChunkedPart,
    FirstNormPart,
    NeighbourAttentionPart,
    NeighbourMLPPart,
    NeighbourPositionsPart,
    UnreadPart,
)
from mtjax.families.retro.layout import ENCODER_FIRST, FIRST_ATTENTION, FIRST_REST, PLAIN, RETRO
from mtjax.layout.stacks import ENCODER, LayerStack, stacks_of


def retro(model: Model) -> Anatomy:
    """Builds the anatomy of a Retro."""
    stacks = tuple(_stack(stack, model) for stack in stacks_of(model))
    gpt, hidden, read = decoder(model, stacks), model.hidden_size, neighbour_tokens(model)
    table, *positions = gpt.embed
    assert isinstance(table, LookupPart)
    final, *head = gpt.head
    head = (*((final,) if model.retro_final_norm else ()), *head)
    lookups = (
        LookupPart(table.rows, hidden, has_neighbour=True),
        LookupPart(table.rows, hidden, side=f"{ENCODER_FIRST}_", owns_table=False, has_neighbour=True),
    )
    first = FirstNormPart("first_norm", norm_vectors(model), hidden, model.sequence_length, read)
    # A model that does not read neighbours keeps the weights in its checkpoint, and does not run them.
    if not model.retro_reads:
        return Anatomy(model, embed=(table, *positions, UnreadPart(first)), stacks=stacks, head=head)
    embed = (*lookups, *positions, NeighbourPositionsPart(neighbour_length(model), hidden), first)
    return Anatomy(model, embed=embed, stacks=stacks, head=head)


def _stack(stack: LayerStack, model: Model) -> StackParts:
    """Returns a stack with its components; those that read neighbours do not run where there are none."""
    parts = _parts(model, stack.path)
    if model.retro_reads:
        # Below the first layer that reads neighbours nothing is trained then, so gradients end there.
        is_below = model.retro_frozen == "decoder" and stack.path in (PLAIN, FIRST_ATTENTION)
        idle = sum(number <= first_retro_layer(model) for number in stack.layer_numbers) if is_below else 0
        return replace(StackParts.of(stack, model, *parts), idle=idle)
    if stack.is_encoder:
        return StackParts.of(replace(stack, tokens=0), model, *(UnreadPart(part) for part in parts))
    return StackParts.of(stack, model, *(UnreadPart(part) if isinstance(part, ChunkedPart) else part for part in parts))


def _loops(model: Model) -> int:
    """Returns the loops over several layers some of which read neighbours."""
    return sum("X" in run.unit and run.times > 1 for run in runs_of(letters_of_retro(model).partition("R")[2]))


def _parts(model: Model, path: str) -> tuple[Part, ...]:
    """Returns the components of a layer of a stack."""
    tokens, read, chunk = model.sequence_length, neighbour_tokens(model), model.retro_chunk
    sizes: dict[str, Any] = {"hidden": model.hidden_size, "heads": model.num_heads, "head_dim": head_dim(model)}
    sizes["biases"] = attention_biases(model)
    norm, rate = Norms.of(model), model.retro_encoder_dropout
    attention, feed_forward = self_attention(model, tokens, is_causal=True), mlp(model, tokens)
    if path.startswith(ENCODER):
        inside = vars(self_attention(model, read, is_causal=False))
        attention = NeighbourAttentionPart(**inside, rate=rate, neighbour=neighbour_length(model))
        asking = AskingPart(**sizes, tokens=read, norm=norm, read=tokens, rate=rate, chunk=chunk)
        behind = NeighbourMLPPart(**vars(mlp(model, read)), rate=rate)
        return (attention, asking, behind) if path == ENCODER_FIRST else (attention, behind)
    # The first such layer's norm is outside of it.
    norm = Norms(norm.vectors, ()) if path == FIRST_REST else norm
    layers = f"(layers + {RETRO}_layers)" if later_retro_layers(model) else "layers"
    neighbours = model.retro_num_neighbours * neighbour_length(model)
    counted = layers if path == FIRST_REST else ""
    chunked = ChunkedPart(
        **sizes,
        tokens=tokens,
        norm=norm,
        read=read,
        neighbours=neighbours,
        layers=counted,
        loops=_loops(model),
        ends_backward=model.retro_frozen == "decoder",
    )
    return {
        PLAIN: (attention, feed_forward),
        FIRST_ATTENTION: (attention,),
        FIRST_REST: (chunked, feed_forward),
        RETRO: (attention, chunked, feed_forward),
    }[path]
