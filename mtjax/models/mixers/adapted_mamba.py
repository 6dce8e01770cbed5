"""Mamba-2 with low-rank adapters on its two products (LoRA, `mtjax.models.lora`)."""

from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.adapters import RANK, LoraConfig
from mtjax.config.ssm import ssm_groups
from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import constant
from mtjax.models.lora import adapter_of, add_adapter, first_factor, gather_sequence_shared
from mtjax.models.mixers.adapted import Adapted
from mtjax.models.mixers.mamba import Mamba
from mtjax.models.mixers.recurrent import GroupedProjection, assembled_by_groups
from mtjax.models.project import project

INPUT_SITE, OUTPUT_SITE = 10, 11
"""Dropout sites of the adapters' inputs."""


class AdaptedMamba(Adapted, Mamba):
    """Mamba-2 with adapters."""

    target = "mamba"
    output_site = OUTPUT_SITE

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        input_key, output_key = jax.random.split(key)
        inputs: Any = self.inputs
        inputs.lora = InputAdapter(self.inputs, model, self.low, key=input_key)
        add_adapter(self.output, 2, self.low, output_key)

    def project_in(self, x: Array, context: LayerContext) -> Array:
        """See `Mamba.project_in`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, INPUT_SITE)
        return self.inputs(for_product) + adapter_of(self.inputs)(for_adapter)


class InputAdapter(nnx.Module):
    """`scale (x A) B` of the first product: one A, as `in_proj` is one matrix elsewhere, and B in the parts of its
    weight."""

    def __init__(self, inputs: GroupedProjection, model: Model, low: LoraConfig, *, key: Array) -> None:
        """Draws A as `mtjax.models.lora.Adapter` does; B is 0."""
        self.a = first_factor({"embed": model.hidden_size, RANK: low.rank}, model.hidden_size, key)
        self.gate_value, self.b_c, self.rate = (_second_factor(part, low.rank) for part in inputs.parts())
        self.scale, self.groups = low.scale, ssm_groups(model)

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """Computes what is added to the product, in its order."""
        low = self.scale * project(x, self.a[...], None, (RANK,), "seq")
        b = assembled_by_groups((self.gate_value, self.b_c, self.rate), self.groups)
        return project(low, b, None, ("heads", None), save_for_backward=False)


def _second_factor(weight: nnx.Param, rank: int) -> nnx.Param:
    """Returns zeros with a rank in the place of a weight's inputs."""
    names = weight.get_metadata()["axes"][1:]
    return constant(0.0, {RANK: rank, **dict(zip(names, weight.shape[1:], strict=True))})
