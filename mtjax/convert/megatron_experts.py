"""Megatron-Core's experts: translation of arguments and settings, and the names of their matrices on a rank."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mtjax.config import Model
from mtjax.config.sizes import attention_bias, dense_layers, dense_settings, expert_size
from mtjax.migrate.megatron import supported

EXPERTS = "moe_"
"""Prefix of the names of experts' arguments."""
ONLY: Mapping[str, tuple[Any, ...]] = supported(EXPERTS)
"""Arguments of experts -> the values that mtjax supports."""
BALANCE_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load balancing by mtjax's auxiliary loss, averaged over different sets of tokens; seq_aux_loss, over a sample, is
mtjax's."""
BIAS = ".mlp.router.expert_bias"
"""Suffix of the names of routers' biases, which are float32 whatever the dtype of the other tensors."""
# SequentialMLP's and TEGroupedMLP's names of one expert's matrices.
_NUMBER = re.compile(r"(?<=\.mlp\.experts\.local_experts\.)\d+(?=\.)|(?<=\.mlp\.experts\.linear_fc[12]\.weight)\d+$")
_OF_GROUP = re.compile(r"(.*\.mlp\.experts)\.linear_fc([12])\.weight(\d+)")
_ALL_IN_ONE = re.compile(r"(.*\.mlp)\.experts\.weight([12])")


def has_experts(arguments: Mapping[str, Any]) -> bool:
    """Returns whether the model has experts; old versions set num_experts to 1 for an MLP."""
    count = arguments.get("num_experts")
    return isinstance(count, int) and count > 1


def unread_experts(arguments: Mapping[str, Any]) -> list[str]:
    """Returns the arguments with which mtjax does not support a model with experts."""
    wrong = [
        f"{key} is {arguments[key]!r}"
        for key, values in ONLY.items()
        if key in arguments and arguments[key] not in values
    ]
    unknown = [kind for kind in _balance(arguments) if kind not in (*BALANCE_TYPES, "none")]
    wrong += [f"moe_router_load_balancing_type is {kind!r}" for kind in unknown]
    if _dense(arguments) is None:
        wrong.append(
            f"moe_layer_freq is {arguments['moe_layer_freq']!r}, which is not supported; supported: all layers, "
            "all after the first k, the last of every N"
        )
    # True is the default of Megatron's argument, also where a checkpoint lacks it.
    if arguments.get("add_bias_linear", True):
        wrong.append("experts have no biases in mtjax, and add_bias_linear is True (add --disable-bias-linear)")
    if arguments.get("moe_router_enable_expert_bias") and arguments.get("moe_router_score_function") != "sigmoid":
        wrong.append("moe_router_enable_expert_bias is True without moe_router_score_function sigmoid")
    tensor = arguments.get("tensor_model_parallel_size") or 1
    if (expert_tensor := arguments.get("expert_tensor_parallel_size") or tensor) != tensor:
        wrong.append(f"expert_tensor_parallel_size is {expert_tensor}, not tensor_model_parallel_size {tensor}")
    groups, groups_top_k = _groups(arguments)
    # A token that may go to all groups is not limited, however groups are scored.
    if groups_top_k < groups:
        wrong += _misfit_groups(arguments.get("moe_router_topk") or 2, groups_top_k, _is_sigmoid(arguments))
    return wrong


def _misfit_groups(top_k: int, groups_top_k: int, is_sigmoid: bool) -> list[str]:
    """Returns the difference, if any, in how groups of experts are scored."""
    # A group's score is the sum of its highest scores: of `top_k // groups_top_k` in Megatron (`group_limited_topk`),
    # in mtjax of 2 with sigmoid, as in DeepSeek-V3, and of 1 with softmax, as in DeepSeek-V2.
    theirs, ours = top_k // groups_top_k, 2 if is_sigmoid else 1
    if theirs == ours:
        return []
    score = "sigmoid" if is_sigmoid else "softmax"
    return [
        f"groups of experts scored by their highest {theirs} scores (with router_score {score} mtjax uses the highest "
        f"{ours})"
    ]


def _is_sigmoid(arguments: Mapping[str, Any]) -> bool:
    return arguments.get("moe_router_score_function") == "sigmoid"


def _groups(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the number of groups of experts, and the number of groups that a token is routed to."""
    groups_top_k = arguments.get("moe_router_group_topk")
    # Without moe_router_group_topk Megatron does not look at the number of groups.
    return (arguments.get("moe_router_num_groups") or 1, groups_top_k) if groups_top_k else (1, 1)


def _balance(arguments: Mapping[str, Any]) -> dict[str, float]:
    """Returns the kinds of load balancing, with the weight of each."""
    kinds = arguments.get("moe_router_load_balancing_type") or "none"
    weights = arguments.get("moe_aux_loss_coeff") or 0.0
    if isinstance(kinds, list | tuple) and isinstance(weights, list | tuple):
        return dict(zip(kinds, map(float, weights), strict=True))
    return {str(kinds): float(weights)}


def _dense(arguments: Mapping[str, Any]) -> dict[str, int] | None:
    """Returns mtjax's settings of the dense layers; None if mtjax does not support their pattern."""
    frequency, layers = arguments.get("moe_layer_freq", 1) or 1, arguments.get("num_layers") or 1
    if not isinstance(frequency, list | tuple):
        # As in Megatron, of every N layers the first has experts, beginning with layer 0.
        frequency = [int(number % frequency == 0) for number in range(layers)]
    dense = [number for number, has_experts_there in enumerate(frequency) if not has_experts_there]
    is_valid = len(frequency) == layers > len(dense) and set(frequency) <= {0, 1}
    return dense_settings(dense, layers) if is_valid else None


def expert_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns mtjax's settings of experts from the arguments of a model that has experts."""
    top_k = arguments.get("moe_router_topk") or 2
    groups, groups_top_k = _groups(arguments)
    is_sigmoid = _is_sigmoid(arguments)
    weights = [weight for kind, weight in _balance(arguments).items() if kind in BALANCE_TYPES]
    return {
        "num_experts": arguments["num_experts"],
        **(_dense(arguments) or {}),
        "experts_top_k": top_k,
        "expert_size": arguments.get("moe_ffn_hidden_size") or arguments.get("ffn_hidden_size"),
        "shared_expert_size": arguments.get("moe_shared_expert_intermediate_size") or 0,
        "shared_expert_gate": bool(arguments.get("moe_shared_expert_gate", False)),
        "router_score": "sigmoid" if is_sigmoid else "softmax",
        # Softmax over the top k logits (not pre_softmax) is softmax over all, normalized over the top k.
        # With sigmoid Megatron divides by the sum of the chosen scores, unless only one is chosen
        # (`topk_routing_with_score_function`).
        "router_normalize": top_k > 1 if is_sigmoid else not arguments.get("moe_router_pre_softmax", False),
        "router_scale": float(arguments.get("moe_router_topk_scaling_factor") or 1.0),
        "expert_groups": groups,
        "expert_groups_top_k": groups_top_k,
        "router_bias": bool(arguments.get("moe_router_enable_expert_bias", False)),
        "router_bias_update_rate": float(arguments.get("moe_router_bias_update_rate") or 0.001),
        "router_aux_loss": sum(weights),
        "router_z_loss": float(arguments.get("moe_z_loss_coeff") or 0.0),
        "router_jitter": float(arguments.get("moe_input_jitter_eps") or 0.0),
    }


def expert_misfits(model: Model, is_legacy: bool) -> list[str]:
    """Returns the settings of an mtjax model's experts that Megatron does not support."""
    if not model.num_experts:
        return []
    is_sigmoid, top_k = model.router_score == "sigmoid", model.experts_top_k
    wrong = {
        f"{model.num_experts} experts; use --transformer-impl transformer_engine or local": is_legacy,
        "bias true with experts that have no biases": attention_bias(model) == "all",
        f"capacity_factor {model.capacity_factor}: its capacity is per microbatch, and mtjax's per sample": (
            model.capacity_factor is not None
        ),
        f"router_score {model.router_score} with router_bias": model.router_bias and not is_sigmoid,
        **{name: getattr(model, name) for name in ("router_linear_bias", "expert_bias")},
        "router_score sigmoid without router_normalize": is_sigmoid and top_k > 1 and not model.router_normalize,
        "experts_top_k 1 with router_normalize": top_k == 1 and model.router_normalize,
    }
    misfits = [what for what, holds in wrong.items() if holds]
    if model.expert_groups_top_k < model.expert_groups:
        misfits += _misfit_groups(top_k, model.expert_groups_top_k, is_sigmoid)
    return misfits


def expert_arguments(model: Model, tensor: int, ranks: int, is_grouped: bool) -> dict[str, Any]:
    """Returns Megatron's arguments for the experts of an mtjax model, {} without experts.

    Args:
      model: a model that `expert_misfits` has checked.
      tensor: tensor parallel degree.
      ranks: expert parallel degree.
      is_grouped: whether all experts of a rank are one module (`--moe-grouped-gemm`).
    """
    if not model.num_experts:
        return {}
    # A hybrid model's pattern says which layers have experts.
    dense = () if model.layer_pattern else dense_layers(model)
    is_limited = model.expert_groups_top_k < model.expert_groups
    is_softmax = model.router_score == "softmax"
    return {
        "num_experts": model.num_experts,
        "moe_layer_freq": [int(number not in dense) for number in range(model.num_layers)] if dense else 1,
        "moe_router_topk": model.experts_top_k,
        "moe_ffn_hidden_size": expert_size(model),
        "moe_shared_expert_intermediate_size": model.shared_expert_size or None,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_router_score_function": model.router_score,
        "moe_router_pre_softmax": is_softmax and not model.router_normalize,
        "moe_router_topk_scaling_factor": None if model.router_scale == 1 else model.router_scale,
        "moe_router_num_groups": model.expert_groups if is_limited else None,
        "moe_router_group_topk": model.expert_groups_top_k if is_limited else None,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_router_bias_update_rate": model.router_bias_update_rate,
        # mtjax's loss is per sample.
        "moe_router_load_balancing_type": "seq_aux_loss" if model.router_aux_loss else "none",
        "moe_aux_loss_coeff": model.router_aux_loss,
        "moe_z_loss_coeff": model.router_z_loss or None,
        "moe_input_jitter_eps": model.router_jitter or None,
        # As mtjax computes; Megatron's default is the type of the activations.
        "moe_router_dtype": "fp32",
        "moe_expert_capacity_factor": None,
        "moe_grouped_gemm": is_grouped,
        "expert_model_parallel_size": ranks,
        "expert_tensor_parallel_size": tensor,
    }


def number_of(name: str) -> int | None:
    """Returns the number of the expert that a tensor belongs to; None if it is not an expert's."""
    match = _NUMBER.search(name)
    return int(match[0]) if match else None


def with_number(name: str, number: int) -> str:
    """Returns the name of the same tensor of another expert."""
    return _NUMBER.sub(str(number), name)


def by_expert(tensors: Mapping[str, Any], rank: int, ranks: int) -> Iterator[tuple[str, Any]]:
    """Yields a rank's tensors with the names of SequentialMLP: one per expert, with its number in the model.

    TEGroupedMLP numbers the weights of one module. GroupedMLP has one tensor for all experts of a rank, each expert's
    matrix transposed ([embed, mlp] and [mlp, embed]) and contiguous in memory, whatever the tensor's shape.

    Args:
      tensors: torch tensors of one expert-parallel rank, by name.
      rank: the expert-parallel rank.
      ranks: expert parallel degree.
    """
    for name, tensor in tensors.items():
        router = tensors.get(f"{match[1]}.router.weight") if (match := _ALL_IN_ONE.fullmatch(name)) else None
        if match and router is not None:
            # The tensor's shape does not show how many experts it has; the router's does.
            count, hidden = router.shape[0] // ranks, router.shape[1]
            shape = (count, hidden, -1) if match[2] == "1" else (count, -1, hidden)
            for i, matrix in enumerate(tensor.reshape(shape)):
                yield f"{match[1]}.experts.local_experts.{rank * count + i}.linear_fc{match[2]}.weight", matrix.T
            continue
        name = _OF_GROUP.sub(r"\1.local_experts.\3.linear_fc\2.weight", name)
        number = number_of(name)
        if number is None:
            yield name, tensor
        else:
            yield with_number(name, rank * _count(tensors) + number), tensor


def _count(tensors: Mapping[str, Any]) -> int:
    """Returns the number of experts of a layer on one rank."""
    return 1 + max(number for name in tensors if (number := number_of(name)) is not None)
