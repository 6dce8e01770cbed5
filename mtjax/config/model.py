"""`[model]`: the network."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mtjax.config.families import FAMILIES
from mtjax.config.setting import (
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
SCALED_ROPE = when(position="rope", rope_scaling=("linear", "llama3"))
LLAMA3_ROPE = when(position="rope", rope_scaling="llama3")
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
    rope_scaling: Literal["none", "linear", "llama3"] = setting("none", shapes=ROPE)
    """How RoPE is extended beyond the length of training: linear divides every frequency by rope_factor, llama3
    (Llama 3.1) only those whose wavelength is long compared with rope_original_length."""
    rope_factor: float = above_zero(8.0, shapes=SCALED_ROPE)
    """rope_scaling divides frequencies by this."""
    rope_low_frequency_factor: float = above_zero(1.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths above rope_original_length / this are scaled by the full rope_factor."""
    rope_high_frequency_factor: float = above_zero(4.0, shapes=LLAMA3_ROPE)
    """llama3: wavelengths below rope_original_length / this are not scaled."""
    rope_original_length: int = at_least(1, 8192, shapes=LLAMA3_ROPE)
    """llama3: the sequence length before scaling."""
    activation: Literal["gelu", "gelu_exact", "relu", "swiglu", "geglu"] = "gelu"
    """Activation of the MLP: gelu is the tanh approximation; swiglu and geglu multiply two projections, one of them
    activated."""
    bias: bool = True
    """Add biases in attention and the MLP."""
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
    head: Literal["language", "classification", "regression"] = "language"
    """What the model puts out: language, tokens; the others, which mtjax finetune puts on pretrained weights,
    num_labels logits or one number for each text."""
    num_labels: int = at_least(2, 2, most=HEADS, shapes=when(head="classification"))
    """head classification: classes."""
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
