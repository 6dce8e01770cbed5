"""Mixers with a recurrent state, with low-rank adapters on their two products (LoRA, `mtjax.models.lora`)."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.adapters import RANK, LoraConfig, joint_adapter_sizes
from mtjax.config.ssm import ssm_groups
from mtjax.models.layer_context import LayerContext
from mtjax.models.lora import adapter_of, add_adapter, first_factor, gather_sequence_shared
from mtjax.models.mixers.adapted import Adapted
from mtjax.models.mixers.delta_net import GatedDeltaNet
from mtjax.models.mixers.mamba import Mamba
from mtjax.models.mixers.recurrent import GroupedProjection, assembled_by_groups
from mtjax.models.ops import constant
from mtjax.models.project import project


class AdaptedRecurrent(Adapted):
    """A mixer with a recurrent state and adapters: the first base of such a class, before the mixer."""

    input_site: ClassVar[int]
    """Dropout site of the input of the first product's adapter."""
    inputs: Any

    def add_adapters(self, model: Model, key: Array) -> None:
        """See `Adapted.add_adapters`."""
        input_key, output_key = jax.random.split(key)
        self.inputs.lora = InputAdapter(self.inputs, model, self.low, key=input_key)
        add_adapter(self.output, 2, self.low, output_key)

    def project_in(self, x: Array, context: LayerContext) -> Array:
        """See `RecurrentMixer.project_in`."""
        for_product, for_adapter = gather_sequence_shared(x, self.low, context, self.input_site)
        return self.inputs(for_product) + adapter_of(self.inputs)(for_adapter)


class AdaptedMamba(AdaptedRecurrent, Mamba):
    """Mamba-2 with adapters."""

    target = "mamba"
    input_site, output_site = 10, 11


class AdaptedDeltaNet(AdaptedRecurrent, GatedDeltaNet):
    """A gated delta net with adapters."""

    target = "delta"
    input_site, output_site = 14, 15


class InputAdapter(nnx.Module):
    """`scale (x A) B` of the first product: one A for all of its parts, and B in the parts of its weight."""

    def __init__(self, inputs: GroupedProjection, model: Model, low: LoraConfig, *, key: Array) -> None:
        """Draws A as `mtjax.models.lora.Adapter` does; B is 0."""
        self.names = inputs.names
        outputs = {name: _outputs(part) for name, part in zip(self.names, inputs.parts(), strict=True)}
        sizes = joint_adapter_sizes(model.hidden_size, low.rank, outputs)
        self.a = first_factor(sizes["a"], model.hidden_size, key)
        for name in self.names:
            setattr(self, name, constant(0.0, sizes[name]))
        self.scale, self.groups = low.scale, ssm_groups(model)

    def __call__(self, x: Float[Array, "b s embed"]) -> Float[Array, "b s u width"]:
        """Computes what is added to the product, in its order."""
        low = self.scale * project(x, self.a[...], None, (RANK,), "seq")
        b = assembled_by_groups([getattr(self, name) for name in self.names], self.groups)
        return project(low, b, None, ("heads", None), save_for_backward=False)


def _outputs(weight: nnx.Param) -> dict[str, int]:
    """Returns the dimensions of a weight but its input."""
    return dict(zip(weight.get_metadata()["axes"][1:], weight.shape[1:], strict=True))
