"""The MLP of a transformer."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import GATED, mlp_bias, mlp_size
from mtjax.layout.weights import mlp_products
from mtjax.models.activations import activation_of
from mtjax.models.layer_context import LayerContext
from mtjax.models.linear import Linear, scaled
from mtjax.models.mixers.mixer import State
from mtjax.models.project import gather_sequence


class MLP(nnx.Module):
    """Column-parallel, activation, row-parallel: one all-reduce forward, one backward (Figure 3a of the paper)."""

    scope: ClassVar[str] = "mlp"
    init_number: ClassVar[int] = 1
    dropout_site: ClassVar[int] = 2

    def __init__(self, model: Model, *, output_std: float, key: Array) -> None:
        """Draws the parameters."""
        up_key, down_key = jax.random.split(key)
        sizes = mlp_products(model.hidden_size, mlp_size(model), is_gated=model.activation in GATED)
        bias = mlp_bias(model)
        self.up = Linear(*sizes["up"], std=model.init_std, bias=bias, key=up_key)
        self.down = Linear(*sizes["down"], std=output_std, bias=bias, sequence="act_seq", key=down_key)
        self.activation, self.gate_scale = activation_of(model.activation), model.mlp_gate_scale

    def __call__(
        self,
        x: Float[Array, "batch act_seq embed"],
        context: LayerContext,
        state: State,
        factor: Float[Array, "batch seq 1"] | None = None,
    ) -> tuple[Float[Array, "batch act_seq embed"], State]:
        """Applies to each token, and multiplies the output by `factor`, if any; there is no state."""
        inner = self.project_up(x, context)
        if self.gate_scale != 1:
            inner = scaled(inner, np.array([[self.gate_scale], [1.0]], np.float32))
        inner = self.activation(inner)
        if factor is not None:
            # Before the row-parallel product, whose output is then reduced together with what is added to it; in
            # float32, so that the factor's gradient is reduced in float32.
            inner = (inner.astype(jnp.float32) * factor).astype(inner.dtype)
        return self.project_down(inner, context), state

    def project_up(self, x: Array, context: LayerContext) -> Array:
        """All-gathers sequences, and projects to [batch, seq, mlp], or [batch, seq, 2, mlp] with a gate."""
        return self.up(gather_sequence(x, self.up.rule))

    def project_down(self, inner: Array, context: LayerContext) -> Array:
        """Projects [batch, seq, mlp] to the residual stream, [batch, act_seq, embed]."""
        return self.down(inner)
