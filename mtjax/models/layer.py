"""One layer: mixers (attention, MLP, experts), each connected to the residual stream: one after the other, or side by
side."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from mtjax.config import Model
from mtjax.config.sizes import joins_outputs, layer_parallel, sublayer_norms
from mtjax.models.dropout import dropout
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.linear import scaled
from mtjax.models.mixers.mixer import State
from mtjax.models.mixers.registry import KINDS, MIXERS
from mtjax.models.norms import make_norm


class Layer(nnx.Module):
    """The mixers of a kind of layer, each with its norms, connected to the residual stream.

    With m a mixer and n a norm, norm_placement pre computes `x + m(n(x))` (Figure 7b of the paper), post, the original
    BERT's, `n(x + m(x))` (Figure 7a), output `x + n(m(x))`, and sandwich `x + n'(m(n(x)))`.
    """

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, key: Array) -> None:
        """Draws the parameters of a layer of a kind in `KINDS`."""
        self.mixers = KINDS[kind]
        # GPT-2: products before the residual stream are initialized smaller, by the number of additions to it.
        additions = (1 if model.layer_pattern else 2) * model.num_layers
        output_std = model.init_std / additions**0.5 if model.scaled_init else model.init_std
        for name in self.mixers:
            mixer = MIXERS[name](model)
            mixer_key = jax.random.fold_in(key, mixer.init_number)
            # The attributes' names are the parameters' names: `attention`, `attention_norm`, `mlp`, `mlp_norm`; norms
            # of outputs are `attention_output_norm` and `mlp_output_norm`.
            for norm in sublayer_norms(model, is_first=name == self.mixers[0], kind=kind):
                setattr(self, f"{name}_{norm}", make_norm(model, dtype))
            setattr(self, name, mixer(model, output_std=output_std, key=mixer_key))
        self.is_post, self.is_parallel = model.norm_placement == "post", layer_parallel(model, kind) != "no"
        self.skips_first_norm = not model.first_attention_norm
        self.rate, self.scale = model.hidden_dropout, model.residual_scale
        self.is_joined = self.is_parallel and joins_outputs(model)
        if self.is_joined:
            from mtjax.models.parallel_residual import last_products

            for product in last_products(self):
                product.adds_bias = False
        self.output_scales = {
            "attention": model.attention_output_scale,
            "mlp": model.mlp_output_scale,
            "mamba": model.ssm_output_scale,
        }

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, states: Mapping[str, State] | None
    ) -> tuple[Float[Array, "batch act_seq embed"], dict[str, State] | None]:
        """Runs the mixers, which add their outputs to the residual stream: each in its turn, or in a parallel layer,
        where all read the same hidden states, all at once.

        Args:
          x: hidden states.
          context: with the layer's dropout keys.
          states: of the mixers that have one, by name; None if none has.

        Returns:
          The hidden states, and the new states of the mixers that have one; None if none has.
        """
        if self.is_parallel:
            from mtjax.models.parallel_residual import run_side_by_side

            return run_side_by_side(self, x, context, states)
        after: dict[str, Any] = {}
        for name in self.mixers:
            mixer = getattr(self, name)
            with jax.named_scope(mixer.scope):
                normed = x if self.is_post else self.normalize(f"{name}_norm", x)
                if self.skips_first_norm and name == self.mixers[0]:
                    # All layers are one program, so that the first layer computes the norm, too.
                    normed = lax.select_n(jnp.asarray(context.layer) == 0, normed, x.astype(normed.dtype))
                mixed, state = mixer(normed, context, (states or {}).get(name))
                mixed = scaled(mixed, self.output_scales.get(name, 1.0))
                x = self.add(x, self.normalize(f"{name}_output_norm", mixed), mixer, context)
                x = self.normalize(f"{name}_norm", x) if self.is_post else x
            if state is not None:
                after[name] = state
        return x, after or None

    def normalize(self, norm: str, x: Array) -> Array:
        """Applies the norm of this name, if the layer has it."""
        return getattr(self, norm)(x) if hasattr(self, norm) else x

    def add(self, x: Array, output: Array, mixer: Any, context: LayerContext) -> Array:
        """Adds a mixer's output to the residual stream, with its dropout and scale."""
        keys, positions = context.dropout_keys, context.positions
        output = dropout(output, self.rate, keys, mixer.dropout_site, RESIDUAL, positions=positions)
        # A factor of 1 would be one more operation of the program.
        return x + (output if self.scale == 1 else output * self.scale)
