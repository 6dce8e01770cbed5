"""Checks of the settings of experts."""

from mtjax.config.adapters import adapts
from mtjax.config.families import EXPERTS, family_of
from mtjax.config.model import Model
from mtjax.config.run import Config
from mtjax.config.sizes import nearest_divisors
from mtjax.errors import UserError, listed
from mtjax.families.registry import FAMILIES


def check_experts(config: Config) -> None:
    """Checks that the settings of experts are consistent, and not set in a dense model.

    Raises:
      UserError: they are inconsistent, or the model has no experts.
    """
    model, default = config.model, Model()
    count, chosen, method = model.num_experts, model.experts_top_k, config.parallel.expert_dispatch
    if method != "all-gather" and not count:
        raise UserError(
            f"expert_dispatch is {method}, and num_experts is 0: set num_experts, or remove expert_dispatch"
        )
    if method != "all-gather" and model.capacity_factor is not None:
        raise UserError(
            f"expert_dispatch is {method}, and capacity_factor {model.capacity_factor:g} already limits "
            "the tokens of each expert: remove one of the two"
        )
    if not count:
        for name in sorted(EXPERTS - {"num_experts"}):
            if getattr(model, name) != getattr(default, name):
                raise UserError(
                    f"{name} is {getattr(model, name)}, and num_experts is 0: set num_experts, or remove {name}"
                )
        return
    if "num_experts" not in family_of(model.family).settings:
        known = listed([name for name in FAMILIES if "num_experts" in family_of(name).settings])
        raise UserError(
            f"num_experts only works with the families {known}, and family is {model.family}: remove num_experts"
        )
    if chosen > count:
        raise UserError(
            f"experts_top_k {chosen} is above num_experts {count}: a token is sent to each expert at most once"
        )
    check_expert_layers(model)
    check_expert_groups(model)
    if model.lora_rank:
        check_expert_adapters(model)
    check_expert_parameters(model)


def check_expert_adapters(model: Model) -> None:
    """Checks the settings of a model with experts that has low-rank adapters.

    Raises:
      UserError: a setting would have no effect, as routers are frozen; or there is no dropout on what experts read.
    """
    rate, default = model.router_bias_update_rate, Model().router_bias_update_rate
    if rate != default:
        raise UserError(
            f"router_bias_update_rate is {rate:g}, and lora_rank {model.lora_rank} freezes routers: remove "
            "router_bias_update_rate"
        )
    if model.lora_dropout and adapts(model, "mlp"):
        raise UserError(
            f"lora_dropout is {model.lora_dropout:g}, and adapters of experts have no dropout (as in peft): use "
            "lora_dropout 0, or lora_targets mixers"
        )


def check_expert_layers(model: Model) -> None:
    """Checks that first_dense_layers or moe_every select the layers with experts, and that there are some.

    Raises:
      UserError: they select none, or both are set.
    """
    if model.first_dense_layers >= model.num_layers:
        raise UserError(
            f"first_dense_layers {model.first_dense_layers} leaves none of num_layers {model.num_layers} with experts: "
            "use fewer, or num_experts 0"
        )
    if model.num_layers % model.moe_every:
        raise UserError(
            f"num_layers {model.num_layers} is not a multiple of moe_every {model.moe_every}; the nearest that divide "
            f"it are {nearest_divisors(model.num_layers, model.moe_every)}"
        )
    if model.moe_every > 1 and model.first_dense_layers:
        raise UserError(
            f"moe_every {model.moe_every} and first_dense_layers {model.first_dense_layers} both select the layers "
            "with experts: remove one of the two"
        )


def check_expert_parameters(model: Model) -> None:
    """Checks that the biases and gates that settings refer to exist, and can be used.

    Raises:
      UserError: they do not exist, or cannot be used.
    """
    rate = model.router_bias_update_rate
    if not model.router_bias and rate != Model().router_bias_update_rate:
        raise UserError(f"router_bias_update_rate is {rate:g}, and there are no biases: set router_bias")
    if model.shared_expert_gate and not model.shared_expert_size:
        raise UserError(
            "shared_expert_gate is True, and shared_expert_size is 0: set shared_expert_size, or remove "
            "shared_expert_gate"
        )
    if model.expert_bias and model.capacity_factor is not None:
        raise UserError(
            f"expert_bias is True, and capacity_factor is {model.capacity_factor:g}: the tokens that it drops would "
            "still have biases of their experts: remove one of the two"
        )


def check_expert_groups(model: Model) -> None:
    """Checks that expert groups have equal sizes, and that the selected groups have enough experts.

    Raises:
      UserError: the settings don't fit; names values that do.
    """
    count, groups, selected = model.num_experts, model.expert_groups, model.expert_groups_top_k
    if count % groups:
        raise UserError(
            f"num_experts {count} is not divisible by expert_groups {groups}; the nearest expert_groups that fit are "
            f"{nearest_divisors(count, groups)}"
        )
    if selected > groups:
        raise UserError(
            f"expert_groups_top_k {selected} is above expert_groups {groups}: a token selects each group at most once"
        )
    each, chosen = count // groups, model.experts_top_k
    if chosen > selected * each:
        raise UserError(
            f"experts_top_k {chosen} is above the {selected * each} experts of expert_groups_top_k {selected}: set "
            f"expert_groups_top_k to {-(-chosen // each)} or more"
        )
    if groups > 1 and each < 2 and model.router_score == "sigmoid":
        raise UserError(
            f"expert_groups {groups} of {count} experts have one each, and router_score sigmoid scores groups by "
            "their two best experts: use fewer groups"
        )
