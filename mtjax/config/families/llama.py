"""Llama (arXiv 2302.13971): GPT's decoder with rotary positions, RMS norm, a gated MLP and no biases."""

from mtjax.config.families.family import DECODER, EXPERTS, Family, check_parallel_residual

LLAMA = Family(
    kind="decoder",
    defaults={
        "norm": "rmsnorm",
        "norm_epsilon": 1e-5,
        "position": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    choices={
        "position": ("learned", "rope", "alibi", "none"),
        "norm_placement": ("pre", "post", "output", "sandwich"),
        "head": ("language", "classification", "regression", "choices"),
    },
    own=DECODER | EXPERTS,
    check=check_parallel_residual,
    network="gpt",
)
