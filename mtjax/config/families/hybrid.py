"""Hybrid models: Mamba-2 (arXiv 2405.21060), gated delta nets, attention, MLPs and experts, by a pattern of layers."""

from mtjax.config.families.family import DECODER, EXPERTS, HYBRID, LATENT, Family
from mtjax.config.ssm import check_hybrid

UNSUPPORTED = LATENT | {
    *("embedding_size", "first_attention_norm", "parallel_residual", "mtp_num_layers", "mtp_loss_scaling_factor"),
}
"""Settings of decoders that layers with one sublayer do not have."""

HYBRID_FAMILY = Family(
    kind="decoder",
    defaults={
        "norm": "rmsnorm",
        "norm_epsilon": 1e-5,
        "position": "none",
        "activation": "relu2",
        "bias": False,
        "tie_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    choices={"position": ("none", "rope"), "norm_placement": ("pre",), "head": ("language",)},
    own=(DECODER | EXPERTS | HYBRID) - UNSUPPORTED,
    check=check_hybrid,
)
