"""BERT: a stack of bidirectional layers, the masked-LM head and the sentence-order head."""

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.parts.embedding import LookupPart, NormPart, PositionsPart, TokenTypesPart
from mtjax.analysis.parts.heads import MaskedOutputPart, OneTokenPart, SpansPart
from mtjax.analysis.parts.part import Part
from mtjax.config import Model
from mtjax.config.sizes import most_masked, norm_vectors, num_outputs, padded_vocab_size
from mtjax.families.gpt.costs import mlp, self_attention
from mtjax.layout.stacks import stacks_of


def bert(model: Model) -> Anatomy:
    """Builds the anatomy of a BERT.

    Post-LN models have a norm on the embeddings, pre-LN ones after the stack (Figure 7 of arXiv 1909.08053), or in both
    places.
    """
    rows, hidden, tokens = padded_vocab_size(model), model.hidden_size, model.sequence_length
    is_post = model.norm_placement == "post"
    vectors, is_normed = norm_vectors(model), is_post or model.embedding_norm
    last = () if is_post else (NormPart("final_norm", vectors, hidden),)
    parts = (self_attention(model, tokens, is_causal=False), mlp(model, tokens))
    positions = (PositionsPart(tokens, hidden),) if model.position == "learned" else ()
    embed = (LookupPart(rows, hidden, read_again=is_normed), *positions, TokenTypesPart(model.num_token_types, hidden))
    if model.head == "language":
        head = _pretraining(model)
    else:
        head = (SpansPart(hidden, tokens) if model.head == "spans" else OneTokenPart(hidden, num_outputs(model)),)
    return Anatomy(
        model,
        embed=(*embed, *((NormPart("embedding_norm", vectors, hidden),) if is_normed else ())),
        stacks=tuple(StackParts.of(stack, model, *parts) for stack in stacks_of(model)),
        head=(*last, *head),
    )


def _pretraining(model: Model) -> tuple[Part, ...]:
    """Returns the heads of pretraining: masked-LM and, where it is trained, sentence order."""
    masked = MaskedOutputPart(
        padded_vocab_size(model),
        model.hidden_size,
        # The head runs on this many tokens at most, as the samples mask no more.
        most_masked(model.sequence_length),
        sequence=model.sequence_length,
        owns_table=not model.tie_embeddings,
        norm=norm_vectors(model),
        has_bias=model.head_bias,
        takes_first=model.sentence_order,
    )
    order = OneTokenPart(model.hidden_size, 2, "order", stands_alone=False)
    return (masked, order) if model.sentence_order else (masked,)
