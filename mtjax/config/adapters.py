"""Low-rank adapters (LoRA, arXiv 2106.09685): which matmuls have them, and which parameters are trainable.

An adapter adds `alpha / rank (x A) B` to a frozen `x W`, with A [inputs, rank] and B [rank, outputs]. Each of several
matmuls that share a matrix - query, key and value; gate and up - has a separate A and B.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mtjax.config.model import Model
from mtjax.families.retro.config import is_frozen_in_retro

ADAPTER = "lora"
"""Name of an adapter's module, next to the weight that it adds to."""
RANK = "rank"
"""Logical name of the dimension between A and B."""
GATE = "gate"
"""Logical name of the dimension along which the gate and the product that it multiplies are stacked."""
PARTS = ("qkv", "kv", GATE)
"""Logical names of dimensions along which the weights of several matmuls are stacked."""
EXPERT = "expert"
"""Logical name of the dimension along which experts are stacked: each has an adapter."""
HEAD = "head"
"""Name of the module of a task's head, all of which is trained."""


class LoraConfig(NamedTuple):
    """Settings of a model's adapters."""

    rank: int
    scale: float
    dropout: float
    """Rate, on their inputs."""


def adapters_of(model: Model, target: str) -> LoraConfig | None:
    """Returns the settings of the adapters in `attention`, `mlp`, `mamba` or `delta`; None where it has none."""
    if not model.lora_rank or not adapts(model, target):
        return None
    # The scale of the paper: a change of the rank then needs no other learning rate.
    return LoraConfig(model.lora_rank, model.lora_alpha / model.lora_rank, model.lora_dropout)


def adapts(model: Model, target: str) -> bool:
    """Returns whether lora_targets includes `attention`, `mlp`, `mamba` or `delta`."""
    return model.lora_targets in ("all", target) or (model.lora_targets == "mixers" and target != "mlp")


def adapter_rank(model: Model, target: str) -> int:
    """Returns the rank of the adapters in `attention`, `mlp`, `mamba` or `delta`; 0 where it has none."""
    low = adapters_of(model, target)
    return low.rank if low else 0


def adapter_sizes(inputs: Mapping[str, int], outputs: Mapping[str, int], rank: int) -> tuple[dict[str, int], ...]:
    """Returns the dimensions of A and of B, by logical names in their order."""
    experts = {name: size for name, size in inputs.items() if name == EXPERT}
    stacked = {name: size for name, size in outputs.items() if name in PARTS}
    others = {name: size for name, size in outputs.items() if name not in PARTS}
    # A has the stacked dimension too, as each of the stacked products has an A of its own; of experts both have it.
    return {**inputs, **stacked, RANK: rank}, {**experts, **stacked, RANK: rank, **others}


def joint_adapter_sizes(inputs: int, rank: int, outputs: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """Returns the dimensions of A and of each B where several products of the hidden states have one A, by name.

    Args:
      inputs: width of the hidden states.
      rank: of the adapter.
      outputs: name of a B -> the outputs of its product.
    """
    return {"a": {"embed": inputs, RANK: rank}, **{name: {RANK: rank, **sizes} for name, sizes in outputs.items()}}


def is_trainable(model: Model, name: str) -> bool:
    """Returns whether the parameter of this dotted name is trained: with LoRA adapters and a task's head, of a Retro
    what `retro_frozen` leaves, else all."""
    modules = name.split(".")
    if model.retro_frozen != "none":
        return not is_frozen_in_retro(model, modules)
    return not model.lora_rank or ADAPTER in modules or modules[0] == HEAD


def trains_all(model: Model) -> bool:
    """Returns whether all parameters are trained."""
    return not model.lora_rank and model.retro_frozen == "none"
