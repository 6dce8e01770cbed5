"""Experts whose matrices are frozen, perhaps with low-rank adapters (LoRA): one for each expert, as peft has them."""

from typing import Any

import jax
from jax import Array

from mtjax.config import Model
from mtjax.config.adapters import adapters_of
from mtjax.models.kernels.frozen_experts import FrozenBlocks
from mtjax.models.lora import adapter_of, add_adapter
from mtjax.models.mixers.adapted import AdaptedMLP
from mtjax.models.mixers.experts import Experts, named
from mtjax.models.mixers.transformer import MLP


class AdaptedExperts(Experts):
    """Experts, and perhaps a shared expert, with adapters where settings ask for them; routers are frozen."""

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        super().__init__(model, output_std=output_std, key=key)
        self.low = low = adapters_of(model, "mlp")
        num_biases = int(self.up.bias is not None)
        self.blocks = FrozenBlocks(model.activation, model.num_experts, num_biases, low.scale if low else 1.0)
        if low is None:
            return
        # Split as `Experts` does. `first_factor` folds a number in, so that an adapter does not repeat its matrix's
        # bits.
        up_key, down_key, *_ = jax.random.split(key, 4)
        add_adapter(self.up, 2, low, up_key)
        add_adapter(self.down, 2, low, down_key)

    def shared_class(self, model: Model) -> type[MLP]:
        """See `Experts.shared_class`."""
        return AdaptedMLP if adapters_of(model, "mlp") else super().shared_class(model)

    def matrices(self, dtype: Any) -> list[tuple[Array, tuple[str, ...]]]:
        """Returns `Experts.matrices`, then those of the adapters: A and B of up, and of down."""
        weights = super().matrices(dtype)
        if self.low is None:
            return weights
        adapters = (adapter_of(product) for product in (self.up, self.down))
        return [*weights, *(named(matrix, dtype) for one in adapters for matrix in (one.a, one.b))]
