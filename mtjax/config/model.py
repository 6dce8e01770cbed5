"""`[model]`: the network."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mtjax.config.families import FAMILIES
from mtjax.config.field_metadata import (
    HEADS,
    INNER_WIDTH,
    LAYERS,
    NEVER,
    TOKENS,
    WIDTH,
    above_zero,
    amount,
    at_least,
    multiple_of,
    setting,
    share,
    when,
)

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]

POSITIONS_COUNT = when(position="learned")
"""Learned positions are parameters, one for each token of the sequence; the other kinds fit any length."""
ROPE = when(position="rope")
SCALED_ROPE = when(position="rope", rope_scaling=("linear", "llama3", "yarn"))
LLAMA3_ROPE = when(position="rope", rope_scaling="llama3")
YARN_ROPE = when(position="rope", rope_scaling="yarn")
ORIGINAL_ROPE = when(position="rope", rope_scaling=("llama3", "yarn"))
WITH_EXPERTS = (("num_experts", range(1, HEADS + 1)),)
RELATIVE = when(position="relative")


@dataclass(frozen=True)
class Model:
    """The network: GPT-2 as in section 3 of arXiv 1909.08053, or another family."""

    family: FamilyName = "gpt"
    """Kind of model. A family sets the defaults of norm, norm_epsilon, position, activation, bias, tie_embeddings and
    dropout, each of which can be overridden."""
    num_layers: int = at_least(1, 24, most=LAYERS)
    """Transformer layers."""
    hidden_size: int = at_least(1, 1024, most=WIDTH)
    """Width of the residual stream."""
    num_heads: int = at_least(1, 16, most=HEADS)
    """Attention heads; each is hidden_size / num_heads wide, or head_dim."""
    num_kv_heads: int | None = at_least(1, None, most=HEADS)
    """Key and value heads, each shared by a group of query heads (grouped-query attention); num_heads when not
    given."""
    head_dim: int | None = at_least(1, None, most=WIDTH)
    """Width of a head; hidden_size / num_heads when not given."""
    mlp_size: int | None = at_least(1, None, most=INNER_WIDTH)
    """Inner width of the MLP; 4 x hidden_size when not given."""
    num_experts: int = at_least(0, 0, most=HEADS)
    """gpt and llama: experts in the place of each layer's MLP, of which a router chooses some for each token; 0 for an
    MLP. Experts have no biases."""
    first_dense_layers: int = at_least(0, 0, most=LAYERS, shapes=WITH_EXPERTS)
    """Of num_layers, the first ones that have an MLP and no experts."""
    moe_every: int = at_least(1, 1, most=LAYERS, shapes=WITH_EXPERTS)
    """Experts in every N-th layer alone, the last of each N; the others have an MLP. 1: in every layer."""
    experts_top_k: int = at_least(1, 2, most=HEADS, shapes=WITH_EXPERTS)
    """Experts that a token goes to."""
    expert_size: int | None = at_least(1, None, most=INNER_WIDTH, shapes=WITH_EXPERTS)
    """Inner width of an expert; the MLP's when not given."""
    shared_expert_size: int = at_least(0, 0, most=INNER_WIDTH, shapes=WITH_EXPERTS)
    """Inner width of an expert that all tokens go to beside those chosen for them; 0 for none."""
    router_score: Literal["softmax", "sigmoid"] = setting("softmax", shapes=WITH_EXPERTS)
    """What a router makes of its logits, and chooses the highest of: softmax over all experts, or sigmoid of each."""
    expert_groups: int = at_least(1, 1, most=HEADS, shapes=WITH_EXPERTS)
    """Groups of equal size that experts are divided into, in their order: a router first chooses the best groups for a
    token, and experts among theirs. A group is as good as its best expert, with sigmoid as its two best together (arXiv
    2405.04434, 2412.19437)."""
    expert_groups_top_k: int = at_least(1, 1, most=HEADS, shapes=WITH_EXPERTS)
    """Groups that are chosen for a token."""
    router_normalize: bool = setting(True, shapes=WITH_EXPERTS)
    """Divide the scores of a token's experts by their sum; with softmax, that is softmax over the chosen ones alone."""
    router_scale: float = above_zero(1.0, shapes=WITH_EXPERTS)
    """The scores of a token's experts, by which their outputs are weighted, are multiplied by this."""
    capacity_factor: float | None = above_zero(None, shapes=WITH_EXPERTS)
    """An expert takes at most this many times the mean number of a sample's tokens, the first of them; to it the others
    are lost. No token is lost to any expert when not given."""
    router_bias: bool = setting(False, shapes=WITH_EXPERTS)
    """Choose experts by score plus a bias of each expert's own, which learns from its load instead of from the loss
    (arXiv 2408.15664)."""
    router_bias_update_rate: float = amount(0.001, shapes=NEVER)
    """What a step adds to the biases of experts with less than the mean load, and takes from those with more."""
    router_aux_loss: float = amount(0.01, shapes=NEVER)
    """Weight of each layer's balance loss (arXiv 2101.03961), 1 where experts have equal load: computed for each
    sample, so that it does not depend on the mesh, and added to the loss."""
    router_z_loss: float = amount(0.0, shapes=NEVER)
    """Weight of the mean square, in each layer, of the logarithm of the sum of a router's exponentiated logits (arXiv
    2202.08906), added to the loss."""
    router_jitter: float = share(0.0, shapes=NEVER)
    """What a router reads is multiplied by random numbers within this distance of 1, in training."""
    sequence_length: int = at_least(1, 1024, most=TOKENS, shapes=POSITIONS_COUNT)
    """Tokens in a sample, and the number of learned positions."""
    vocab_size: int | None = at_least(1, None, most=TOKENS)
    """Tokens in the vocabulary; the tokenizer's when not given."""
    vocab_multiple: int = at_least(1, 1024, most=WIDTH)
    """The vocabulary is padded up to a multiple of this, whatever the mesh."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """layernorm subtracts the mean and adds a bias; rmsnorm does neither."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre normalises the input of each sublayer and leaves the residual stream alone; post, as in the original BERT,
    normalises the stream after each sublayer (Figure 7 of the paper)."""
    norm_epsilon: float = amount(1e-5)
    """Added to the variance in layer norm, to the mean square in RMS norm."""
    position: Literal["learned", "rope", "relative"] = "learned"
    """learned adds a vector per position to the embeddings; rope rotates queries and keys (arXiv 2104.09864); relative,
    T5's, adds a number per head and distance to the scores, does not scale them, and scales the output of tied
    embeddings."""
    rope_theta: float = above_zero(10_000.0, shapes=ROPE)
    """RoPE's base: the longest wavelength is about 2 pi times this many tokens."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = setting("none", shapes=ROPE)
    """How RoPE is extended beyond the length of training: linear divides every frequency by rope_factor, llama3
    (Llama 3.1) and yarn (arXiv 2309.00071) only those whose wavelength is long compared with rope_original_length; yarn
    also scales queries and keys."""
    rope_factor: float = above_zero(8.0, shapes=SCALED_ROPE)
    """rope_scaling divides frequencies by this."""
    rope_low_frequency_factor: float = above_zero(1.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths above rope_original_length / this are scaled by the full rope_factor."""
    rope_high_frequency_factor: float = above_zero(4.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths below rope_original_length / this are not scaled."""
    rope_beta_fast: float = above_zero(32.0, shapes=YARN_ROPE)
    """yarn: pairs that turn at least this often in rope_original_length tokens are not scaled."""
    rope_beta_slow: float = above_zero(1.0, shapes=YARN_ROPE)
    """yarn: pairs that turn at most this often are scaled by the full rope_factor."""
    rope_attention_factor: float | None = above_zero(None, shapes=YARN_ROPE)
    """yarn: queries and keys are multiplied by this; 0.1 ln(rope_factor) + 1 when not given."""
    rope_original_length: int = at_least(1, 8192, shapes=ORIGINAL_ROPE)
    """llama3, yarn: the sequence length before scaling."""
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP: gelu is the tanh approximation; swiglu and geglu multiply two projections, one of them
    activated."""
    bias: bool = True
    """Add biases in attention and the MLP."""
    qk_norm: bool = False
    """gpt, llama: RMS norm of every head of queries and of keys, before rotary positions (Qwen3, arXiv 2505.09388)."""
    tie_embeddings: bool = True
    """Use the embedding table as the output projection."""
    num_decoder_layers: int | None = at_least(1, None, most=LAYERS)
    """t5: layers of the decoder (num_layers are the encoder's); num_layers when not given."""
    decoder_sequence_length: int | None = at_least(1, None, most=TOKENS, shapes=POSITIONS_COUNT)
    """t5: tokens that the decoder writes (sequence_length is the encoder's); sequence_length when not given."""
    relative_buckets: int = multiple_of(4, 32, shapes=RELATIVE)
    """t5: number of buckets of distances that relative positions distinguish."""
    relative_max_distance: int = at_least(1, 128, shapes=RELATIVE)
    """t5: all distances from this one on share one bucket."""
    num_token_types: int = at_least(0, 2, most=HEADS)
    """bert: kinds of tokens, each with an embedding (first and second sentence); 0 for no such embedding."""
    sentence_order: bool = True
    """bert: also learn, from the first token, whether two sentences were swapped."""
    head: Literal["language", "classification", "regression", "choices", "spans"] = "language"
    """What the model puts out: language, tokens; the others are what mtjax finetune puts on pretrained weights:
    num_labels logits or one number for each text; for each of num_labels texts, which are choices of one question, a
    logit; two logits for each token, of being the first and the last of an answer."""
    num_labels: int = at_least(2, 2, most=HEADS, shapes=when(head="classification"))
    """head classification: classes; head choices: texts of a question, which are rows of a batch side by side."""
    lora_rank: int = at_least(0, 0, most=WIDTH)
    """mtjax finetune: train low-rank adapters (LoRA, arXiv 2106.09685) of this rank, and a task's head, and leave the
    weights as they are; 0 trains all weights."""
    lora_alpha: float = above_zero(16.0)
    """Adapters count lora_alpha / lora_rank times."""
    lora_dropout: float = share(0.0, shapes=NEVER)
    """Dropout on what adapters read."""
    lora_targets: Literal["all", "attention", "mlp"] = "all"
    """Products in the layers that have adapters."""
    hidden_dropout: float = share(0.1, shapes=NEVER)
    """Dropout on embeddings and on what is added to the residual stream."""
    attention_dropout: float = share(0.1, shapes=NEVER)
    """Dropout on attention probabilities; flash attention needs 0."""
    init_std: float = amount(0.02, shapes=NEVER)
    """Standard deviation of initial weights."""
    scaled_init: bool = setting(True, shapes=NEVER)
    """Divide the standard deviation of weights just before a residual addition by sqrt(2 x num_layers)."""
    attention: Literal["auto", "xla", "cudnn"] = setting("auto", shapes=NEVER)
    """Attention kernel; auto is cuDNN's flash attention on GPUs where it can compute the model (attention_dropout must
    be 0), otherwise XLA's."""
