"""What the config knows about a family of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mtjax.errors import UserError

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
            "router_jitter",
        ),
        *("router_aux_loss", "router_z_loss"),
    }
)
"""Settings of experts in the place of the MLP, for families that can have them."""


def without_head_norms(model: "Model") -> None:
    """Checks that heads of queries and keys have no norms.

    Raises:
      UserError: they have.
    """
    if model.qk_norm:
        raise UserError(
            f"qk_norm only works with the families gpt and llama, and family is {model.family}: remove qk_norm"
        )


def _nothing_more(model: "Model") -> None:
    """The check of a family whose settings all fit each other."""


@dataclass(frozen=True)
class Family:
    """A family's defaults, checks, and the settings that have an effect in this family only."""

    defaults: Mapping[str, Any]
    """Settings that the family brings; `mtjax.config.replace` puts them in force where the family changes."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Setting -> the values that are implemented for this family, where that is not all of them."""
    own: frozenset[str] = frozenset()
    """Settings that have an effect in this family, and not in families that don't name them here too."""
    check: Callable[["Model"], None] = _nothing_more
    """Raises a `UserError` where settings don't fit each other in this family; each alone has been checked before."""
    network: str | None = None
    """Another family whose network this is, with other defaults: weights of one are weights of the other."""
