"""GPT-2 (arXiv 1909.08053, section 3), a decoder with learned positions, layer norm and biases; and Llama."""

from dataclasses import replace
from typing import TYPE_CHECKING

from mtjax.config.families import EXPERTS, LATENT, Family
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.config.model import Model

DECODER = frozenset(
    {
        # Grouped by the component that reads them.
        *("embedding_scale", "embedding_size", "embedding_norm"),
        *("first_attention_norm", "parallel_residual", "residual_scale"),
        *("output_scale", "output_softcap", "output_bias"),
        *("mtp_num_layers", "mtp_loss_scaling_factor"),
        *("qk_norm", "qk_norm_scope", "qk_norm_kind", "qk_norm_bias", "qk_norm_after_rope", "qkv_clip"),
        *("attention_window", "window_layers", "alibi_scaled", "rope_fraction", "rope_layers", "rope_local_theta"),
        *("rope_short_factors", "rope_long_factors", "rope_truncate"),
        *("attention_scale", "attention_scale_beta", "attention_softcap", "attention_sinks"),
        *LATENT,
    }
)
"""Settings of decoders, in which the models differ that people train; families that do not have them refuse any value
but the default."""


def check_parallel_residual(model: "Model") -> None:
    """Checks that parallel_residual is combined with input norms and dense MLPs only.

    Raises:
      UserError: it is combined with others.
    """
    if model.parallel_residual == "no":
        return
    for name, default in (("norm_placement", "pre"), ("num_experts", 0)):
        if (value := getattr(model, name)) != default:
            raise UserError(
                f"parallel_residual is {model.parallel_residual}, and only works with {name} {default}, not {value}: "
                f"remove {name} or parallel_residual"
            )


GPT = Family(
    kind="decoder",
    defaults={
        "norm": "layernorm",
        # The defaults of Megatron-LM's GPT.
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
    settings=DECODER | EXPERTS,
    refused_elsewhere=DECODER,
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
    # `families.registry` has a row of its own for the name, over the same network.
    network="gpt",
)
"""Llama (arXiv 2302.13971): GPT's decoder with rotary positions, RMS norm, a gated MLP and no biases."""
