"""BERT (arXiv 1810.04805, and section 5.3 of arXiv 1909.08053): an encoder that guesses masked tokens."""

from mtjax.config.families import Family
from mtjax.families.gpt.config import GPT

REFUSED_ELSEWHERE = frozenset({"head_bias", "pooler_activation"})

BERT = Family(
    kind="encoder",
    # Megatron-LM's BERT has the layers of its GPT: only attention, which is not causal, and the heads differ.
    defaults=GPT.defaults,
    choices={"position": ("learned", "rope"), "norm_placement": ("pre", "post")},
    settings=frozenset(
        {
            *REFUSED_ELSEWHERE,
            *("num_token_types", "sentence_order"),
            *("embedding_norm", "first_attention_norm"),
            *("attention_window", "window_layers", "rope_layers", "rope_local_theta"),
        }
    ),
    refused_elsewhere=REFUSED_ELSEWHERE,
)
