"""Gives adapters of experts that transformers holds as one parameter for all of them (`target_parameters`) peft's names
and shapes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mtjax.config.adapters import EXPERT, GATE
from mtjax.convert.parameters import Parameter
from mtjax.convert.peft_config import DOWN, UP
from mtjax.convert.table import Tensor, name_of

IN_FILES = {"input_linear.weight": UP, "output_linear.weight": DOWN}
"""Ends of names of tensors with all experts, of types whose files have others than transformers' modules."""


def is_of_all_experts(tensor: Tensor) -> bool:
    """Returns whether a tensor stacks the matrices of all experts."""
    return EXPERT in tensor.axes and not tensor.each


def _parameter_of(name: str) -> tuple[str, str]:
    """Returns transformers' module and parameter of a tensor in the files that stacks all experts."""
    for end, parameter in IN_FILES.items():
        if name.endswith(f".{end}"):
            return f"{name.removesuffix(end)}experts", parameter
    module, _, parameter = name.rpartition(".")
    return module, parameter


def stacked_factors(
    tensor: Tensor, names: tuple[Parameter, Parameter], layer: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns peft's A [experts * rank, inputs] and B [outputs, rank * experts] of a tensor that stacks all experts.

    The adapters of gate and up become one with the sum of their ranks.

    Args:
      tensor: with all experts.
      names: mtjax's A and B.
      layer: their arrays of a layer.
    """
    (a, b), axes = layer, [list(parameter.axes) for parameter in names]
    if GATE not in axes[0]:
        a, b = np.expand_dims(a, -2), np.expand_dims(b, 1)
    experts, _, parts, rank = a.shape
    # [experts, parts, rank, inputs]; of B only the blocks of equal parts, [experts, parts, outputs, parts, rank]
    down, up = a.transpose(0, 2, 3, 1), np.zeros((experts, parts, b.shape[-1], parts, rank), np.float32)
    for part in range(parts):
        up[:, part, :, part] = b[:, part].swapaxes(1, 2)
    if any(group[-1] == GATE and len(group) > 1 for group in tensor.dims):  # gate and up alternate
        up = up.swapaxes(1, 2)
    up = up.reshape(experts, parts * b.shape[-1], parts * rank)
    up = up.transpose(1, 2, 0).reshape(up.shape[1], -1)
    return down.reshape(-1, down.shape[-1]), np.ascontiguousarray(up)


def named_factors(tensor: Tensor, layer: int | None, pair: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns peft's names of A and B of a tensor that stacks all experts; both of a module's parameters have some."""
    module, parameter = _parameter_of(name_of(tensor, layer))
    # peft wraps a module once for each adapted parameter, in their order: the last, down, is outside.
    wrapped = "" if parameter == DOWN else ".base_layer"
    return {f"{module}{wrapped}.lora_{matrix}.weight": array for matrix, array in zip("AB", pair, strict=True)}


def with_experts(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Returns an adapter_config.json with the parameters of experts, whose adapters have no dropout in peft."""
    names = sorted({_parameter_of(tensor.name)[1] for tensor in tensors})
    found = dict(config) | {"target_parameters": [f"experts.{name}" for name in names], "lora_dropout": 0.0}
    if UP in names:  # gate and up
        for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            # Gate and up are one parameter in transformers, whose rank is the sum of both; with twice the alpha the
            # scale, alpha / rank, is the same.
            found[pattern] = config[pattern] | {f"experts.{UP}": 2 * config[key]}
    return found
