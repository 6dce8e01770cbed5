"""Hybrid models: Mamba-2 (arXiv 2405.21060), gated delta nets, attention, MLPs and experts, by a pattern of layers."""

from mtjax.config.families import DECODER, EXPERTS, HYBRID, LATENT, Family
from mtjax.config.ssm import check_hybrid
from mtjax.families.gpt.config import LLAMA

UNSUPPORTED = LATENT | {
    *("embedding_size", "first_attention_norm", "parallel_residual", "mtp_num_layers", "mtp_loss_scaling_factor"),
}
"""Settings of decoders that layers with one sublayer do not have."""

HYBRID_FAMILY = Family(
    kind="decoder",
    defaults={**LLAMA.defaults, "position": "none", "activation": "relu2"},
    choices={"position": ("none", "rope"), "norm_placement": ("pre",), "head": ("language",)},
    own=(DECODER | EXPERTS | HYBRID) - UNSUPPORTED,
    check=check_hybrid,
)
