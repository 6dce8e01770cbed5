"""GPT-2 (arXiv 1909.08053, section 3), a decoder with learned positions, layer norm and biases; and Llama."""

from dataclasses import replace

from mtjax.config.families import DECODER, EXPERTS, Family, check_parallel_residual

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

LLAMA = replace(
    GPT,
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
    network="gpt",
)
"""Llama (arXiv 2302.13971): GPT's decoder with rotary positions, RMS norm, a gated MLP and no biases."""
