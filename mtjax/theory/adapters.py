"""Low-rank adapters (LoRA, arXiv 2106.09685): which products have them, and which parameters learn then.

Beside a frozen `x W` an adapter adds `alpha / rank (x A) B`, with A [inputs, rank] and B [rank, outputs]. Each of
several products that share a matrix - query, key and value; gate and up - has an A and a B of its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mtjax.config import Model

ADAPTER = "lora"
"""The module of an adapter, beside the weight that it adds to."""
RANK = "rank"
"""Logical name of the dimension between A and B."""
PARTS = ("qkv", "kv", "gate")
"""Logical names of dimensions along which the weights of several products are stacked."""
HEAD = "head"
"""The module of a task's head, which learns in full."""


class LoraConfig(NamedTuple):
    """What adapters of a model have in common."""

    rank: int
    scale: float
    dropout: float
    """Rate, on what they read."""


def adapters_of(model: Model, place: str) -> LoraConfig | None:
    """The adapters of a model's products in `attention` or `mlp`; None where these have none."""
    if not model.lora_rank or model.lora_targets not in ("all", place):
        return None
    return LoraConfig(model.lora_rank, model.lora_alpha / model.lora_rank, model.lora_dropout)


def adapter_sizes(inputs: Mapping[str, int], outputs: Mapping[str, int], rank: int) -> tuple[dict[str, int], ...]:
    """The dimensions of A and of B, by logical names in their order."""
    parts = {name: size for name, size in outputs.items() if name in PARTS}
    rest = {name: size for name, size in outputs.items() if name not in PARTS}
    return {**inputs, **parts, RANK: rank}, {**parts, RANK: rank, **rest}


def is_trainable(model: Model, name: str) -> bool:
    """Whether a parameter with this dotted name is trained: all are, or adapters and a task's head alone."""
    parts = name.split(".")
    return not model.lora_rank or ADAPTER in parts or parts[0] == HEAD
