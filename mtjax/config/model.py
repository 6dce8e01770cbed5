"""`[model]`: the network architecture."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mtjax.config.field_metadata import (
    HEADS,
    INNER_WIDTH,
    LAYERS,
    NEVER,
    TOKENS,
    WIDTH,
    Bound,
    above_zero,
    amount,
    at_least,
    factors,
    multiple_of,
    pattern,
    setting,
    share,
    when,
)
from mtjax.families.registry import FAMILIES

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]

POSITIONS_COUNT = when(position="learned")
"""Learned positions are parameters, one per token of the sequence; the other kinds fit any length."""
ROPE = when(position="rope")
SCALED_ROPE = when(position="rope", rope_scaling=("linear", "dynamic", "llama3", "yarn", "longrope"))
LONG_ROPE = when(position="rope", rope_scaling="longrope")
LLAMA3_ROPE = when(position="rope", rope_scaling="llama3")
YARN_ROPE = when(position="rope", rope_scaling="yarn")
FACTOR_ROPE = when(position="rope", rope_scaling=("yarn", "longrope"))
ORIGINAL_ROPE = when(position="rope", rope_scaling=("dynamic", "llama3", "yarn", "longrope"))
WITH_EXPERTS = (("num_experts", range(1, HEADS + 1)),)
RELATIVE = when(position="relative")
POOLED = when(head=("classification", "regression", "choices"))
WITH_QK_NORM = (("qk_norm", (True,)),)
WITH_WINDOW = (("attention_window", range(1, TOKENS + 1)),)
LATENT = (("kv_lora_rank", range(1, WIDTH + 1)),)


@dataclass(frozen=True)
class Model:
    """The network: GPT-2 as in section 3 of arXiv 1909.08053, or another family."""

    family: FamilyName = "gpt"
    """Model architecture. A family sets the defaults of norm, norm_epsilon, position, activation, bias, tie_embeddings
    and dropout, each of which can be overridden."""
    layer_pattern: str = ""
    """hybrid: kind of each layer, in Megatron's letters (--hybrid-layer-pattern): M Mamba-2, G a gated delta net,
    * attention, - an MLP, E experts; and H, Mamba-2 and attention side by side, Z and z, Mamba-2 that reads the first
    or the second shared block. (M-M*-)x4 repeats the letters in parentheses four times. Each letter is a layer,
    and num_layers is their number."""
    num_layers: int = at_least(1, 24, most=LAYERS)
    """Number of transformer layers."""
    hidden_size: int = at_least(1, 1024, most=WIDTH)
    """Hidden size: the width of the residual stream."""
    num_heads: int = at_least(1, 16, most=HEADS)
    """Number of attention heads (Megatron's --num-attention-heads). Each is head_dim wide."""
    num_kv_heads: int | None = at_least(1, None, most=HEADS)
    """Number of key and value heads for grouped-query attention (Megatron's --num-query-groups); num_heads when not
    given."""
    head_dim: int | None = at_least(1, None, most=WIDTH)
    """Width of an attention head (Megatron's --kv-channels); hidden_size / num_heads when not given."""
    mlp_size: int | None = at_least(1, None, most=INNER_WIDTH)
    """Hidden size of the MLP (Megatron's --ffn-hidden-size); 4 x hidden_size when not given."""
    num_experts: int = at_least(0, 0, most=HEADS)
    """gpt, llama: number of experts that replace the MLP of a layer (mixture of experts); 0 for a dense model. Experts
    have no biases unless expert_bias is true."""
    first_dense_layers: int = at_least(0, 0, most=LAYERS, shapes=WITH_EXPERTS)
    """Number of layers at the start that have a dense MLP instead of experts."""
    moe_every: int = at_least(1, 1, most=LAYERS, shapes=WITH_EXPERTS)
    """Put experts in every N-th layer only, the last of each N; the other layers have a dense MLP. 1 puts them in every
    layer (compare Megatron's --moe-layer-freq)."""
    experts_top_k: int = at_least(1, 2, most=HEADS, shapes=WITH_EXPERTS)
    """Number of experts to which the router sends each token (Megatron's --moe-router-topk)."""
    expert_size: int | None = at_least(1, None, most=INNER_WIDTH, shapes=WITH_EXPERTS)
    """Hidden size of each expert (Megatron's --moe-ffn-hidden-size); mlp_size when not given."""
    shared_expert_size: int = at_least(0, 0, most=INNER_WIDTH, shapes=WITH_EXPERTS)
    """Hidden size of the shared expert, which processes all tokens in addition to the routed experts (Megatron's
    --moe-shared-expert-intermediate-size); 0 for none."""
    router_score: Literal["softmax", "sigmoid"] = setting("softmax", shapes=WITH_EXPERTS)
    """Score function of the router: softmax over all experts, or sigmoid of each logit (Megatron's
    --moe-router-score-function)."""
    expert_groups: int = at_least(1, 1, most=HEADS, shapes=WITH_EXPERTS)
    """Number of expert groups for group-limited routing: the router first selects expert_groups_top_k groups for a
    token, then experts within them (Megatron's --moe-router-num-groups, arXiv 2405.04434). A group's score is its best
    expert's with softmax, and the sum of its two best with sigmoid (arXiv 2412.19437)."""
    expert_groups_top_k: int = at_least(1, 1, most=HEADS, shapes=WITH_EXPERTS)
    """Number of groups selected for each token (Megatron's --moe-router-group-topk)."""
    router_normalize: bool = setting(True, shapes=WITH_EXPERTS)
    """Normalize the scores of a token's selected experts to sum to 1; with softmax, this equals softmax over the
    selected experts only."""
    router_scale: float = above_zero(1.0, shapes=WITH_EXPERTS)
    """Factor by which the scores of a token's selected experts are multiplied (Megatron's
    --moe-router-topk-scaling-factor)."""
    capacity_factor: float | None = above_zero(None, shapes=WITH_EXPERTS)
    """Expert capacity as a multiple of the mean number of tokens per expert, counted per sample; tokens over capacity
    are dropped, the last of the sample first. When not given, no token is dropped (Megatron's
    --moe-expert-capacity-factor)."""
    router_bias: bool = setting(False, shapes=WITH_EXPERTS)
    """Add a bias to each expert's score when experts are selected; the biases are updated from the experts' load,
    without a loss (auxiliary-loss-free balancing, arXiv 2408.15664; Megatron's --moe-router-enable-expert-bias)."""
    router_linear_bias: bool = setting(False, shapes=WITH_EXPERTS)
    """Add a trained bias to the router's logits (gpt-oss)."""
    expert_bias: bool = setting(False, shapes=WITH_EXPERTS)
    """Add biases to the linear layers of the experts (gpt-oss); the shared expert has none."""
    shared_expert_gate: bool = setting(False, shapes=WITH_EXPERTS)
    """Multiply the shared expert's output by the sigmoid of a linear layer with one output (Megatron's
    --moe-shared-expert-gate; Qwen2-MoE)."""
    router_bias_update_rate: float = amount(0.001, shapes=NEVER)
    """Amount by which a step raises the bias of experts below the mean load, and lowers it above (Megatron's
    --moe-router-bias-update-rate)."""
    router_aux_loss: float = amount(0.01, shapes=NEVER)
    """Coefficient of the load-balancing loss of each layer (arXiv 2101.03961), computed per sample, as in Megatron's
    seq_aux_loss (--moe-aux-loss-coeff). The loss is 1 when experts have equal load."""
    router_z_loss: float = amount(0.0, shapes=NEVER)
    """Coefficient of the router z-loss of each layer (arXiv 2202.08906): the mean square of logsumexp of the router's
    logits (Megatron's --moe-z-loss-coeff)."""
    router_jitter: float = share(0.0, shapes=NEVER)
    """In training, multiply the router's input by uniform noise from 1 - router_jitter to 1 + router_jitter (Megatron's
    --moe-input-jitter-eps)."""
    ssm_heads: int | None = at_least(1, None, most=HEADS)
    """hybrid: number of heads of a Mamba-2 layer (Megatron's --mamba-num-heads), or of value heads of a gated delta net
    (--linear-num-value-heads); 2 x hidden_size / ssm_head_dim when not given."""
    ssm_head_dim: int = at_least(1, 64, most=WIDTH)
    """hybrid: width of a head of a Mamba-2 layer (Megatron's --mamba-head-dim), or of a value of a gated delta net
    (--linear-value-head-dim)."""
    ssm_state: int = at_least(1, 128, most=WIDTH)
    """hybrid: width of the state that each channel of a head has (Megatron's --mamba-state-dim), which in a gated delta
    net is that of a query and key (--linear-key-head-dim)."""
    ssm_groups: int | None = at_least(1, None, most=HEADS)
    """hybrid: groups of heads that share the projections B and C into and out of the state, and that the gated norm
    normalizes one by one (Megatron's --mamba-num-groups), or that share a query and a key in a gated delta net
    (--linear-num-key-heads); 8, or the most below that divide the heads, when not given."""
    ssm_conv: int = at_least(2, 4, most=WIDTH)
    """hybrid: tokens that the causal convolution of a Mamba-2 layer or of a gated delta net (Megatron's
    --linear-conv-kernel-dim) reads."""
    ssm_rate_floor: float = amount(0.0)
    """hybrid: minimum of dt, the rate at which a state forgets and reads (0.001 in Nemotron-H of transformers, whose
    time_step_min it is)."""
    ssm_norm: bool = True
    """hybrid: normalize what has passed the gate of a Mamba-2 layer; most Falcon-H1 do not."""
    ssm_scales: tuple[float, ...] | None = factors(None)
    """hybrid: factors of the five parts of a Mamba-2 layer's first product: gate, value, B, C and dt (Falcon-H1); none
    when not given."""
    ssm_output_scale: float = above_zero(1.0)
    """hybrid: factor of the outputs of Mamba-2 (Falcon-H1)."""
    attention_output_scale: float = above_zero(1.0)
    """hybrid: factor of the outputs of attention (Falcon-H1)."""
    mlp_gate_scale: float = above_zero(1.0)
    """hybrid: factor of the gate of MLPs before the activation (Falcon-H1)."""
    mlp_output_scale: float = above_zero(1.0)
    """hybrid: factor of the outputs of MLPs (Falcon-H1)."""
    block_rank: int = at_least(1, 128, most=WIDTH)
    """hybrid: rank of the low-rank adapters with which each layer Z or z of layer_pattern reads its shared block
    (Zamba2)."""
    block_attention_adapters: bool = False
    """hybrid: give the query, key and value of shared blocks adapters, too, and not only their MLP (Zamba2)."""
    ssm_chunk: int | None = at_least(1, None, most=TOKENS, shapes=NEVER)
    """hybrid: tokens of a chunk: products inside chunks, one state between them. It concerns speed and memory only.
    128, or the sequence length if that is less, when not given."""
    sequence_length: int = at_least(1, 1024, most=TOKENS, shapes=POSITIONS_COUNT)
    """Tokens in a sample (Megatron's --seq-length), and the number of learned positions."""
    vocab_size: int | None = at_least(1, None, most=TOKENS)
    """Vocabulary size before padding; the tokenizer's when not given."""
    vocab_multiple: int = at_least(1, 1024, most=WIDTH)
    """Pad the vocabulary to a multiple of this (Megatron's --make-vocab-size-divisible-by); it does not depend on the
    mesh."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalization layer: layernorm, or rmsnorm, which neither subtracts the mean nor adds a bias."""
    norm_bias: bool = setting(True, shapes=when(norm="layernorm"))
    """layernorm: add a bias."""
    norm_weight: Literal["scale", "offset", "none"] = "scale"
    """Weight of the norms: scale multiplies by it, offset by 1 + weight (Megatron's --apply-layernorm-1p; Gemma), none
    has neither weight nor bias (OLMo)."""
    norm_placement: Literal["pre", "post", "output", "sandwich"] = "pre"
    """pre normalizes the input of each sublayer (pre-LN); post normalizes the residual stream after each sublayer
    (post-LN), as the original BERT does (Figure 7 of the paper) and OPT-350M, without a final norm; output normalizes
    the output of each sublayer before it is added (OLMo 2); sandwich both its input and its output (Gemma 2)."""
    first_attention_norm: bool = True
    """pre: normalize the input of the first layer's attention, too. ModernBERT, which normalizes the embeddings, does
    not; the norm's weight in that layer has no effect then."""
    parallel_residual: Literal["no", "one_norm", "two_norms"] = "no"
    """Run attention and the MLP side by side on the same hidden states, and add both outputs at once: with one norm for
    both (GPT-J, Falcon 7B), or one each (GPT-NeoX). The sum has one dropout mask. Needs norm_placement pre and
    num_experts 0."""
    residual_scale: float = above_zero(1.0)
    """Factor of each sublayer's output before it is added (Granite)."""
    norm_epsilon: float = amount(1e-5)
    """Epsilon of the norms, added to the variance (layernorm) or the mean square (rmsnorm)."""
    position: Literal["learned", "rope", "relative", "alibi", "none"] = "learned"
    """Position embeddings: learned absolute ones; rope, rotary embeddings of queries and keys (arXiv 2104.09864);
    relative, T5's bias per head and distance, with unscaled attention scores and scaled outputs of tied embeddings;
    alibi, a bias proportional to the distance, with a slope per head (arXiv 2108.12409); or none."""
    alibi_scaled: bool = setting(False, shapes=when(position="alibi"))
    """Add ALiBi's bias before the scores are multiplied by attention_scale instead of after (Falcon-RW)."""
    rope_theta: float = above_zero(10_000.0, shapes=ROPE)
    """Base of RoPE's frequencies (Megatron's --rotary-base)."""
    rope_fraction: float = setting(1.0, bound=Bound(lambda x: 0 < x <= 1, "above 0, at most 1"), shapes=ROPE)
    """Fraction of each head that RoPE rotates, from its first dimension on (Megatron's --rotary-percent)."""
    rope_layers: str = setting("R", bound=pattern("RN"), shapes=ROPE)
    """Which layers have RoPE: a pattern that repeats over the layers, R with and N without. RRRN: every fourth layer
    has none (SmolLM3; Megatron's --no-rope-freq)."""
    rope_local_theta: float | None = above_zero(None, shapes=ROPE)
    """Base of RoPE's frequencies in layers with a window, which are then not scaled (Gemma 3); rope_theta and
    rope_scaling when not given."""
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = setting("none", shapes=ROPE)
    """Scaling of RoPE's frequencies for sequences longer than in pretraining: linear divides all frequencies by
    rope_factor; dynamic raises the base for sequences longer than rope_original_length; llama3 (Llama 3.1) and yarn
    (arXiv 2309.00071) divide only frequencies with wavelengths long compared with rope_original_length; longrope
    (arXiv 2402.13753) divides each by its own factor. yarn and longrope also scale queries and keys. dynamic and
    longrope go by the length of a sample in training, which is the same for all; generation ends at
    rope_original_length, as the keys in its cache are rotated for sequences up to there."""
    rope_short_factors: tuple[float, ...] | None = factors(None, shapes=LONG_ROPE)
    """longrope: divisors of the frequencies, one per rotated pair, for sequences up to rope_original_length."""
    rope_long_factors: tuple[float, ...] | None = factors(None, shapes=LONG_ROPE)
    """longrope: divisors of the frequencies, one per rotated pair, for longer sequences."""
    rope_truncate: bool = setting(True, shapes=YARN_ROPE)
    """yarn: round the bounds of the interpolation to integers, as YaRN's code does (gpt-oss does not)."""
    rope_factor: float = above_zero(8.0, shapes=SCALED_ROPE)
    """Factor by which rope_scaling divides frequencies."""
    rope_low_frequency_factor: float = above_zero(1.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths above rope_original_length / rope_low_frequency_factor are scaled by the full rope_factor."""
    rope_high_frequency_factor: float = above_zero(4.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths below rope_original_length / rope_high_frequency_factor are not scaled."""
    rope_beta_fast: float = above_zero(32.0, shapes=YARN_ROPE)
    """yarn: dimensions that rotate at least this many times within rope_original_length tokens are not scaled."""
    rope_beta_slow: float = above_zero(1.0, shapes=YARN_ROPE)
    """yarn: dimensions that rotate at most this many times within rope_original_length tokens are scaled by the full
    rope_factor."""
    rope_attention_factor: float | None = above_zero(None, shapes=FACTOR_ROPE)
    """yarn, longrope: factor by which queries and keys are multiplied. When not given, yarn has 0.1 ln(rope_factor) + 1
    and longrope sqrt(1 + ln(rope_factor) / ln(rope_original_length))."""
    rope_original_length: int = at_least(1, 8192, shapes=ORIGINAL_ROPE)
    """dynamic, llama3, yarn, longrope: sequence length in pretraining, before scaling."""
    activation: Literal["gelu", "gelu_exact", "relu", "relu2", "swiglu", "swiglu_clamped", "geglu", "geglu_exact"] = (
        "gelu"
    )
    """Activation function of the MLP: gelu is the tanh approximation, gelu_exact the exact one, relu2 the square of
    relu; swiglu, swiglu_clamped (gpt-oss: clamped at 7, with 1 added to the ungated half), geglu and geglu_exact are
    gated."""
    bias: bool = True
    """Add biases to the linear layers of attention and the MLP (Megatron's --disable-bias-linear turns them off)."""
    attention_bias: Literal["auto", "none", "qkv", "output", "all"] = "auto"
    """Biases of attention alone: none, of query, key and value (Megatron's --add-qkv-bias; Qwen2), of the output
    (GPT-Neo), or all; auto is as `bias`."""
    mlp_bias: bool | None = None
    """Biases of the MLP alone; as `bias` when not given."""
    qk_norm: bool = False
    """gpt, llama: apply a norm to queries and keys, before RoPE (Megatron's --qk-layernorm; Qwen3, arXiv
    2505.09388)."""
    qk_norm_scope: Literal["head", "each_head", "width"] = setting("head", shapes=WITH_QK_NORM)
    """What qk_norm normalizes: each head with one weight for all heads (Qwen3), each head with its own weight (Cohere),
    or the full width of all heads together (OLMo 2), which is one more reduction with tensor parallelism."""
    qk_norm_kind: Literal["rmsnorm", "layernorm"] = setting("rmsnorm", shapes=WITH_QK_NORM)
    """Norm of queries and keys; layernorm has no bias unless qk_norm_bias is true."""
    qk_norm_bias: bool = setting(False, shapes=WITH_QK_NORM)
    """qk_norm_kind layernorm: add a bias (Phi)."""
    qk_norm_after_rope: bool = setting(False, shapes=WITH_QK_NORM)
    """Normalize queries and keys after RoPE instead of before (Hunyuan)."""
    qkv_clip: float | None = above_zero(None)
    """Clip queries, keys and values to this absolute value, after qk_norm and before RoPE (OLMo, MPT)."""
    attention_scale: float | None = above_zero(None)
    """Factor of the attention scores (Megatron-Core's softmax_scale); head_dim^-0.5 when not given."""
    attention_scale_beta: float = amount(0.0)
    """Multiply queries by 1 + attention_scale_beta ln(1 + floor(position / rope_original_length)) (Ministral 3)."""
    attention_softcap: float | None = above_zero(None)
    """Replace each score s by c tanh(s / c) before the mask (Gemma 2: 50)."""
    attention_sinks: bool = False
    """Add a trained logit per head to the softmax's denominator (gpt-oss; Megatron's --softmax-type learnable)."""
    attention_output_gate: bool = False
    """hybrid: multiply each channel of attention's heads by the sigmoid of a product of the same input (Megatron's
    --attention-output-gate; Qwen3-Next)."""
    attention_window: int | None = at_least(1, None, most=TOKENS)
    """Sliding window: a token attends to itself and the attention_window - 1 tokens before it, in bert also to as many
    after it, in the layers of window_layers (Mistral; Megatron's --window-size counts the tokens before it)."""
    window_layers: str = setting("S", bound=pattern("SF"), shapes=WITH_WINDOW)
    """Which layers have the window: a pattern that repeats over the layers, S with the sliding window and F with full
    attention. SF: every other layer, from the first on (Gemma 2); SSSSSF: all but every sixth (Gemma 3; compare
    Megatron's --window-attn-skip-freq)."""
    kv_lora_rank: int = at_least(0, 0, most=WIDTH)
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434): width of the latent from which keys and values
    are computed; 0 for ordinary attention (Megatron's --kv-lora-rank)."""
    q_lora_rank: int = at_least(0, 0, most=WIDTH, shapes=LATENT)
    """MLA: width of the latent from which queries are computed; 0 for a direct projection."""
    qk_nope_head_dim: int = at_least(1, 128, most=WIDTH, shapes=LATENT)
    """MLA: dimensions of a query and key head that are not rotated (Megatron's --qk-head-dim)."""
    qk_rope_head_dim: int = at_least(2, 64, most=WIDTH, shapes=LATENT)
    """MLA: dimensions of a query head that are rotated, with one key for all heads (Megatron's
    --qk-pos-emb-head-dim)."""
    v_head_dim: int = at_least(1, 128, most=WIDTH, shapes=LATENT)
    """MLA: width of a value head (Megatron's --v-head-dim)."""
    embedding_scale: float = above_zero(1.0)
    """Factor of the token embeddings (Gemma: sqrt(hidden_size))."""
    embedding_size: int | None = at_least(1, None, most=WIDTH)
    """gpt, llama: width of the embedding and output tables; hidden_size when not given. Where it differs, one matrix
    takes embeddings to hidden_size, and another the final hidden states back (OPT-350M)."""
    embedding_norm: bool = False
    """Normalize the embeddings (BLOOM, ModernBERT)."""
    output_scale: float = above_zero(1.0)
    """Factor of the logits, before output_softcap and after output_bias (Cohere's logit_scale; Granite's
    1 / logits_scaling). A tied t5 with relative positions also has its own factor, 1 / sqrt(hidden_size)."""
    output_softcap: float | None = above_zero(None)
    """Replace each logit l by c tanh(l / c) (Gemma 2: 30)."""
    output_bias: bool = False
    """Add a bias to the logits (Phi, GPT-J)."""
    tie_embeddings: bool = True
    """Share the embedding table with the output projection (Megatron's --untie-embeddings-and-output-weights turns it
    off)."""
    mtp_num_layers: int = at_least(0, 0, most=LAYERS)
    """gpt, llama: layers of multi-token prediction (DeepSeek-V3, arXiv 2412.19437; Megatron's --mtp-num-layers). In
    training, layer k predicts the token k places after the next one, from the final hidden states of the layer before
    it and the embeddings of the tokens k places ahead, with the embedding table and the output table of the model.
    Evaluation and generation leave these layers out."""
    mtp_loss_scaling_factor: float = above_zero(0.1, shapes=NEVER)
    """Coefficient of the mean of their losses (Megatron's --mtp-loss-scaling-factor)."""
    num_decoder_layers: int | None = at_least(1, None, most=LAYERS)
    """t5: number of decoder layers; num_layers, the number of encoder layers, when not given."""
    decoder_sequence_length: int | None = at_least(1, None, most=TOKENS, shapes=POSITIONS_COUNT)
    """t5: length of the decoder's sequence in tokens; sequence_length, the encoder's, when not given."""
    relative_buckets: int = multiple_of(4, 32, shapes=RELATIVE)
    """t5: number of buckets of the relative position bias (Megatron's --relative-attention-num-buckets)."""
    relative_max_distance: int = at_least(1, 128, shapes=RELATIVE)
    """t5: distance from which on all positions share the last bucket (Megatron's --relative-attention-max-distance)."""
    relative_bias_layers: Literal["first", "all"] = setting("first", shapes=RELATIVE)
    """t5: layers with a table of the relative position bias: first, one table in each stack that all of its layers
    share; all, one in every layer (umT5)."""
    retro_chunk: int = at_least(1, 64, most=TOKENS)
    """retro: tokens of a chunk, for each of which neighbours are read (Megatron's --retro-chunk-length)."""
    retro_num_neighbours: int = at_least(1, 2, most=HEADS, shapes=NEVER)
    """retro: neighbours of a chunk that the model reads (Megatron's --retro-num-neighbors)."""
    retro_retrieved_chunks: int = at_least(1, 2, most=HEADS, shapes=NEVER)
    """retro: chunks of a neighbour: itself and those that follow it (Megatron's --retro-num-retrieved-chunks)."""
    retro_encoder_layers: int = at_least(1, 2, most=LAYERS)
    """retro: layers of the encoder of neighbours (Megatron's --retro-encoder-layers). It has the decoder's widths."""
    retro_first: int | None = at_least(1, None, most=LAYERS)
    """retro: first layer with chunked cross-attention, counted from 1; when not given, 9, or 6 in models of up to 15
    layers, as in Megatron."""
    retro_every: int = at_least(1, 3, most=LAYERS)
    """retro: from there on, every so many layers have chunked cross-attention."""
    retro_encoder_dropout: float = share(0.1, shapes=NEVER)
    """retro: dropout in the encoder's layers (Megatron's --retro-encoder-hidden-dropout and
    --retro-encoder-attention-dropout)."""
    retro_final_norm: bool = True
    """retro: normalize the decoder's output. The models of Megatron-Core 0.15 do not."""
    retro_frozen: Literal["none", "encoder", "retrieval", "decoder"] = setting("none", shapes=NEVER)
    """retro: what is not trained: encoder, the encoder of neighbours; retrieval, that and chunked cross-attention;
    decoder, all that a GPT has, so that only what Retro adds is trained (InstructRetro, arXiv 2310.07713)."""
    retro_reads: bool = setting(True, shapes=NEVER)
    """retro: neighbours are read in training. Without, the model is trained as a GPT, and retro_frozen must be
    retrieval; mtjax finetune sets it: whether rows have passages."""
    num_token_types: int = at_least(0, 2, most=HEADS)
    """bert: number of token types (segments), each with an embedding; 0 for no token type embeddings."""
    sentence_order: bool = True
    """bert: also train the binary head, which predicts from the first token whether two sentences were swapped
    (Megatron's --bert-no-binary-head turns it off)."""
    head_bias: bool = True
    """bert: add a bias to the linear layer of the masked-LM head (ModernBERT has none)."""
    head: Literal["language", "classification", "regression", "choices", "spans"] = "language"
    """Output head: language predicts tokens. mtjax finetune sets the others: classification gives num_labels logits per
    text, regression one number, choices one logit for each of num_labels texts of a question, spans two logits per
    token (the first and the last of the answer)."""
    num_labels: int = at_least(2, 2, most=HEADS, shapes=when(head="classification"))
    """head classification: number of classes. head choices: number of choices of a question, which are consecutive rows
    of a batch."""
    pooler_activation: Literal["tanh", "relu"] = setting("tanh", shapes=POOLED)
    """bert: activation of the pooler, the linear layer before the logits of a text: tanh, or relu (DistilBERT)."""
    lora_rank: int = at_least(0, 0, most=WIDTH)
    """mtjax finetune: rank of the low-rank adapters (LoRA, arXiv 2106.09685); only these and the task's head are
    trained. 0 trains all weights."""
    lora_alpha: float = above_zero(16.0)
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank."""
    lora_dropout: float = share(0.0, shapes=NEVER)
    """Dropout on the input of the adapters."""
    lora_targets: Literal["all", "attention", "mlp", "mixers"] = "all"
    """Linear layers that have adapters: those of attention, of MLPs, of mixers of tokens (attention, Mamba-2, gated
    delta nets), or all."""
    hidden_dropout: float = share(0.1, shapes=NEVER)
    """Dropout on embeddings and on the output of each sublayer, before the residual addition."""
    attention_dropout: float = share(0.1, shapes=NEVER)
    """Dropout on attention probabilities. Flash attention (cuDNN) needs 0."""
    init_std: float = amount(0.02, shapes=NEVER)
    """Standard deviation of the initial weights (Megatron's --init-method-std)."""
    scaled_init: bool = setting(True, shapes=NEVER)
    """Divide the standard deviation of weights before a residual addition by sqrt(2 x num_layers), as Megatron does."""
    attention: Literal["auto", "xla", "blocks", "pallas", "cudnn"] = setting("auto", shapes=NEVER)
    """Attention kernel: cudnn is cuDNN's flash attention (GPUs only, attention_dropout 0); xla computes all scores of a
    sample at once; blocks those of a few queries at a time, so that memory is linear in the sequence (any device);
    pallas keeps scores inside a kernel as cudnn does, also with attention_dropout (GPUs only). auto uses cudnn where it
    supports the model; pallas for the dropout of decoders with heads of 64 on Hopper, if each head has its own keys,
    reset_attention_mask and deterministic are false; otherwise xla, and for samples of more than 8,192 tokens or 2^30
    scores on a rank (8,192 tokens of 16 heads) on GPUs blocks, if attention_dropout is 0, compute_dtype is 16-bit and
    deterministic is false. With reset_attention_mask it uses cudnn on Hopper for 2,048 to 8,192 tokens, no windows."""
