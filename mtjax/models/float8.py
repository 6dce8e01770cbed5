"""Products of layers in 8-bit floats: which they are, and the state of delayed scaling among the parameters."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from mtjax.config import Config
from mtjax.config.float8 import UNQUANTIZED, float8_products, num_scales, scale_digits, unfit_products
from mtjax.layout.stages import PADDING
from mtjax.models.project import product
from mtjax.sharding.axes import PartitionSpec, num_shards, sequence_is_sharded, spec, varying_like
from mtjax.sharding.float8 import E4M3, E5M2, QuantizedWeight, Recipe, Scales, float8_product

FIRST_SCALES = (4.0, 64.0, 2.0**24)
"""Of x, W and g in the first step, whose largest values are unknown; that of W is replaced by its own."""
UNSEEN = 2.0**20
"""Age of an exponent that was never found: above any history."""


_is_unquantized: ContextVar[bool] = ContextVar("products are not quantized", default=False)


def unquantized(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of layers so that it is traced with products in the compute type, in the scope `UNQUANTIZED`."""

    def wide(*arguments: Any) -> Any:
        """Calls `run` while products are not quantized."""
        token = _is_unquantized.set(True)
        try:
            with jax.named_scope(UNQUANTIZED):
                return run(*arguments)
        finally:
            _is_unquantized.reset(token)

    return wide


class Float8Product(nnx.Module):
    """A `ProductRule` in 8 bits; with delayed scaling it has parameters, which no optimizer changes."""

    def __init__(self, recipe: Recipe, heads: int, layers: Array | None) -> None:
        """Builds the state of a stack's products.

        Args:
          recipe: how products are quantized.
          heads: rows of the counts; each tensor parallel rank has some of them.
          layers: float32 [layers], 0 for padding and else 1.
        """
        self.recipe = recipe
        if layers is None:
            self.scale = self.age = None
            return
        names = ("operands", "heads", "scales")
        ages = jnp.full((len(layers), 2, heads, num_scales(recipe.digits)), UNSEEN, out_sharding=spec("layers", *names))
        self.scale = nnx.Param(layers[:, None] * jnp.asarray(FIRST_SCALES), axes=names[:1])
        # Zeros for padding layers: a state of zeros does not change a checksum (`padding_layers`).
        self.age = nnx.Param(layers[:, None, None, None] * ages, axes=names)

    @property
    def gathers_sequence(self) -> bool:
        """See `ProductRule`."""
        return self.recipe.gathers and not _is_unquantized.get()

    def __call__(
        self, dims: tuple[str, ...], sharding: PartitionSpec, x: Array, weight: Array | QuantizedWeight
    ) -> Array:
        """Computes `x W`; see `ProductRule`."""
        if _is_unquantized.get():
            return product(dims, sharding, x, weight)
        if self.recipe.by_rows:
            from mtjax.sharding.float8_rows import rowwise_product

            return rowwise_product(self.recipe, dims, sharding, x, weight)
        if self.scale is None or self.age is None:
            return float8_product(self.recipe, dims, sharding, x, weight, None)
        scales = Scales(varying_like(self.scale[...], x), varying_like(self.age[...], x))
        if isinstance(weight, QuantizedWeight):
            # Quantized once for the step: its gradient is that of the carrier, which has the compute type.
            return float8_product(self.recipe, dims, sharding, x, weight.carrier, scales, weight.values)
        return float8_product(self.recipe, dims, sharding, x, weight, scales)


def quantize_products(model: Any, config: Config) -> None:
    """Makes the products of a decoder's layers run in 8 bits, except those whose sizes do not fit.

    Embedding, head, norms, experts, routers and attention's own products remain as they are.

    Raises:
      LookupError: no layer has one of the products.
    """
    training, heads, degree = config.training, config.model.num_heads, num_shards("heads")
    # Gradients span more powers of two than activations, and need fewer digits.
    kind = E5M2 if training.fp8_format == "hybrid" else E4M3
    names, left = float8_products(config.model, degree), unfit_products(config.model, degree)
    is_delayed = training.fp8 == "delayed"
    # Adapters read the same sequences in 16 bits.
    gathers = is_delayed and sequence_is_sharded() and not left and not config.model.lora_rank
    digits = scale_digits(training.fp8, training.fp8_scales)
    recipe = Recipe(is_delayed, kind, gathers=gathers, by_rows=training.fp8 == "rowwise", digits=digits)
    ends = (training.fp8_bf16_first_layers, training.fp8_bf16_last_layers)
    gradients_in_turn = not config.model.lora_rank  # frozen matrices have no gradients to wait for
    missing = set(names)
    for stack in model.decoder_stacks:
        stack.loop_settings = replace(stack.loop_settings, unquantized=ends, gradients_in_turn=gradients_in_turn)
        layers = _is_layer(stack) if recipe.is_delayed else None
        for name in names:
            linear: Any = stack.layers
            for part in name.split("."):
                linear = getattr(linear, part, None)
            if linear is not None:
                linear.rule = Float8Product(recipe, heads, layers)
                missing.discard(name)
    if missing:
        raise LookupError(f"no layer has {', '.join(sorted(missing))}, which mtjax.config.float8 lists as products")


def _is_layer(stack: Any) -> Array:
    """Returns float32 [layers]: 0 for padding rows of a stack, else 1."""
    return jnp.asarray([float(number != PADDING) for number in stack.order.flat], out_sharding=spec("layers"))
