"""T5: an encoder and a decoder with one embedding table; the decoder has cross-attention over the encoder's output."""

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.parts.attention import CrossAttentionPart
from mtjax.analysis.parts.embedding import LookupPart, NormPart, PositionsPart, RelativeBiasPart
from mtjax.analysis.parts.heads import OutputProjectionPart
from mtjax.analysis.parts.part import Norms, Part
from mtjax.config import Model
from mtjax.config.sizes import (
    attention_biases,
    decoder_length,
    head_dim,
    norm_vectors,
    padded_vocab_size,
)
from mtjax.families.gpt.costs import mlp, self_attention
from mtjax.layout.stacks import DECODER, stacks_of

DECODER_SIDE = f"{DECODER}_"
"""Prefix of the decoder's symbols in formulas."""


def t5(model: Model) -> Anatomy:
    """Builds the anatomy of a T5: each stack has a final norm; relative positions have tables per stack or layer."""
    rows, hidden = padded_vocab_size(model), model.hidden_size
    reading, writing = stacks_of(model)
    read, written = reading.tokens, writing.tokens
    cross = CrossAttentionPart(
        hidden=hidden,
        tokens=written,
        read=read,
        heads=model.num_heads,
        head_dim=head_dim(model),
        norm=Norms.of(model),
        biases=attention_biases(model),
    )
    encoder = (self_attention(model, read, is_causal=False), mlp(model, read))
    decoder = (self_attention(model, written, is_causal=True), cross, mlp(model, written))
    lookups = (
        LookupPart(rows, hidden, has_neighbour=True),
        # The decoder reads the encoder's table: counted once.
        LookupPart(rows, hidden, side=DECODER_SIDE, owns_table=False, has_neighbour=True),
    )
    return Anatomy(
        model,
        embed=(*lookups, *_positions(model)),
        stacks=(StackParts.of(reading, model, *encoder), StackParts.of(writing, model, *decoder)),
        head=(
            NormPart("encoder.final_norm", norm_vectors(model), hidden),
            NormPart("decoder.final_norm", norm_vectors(model), hidden),
            OutputProjectionPart(rows, hidden, written, owns_table=not model.tie_embeddings, side=DECODER_SIDE),
        ),
    )


def _positions(model: Model) -> tuple[Part, ...]:
    if model.position == "relative":
        if model.relative_bias_layers == "all":
            return ()  # in `self_attention`
        lengths = {"encoder": model.sequence_length, "decoder": decoder_length(model)}
        return tuple(
            RelativeBiasPart(model.relative_buckets, model.num_heads, n, owner) for owner, n in lengths.items()
        )
    # One table of positions for encoder and decoder.
    longest = max(model.sequence_length, decoder_length(model))
    return (PositionsPart(longest, model.hidden_size, sides=("", DECODER_SIDE)),)
