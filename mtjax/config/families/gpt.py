"""GPT-2 (arXiv 1909.08053, section 3): a decoder with learned positions, layer norm and biases."""

from mtjax.config.families.family import DECODER, EXPERTS, Family, check_parallel_residual

GPT = Family(
    kind="decoder",
    defaults={
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "position": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    choices={
        "position": ("learned", "rope", "alibi", "none"),
        "norm_placement": ("pre", "post", "output", "sandwich"),
        "head": ("language", "classification", "regression", "choices"),
    },
    own=DECODER | EXPERTS,
    check=check_parallel_residual,
)
