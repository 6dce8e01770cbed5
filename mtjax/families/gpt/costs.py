"""GPT and Llama: a stack of causal layers."""

from mtjax.analysis.anatomy import Anatomy, Predictors, StackParts
from mtjax.analysis.parts.attention import AttentionPart
from mtjax.analysis.parts.embedding import LookupPart, NormPart, PositionsPart
from mtjax.analysis.parts.experts import ExpertsPart
from mtjax.analysis.parts.heads import OneTokenPart, OutputProjectionPart
from mtjax.analysis.parts.latent_attention import LatentAttentionPart
from mtjax.analysis.parts.mlp import MLPPart
from mtjax.analysis.parts.part import Norms, Part
from mtjax.analysis.parts.prediction import AHEAD, CombinedPart, LookupAheadPart
from mtjax.analysis.parts.table_width import TABLE_WIDTH, TableProjectionPart
from mtjax.config import Model
from mtjax.config.adapters import adapter_rank
from mtjax.config.layer_pattern import SIDE_BY_SIDE
from mtjax.config.sizes import (
    GATED,
    attention_biases,
    attention_windows,
    embedding_width,
    expert_capacity,
    expert_size,
    head_dim,
    mlp_bias,
    mlp_size,
    norm_vectors,
    norms_outputs,
    num_kv_heads,
    num_outputs,
    padded_vocab_size,
)
from mtjax.config.ssm import ATTENTION, numbers_of
from mtjax.layout.stacks import stacks_of


def decoder(model: Model, stacks: tuple[StackParts, ...] | None = None) -> Anatomy:
    """Builds the anatomy of a GPT or Llama, or of a decoder with these stacks of layers.

    A GPT-2 has `V h + s h + l (12 h^2 + 13 h) + 2 h` parameters (arXiv 2104.04473, equation 2).
    """
    rows, hidden, tokens = padded_vocab_size(model), model.hidden_size, model.sequence_length
    layers = model.mtp_num_layers
    # Predictors embed tokens further ahead, so positions are looked up again for each.
    sides = ("", *(AHEAD,) * layers)
    positions: tuple[Part, ...] = (PositionsPart(tokens, hidden, sides),) if model.position == "learned" else ()
    final: tuple[Part, ...] = (NormPart("final_norm", norm_vectors(model), hidden),)
    table, symbol, projected = embedding_width(model), "hidden", ()
    # Post-LN layers normalize the residual stream themselves, as in `gpt.model`.
    if model.norm_placement == "post":
        final = ()
    if table != hidden:
        symbol, projected = TABLE_WIDTH, (TableProjectionPart("project_in", table, hidden, tokens),)
        final = (*final, TableProjectionPart("project_out", table, hidden, tokens))
    if model.head == "language":
        is_tied, bias = model.tie_embeddings, model.output_bias
        head: Part = OutputProjectionPart(rows, table, tokens, owns_table=not is_tied, bias=bias, width=symbol)
    else:
        # The head reads the last token alone, which has attended to all others.
        head = OneTokenPart(table, num_outputs(model), has_pooler=False, width=symbol)
    # What follows a lookup reads it in the backward pass: a norm, or a product with the embedding's width.
    read_again = bool(projected) or model.embedding_norm
    if model.embedding_norm:
        positions = (*positions, NormPart("embedding_norm", norm_vectors(model), hidden))
    # Each predictor looks up its tokens, and projects to the vocabulary with the model's tables.
    ahead = (
        LookupAheadPart(rows, hidden, owns_table=False),
        OutputProjectionPart(rows, hidden, tokens, owns_table=False),
    ) * layers
    return Anatomy(
        model,
        embed=(LookupPart(rows, table, width=symbol, read_again=read_again), *projected, *positions),
        stacks=_stacks(model) if stacks is None else stacks,
        head=(*final, head, *ahead),
        predictors=_predictors(model) if layers else None,
    )


def _stacks(model: Model) -> tuple[StackParts, ...]:
    """Returns one stack, or several of one section in a model with dense and expert layers."""
    tokens = model.sequence_length
    attention = self_attention(model, tokens, is_causal=True)
    # Dense layers come before those with experts, whose stack is the last; without experts it is the only one.
    *dense, last = stacks_of(model)
    return (
        *(StackParts.of(stack, model, attention, mlp(model, tokens)) for stack in dense),
        StackParts.of(last, model, attention, feed_forward(model, tokens)),
    )


def _predictors(model: Model) -> Predictors:
    """Returns the layers of multi-token prediction, which are like the last ones of the model."""
    tokens, hidden = model.sequence_length, model.hidden_size
    combined = CombinedPart(hidden, tokens, norm_vectors(model))
    parts = (combined, self_attention(model, tokens, is_causal=True, is_ahead=True), feed_forward(model, tokens))
    return Predictors(
        AHEAD,
        model.mtp_num_layers,
        tokens,
        AHEAD,
        hidden=hidden,
        parts=parts,
        norms_outputs=norms_outputs(model),
        parallel=model.parallel_residual,
    )


def self_attention(model: Model, tokens: int, *, is_causal: bool, is_ahead: bool = False, kind: str = "") -> Part:
    """Returns the attention of a model's layers, or of those of multi-token prediction, or of a kind."""
    if model.kv_lora_rank:
        return LatentAttentionPart(
            hidden=model.hidden_size,
            tokens=tokens,
            heads=model.num_heads,
            latent=model.kv_lora_rank,
            query_latent=model.q_lora_rank,
            still=model.qk_nope_head_dim,
            rotated=model.qk_rope_head_dim,
            value=model.v_head_dim,
            norm=Norms.of(model, is_first=True),
            is_causal=is_causal,
            is_capped=model.attention_softcap is not None,
            visible=_visible_share(model, tokens, is_ahead=is_ahead),
            rank=adapter_rank(model, "attention"),
        )
    # Otherwise the whole stack reads one table, which is not part of a layer.
    has_table = model.position == "relative" and model.relative_bias_layers == "all"
    return AttentionPart(
        hidden=model.hidden_size,
        tokens=tokens,
        heads=model.num_heads,
        kv_heads=num_kv_heads(model),
        head_dim=head_dim(model),
        # Side by side with Mamba-2, attention reads the output of that mixer's norm.
        norm=Norms.of(model, is_first=kind != SIDE_BY_SIDE, kind=kind),
        biases=attention_biases(model),
        is_causal=is_causal,
        rank=adapter_rank(model, "attention"),
        qk_norm=model.qk_norm and 1 + model.qk_norm_bias,
        qk_norm_scope=model.qk_norm_scope,
        has_sinks=model.attention_sinks,
        has_gate=model.attention_output_gate,
        is_capped=model.attention_softcap is not None,
        visible=_visible_share(model, tokens, is_ahead=is_ahead),
        buckets=model.relative_buckets if has_table else 0,
        is_biased=model.position == "relative",
    )


def _visible_share(model: Model, tokens: int, *, is_ahead: bool) -> float:
    """Returns the share of scores that a causal layer needs, in the mean of all layers with attention, or of those of
    multi-token prediction: half, or less with windows."""
    # Of s tokens with a window of w, all but the first w see w: w s - w^2 / 2 of s^2 pairs.
    every = attention_windows(model) or (tokens,) * (model.num_layers + model.mtp_num_layers)
    layers = numbers_of(model, ATTENTION) or range(model.num_layers)
    windows = every[model.num_layers :] if is_ahead else [every[number] for number in layers]
    shares = [min(window / tokens, 1.0) for window in windows]
    return sum(share - share * share / 2 for share in shares) / len(shares)


def feed_forward(model: Model, tokens: int) -> Part:
    """Returns the MLP of a decoder's layers, or the experts in its place."""
    if not model.num_experts:
        return mlp(model, tokens)
    return ExpertsPart(
        hidden=model.hidden_size,
        tokens=tokens,
        count=model.num_experts,
        top_k=model.experts_top_k,
        inner=expert_size(model),
        is_gated=model.activation in GATED,
        norm=Norms.of(model),
        router_bias=model.router_bias,
        router_linear_bias=model.router_linear_bias,
        bias=model.expert_bias,
        shared=model.shared_expert_size,
        shared_gate=model.shared_expert_gate,
        capacity=expert_capacity(model, tokens),
        balances=model.router_aux_loss > 0,
        rank=adapter_rank(model, "mlp"),
        is_frozen=model.lora_rank > 0,
    )


def mlp(model: Model, tokens: int) -> MLPPart:
    """Returns the MLP of a model's layers."""
    return MLPPart(
        hidden=model.hidden_size,
        tokens=tokens,
        inner=mlp_size(model),
        is_gated=model.activation in GATED,
        norm=Norms.of(model),
        bias=mlp_bias(model),
        rank=adapter_rank(model, "mlp"),
    )
