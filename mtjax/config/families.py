"""Defaults and checks of a model family; a family's own are in its `config.py` in `mtjax/families`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mtjax.errors import UserError, listed
from mtjax.families.registry import FAMILIES, load_part

if TYPE_CHECKING:
    from mtjax.config.model import Model


EXPERTS = frozenset(
    {
        *("num_experts", "experts_top_k", "expert_size", "shared_expert_size", "capacity_factor"),
        *("expert_groups", "expert_groups_top_k", "first_dense_layers", "moe_every"),
        *(
            "router_score",
            "router_normalize",
            "router_scale",
            "router_bias",
            "router_bias_update_rate",
            "router_linear_bias",
            "expert_bias",
            "shared_expert_gate",
            "router_jitter",
        ),
        *("router_aux_loss", "router_z_loss"),
    }
)
"""Settings of experts, for families that support them."""
LATENT = frozenset({"kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"})
"""Settings of multi-head latent attention, for families that support it."""

DECODER = frozenset(
    {
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
HYBRID = frozenset(
    {
        *("layer_pattern", "ssm_heads", "ssm_head_dim", "ssm_state", "ssm_groups", "ssm_conv", "ssm_rate_floor"),
        *("ssm_chunk", "ssm_norm", "ssm_scales", "ssm_output_scale", "attention_output_gate"),
        *("attention_output_scale", "mlp_gate_scale", "mlp_output_scale", "block_rank", "block_attention_adapters"),
    }
)
"""Settings of hybrid models, which others refuse likewise."""
RETRO = frozenset(
    {
        *("retro_chunk", "retro_num_neighbours", "retro_retrieved_chunks", "retro_encoder_layers", "retro_first"),
        *("retro_every", "retro_encoder_dropout", "retro_final_norm", "retro_frozen", "retro_reads"),
    }
)
"""Settings of Retro, which others refuse likewise."""
ENCODER = frozenset({"head_bias", "pooler_activation", "relative_bias_layers"})
"""Settings of one of the families with an encoder, which others refuse likewise."""


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


def _nothing_more(model: "Model") -> None:
    """Checks nothing, for a family that allows all combinations of settings."""


@dataclass(frozen=True)
class Family:
    """A family's defaults and checks, and the settings that have an effect only in this family."""

    kind: Literal["decoder", "encoder", "encoder-decoder", "retrieval"]
    """Whether the model continues a text, reads one in both directions, reads one and writes another, or continues one
    and reads others beside it."""
    defaults: Mapping[str, Any]
    """Defaults of the family; `mtjax.config.replace` sets them when the family changes."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Setting -> the values that this family supports, where that is not all of them."""
    own: frozenset[str] = frozenset()
    """Settings that have an effect in this family, and none in families that do not list them here too."""
    check: Callable[["Model"], None] = _nothing_more
    """Raises a `UserError` for inconsistent settings; each setting has been checked separately before."""
    network: str | None = None
    """Another family with the same network and other defaults; they can exchange weights."""


def family_of(name: str) -> Family:
    """Returns the defaults and checks of the family of this name."""
    return load_part(FAMILIES[name].config)


def kind_of(model: "Model") -> str:
    """Returns `decoder`, `encoder`, `encoder-decoder` or `retrieval`."""
    return family_of(model.family).kind


def is_decoder(model: "Model") -> bool:
    """Returns whether a model continues a text: whether it has causal layers alone."""
    return kind_of(model) == "decoder"


def check_decoder_settings(model: "Model") -> None:
    """Checks that settings of decoders, hybrid models or encoders alone have their defaults in other families.

    Raises:
      UserError: one has another value; names it.
    """
    for name in sorted((DECODER | HYBRID | ENCODER | RETRO) - family_of(model.family).own):
        if getattr(model, name) != getattr(type(model)(), name):
            known = [family for family in FAMILIES if name in family_of(family).own]
            works = f"the famil{'ies' if known[1:] else 'y'} {listed(known)}"
            raise UserError(f"{name} only works with {works}, and family is {model.family}: remove {name}")


def settings_of_others(name: str) -> frozenset[str]:
    """Returns the settings that have no effect in a family, because only other families use them."""
    return frozenset().union(*(family_of(family).own for family in FAMILIES)) - family_of(name).own
