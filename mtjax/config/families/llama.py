"""Llama (arXiv 2302.13971): GPT's decoder with rotary positions, RMS norm, a gated MLP and no biases."""

from dataclasses import replace

from mtjax.config.families.gpt import GPT

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
