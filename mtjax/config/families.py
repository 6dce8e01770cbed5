"""Defaults and checks of a model family; a family's own are in its `config.py` in `mtjax/families`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from mtjax.errors import UserError, listed
from mtjax.families.registry import FAMILIES, load_part

if TYPE_CHECKING:
    from mtjax.config.model import Model
    from mtjax.config.run import Config


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


def _nothing_more(checked: "Model | Config") -> None:
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
    settings: frozenset[str] = frozenset()
    """Settings that have an effect in this family, and none in families that do not list them here too."""
    refused_elsewhere: frozenset[str] = frozenset()
    """Those of them that families which do not list them refuse, with any value but the default."""
    check: Callable[["Model"], None] = _nothing_more
    """Raises a `UserError` for inconsistent settings; each setting has been checked separately before."""
    check_run: Callable[["Config"], None] = _nothing_more
    """Raises a `UserError` for settings of a run that the family does not support."""
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
    refused = frozenset().union(*(family_of(family).refused_elsewhere for family in FAMILIES))
    for name in sorted(refused - family_of(model.family).settings):
        if getattr(model, name) != getattr(type(model)(), name):
            known = [family for family in FAMILIES if name in family_of(family).settings]
            works = f"the famil{'ies' if known[1:] else 'y'} {listed(known)}"
            raise UserError(f"{name} only works with {works}, and family is {model.family}: remove {name}")


def settings_of_others(name: str) -> frozenset[str]:
    """Returns the settings that have no effect in a family, because only other families use them."""
    return frozenset().union(*(family_of(family).settings for family in FAMILIES)) - family_of(name).settings
