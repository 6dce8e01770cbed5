"""A layer, its mixers by name (attention, MLP, experts), and stacks of layers.

Mixers are connected to the residual stream one after the other, or side by side. The parameters of a stack are stacked
along `layers`, and one traced program runs all of them.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from mtjax.config import Model, Parallel
from mtjax.config.sizes import joins_outputs, layer_parallel, sublayer_norms
from mtjax.layout.stacks import LayerStack
from mtjax.layout.stages import stack_order
from mtjax.models.layer_context import RESIDUAL, LayerContext, Mixer, State
from mtjax.models.layer_loop import LayerLoopSettings, LoopOverLayers, loop_over_layers
from mtjax.models.mixers.transformer import MLP, SelfAttention
from mtjax.models.ops import dropout, make_norm, scaled
from mtjax.sharding.axes import num_shards
from mtjax.sharding.param_comm import LayerInputs, materialize

Residual = Float[Array, "batch act_seq embed"]
"""Hidden states between layers (the residual stream)."""


def mixer_types(model: Model, kind: str) -> Mapping[str, type[Mixer]]:
    """Returns the mixers of a kind of layer, by name, in the order in which they run."""
    if kind == "transformer" and not (model.lora_rank or model.kv_lora_rank or model.attention_output_gate):
        return {"attention": SelfAttention, "mlp": MLP}
    from mtjax.models.mixers.registry import KINDS, MIXERS

    return {name: MIXERS[name](model) for name in KINDS[kind]}


class Layer(nnx.Module):
    """The mixers of a kind of layer, each with its norms, connected to the residual stream.

    With m a mixer and n a norm, norm_placement pre computes `x + m(n(x))` (Figure 7b of the paper), post, the original
    BERT's, `n(x + m(x))` (Figure 7a), output `x + n(m(x))`, and sandwich `x + n'(m(n(x)))`.
    """

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, key: Array) -> None:
        """Draws the parameters of a layer of a kind in `KINDS` (`mtjax.models.mixers.registry`)."""
        mixers = mixer_types(model, kind)
        self.mixers = tuple(mixers)
        # GPT-2: products before the residual stream are initialized smaller, by the number of additions to it.
        additions = (1 if model.layer_pattern else 2) * model.num_layers
        output_std = model.init_std / additions**0.5 if model.scaled_init else model.init_std
        for name, mixer in mixers.items():
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
        # By mixer; factors of Falcon-H1.
        self.output_scales = {
            "attention": model.attention_output_scale,
            "mlp": model.mlp_output_scale,
            "mamba": model.ssm_output_scale,
        }

    def __call__(
        self, x: Residual, context: LayerContext, states: Mapping[str, State] | None
    ) -> tuple[Residual, dict[str, State] | None]:
        """Runs the mixers, which add their outputs to the residual stream: each in its turn, or in a parallel layer,
        where all read the same hidden states, all at once. `states` are those of the mixers that have one, by name;
        None if none has. So are the new states, which are returned with the hidden states."""
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
        # A factor of 1 would be one more operation of the program. Others are rounded to the compute type, which those
        # of `scaled` are not.
        return x + (output if self.scale == 1 else output * self.scale)


class Stack(nnx.Module):
    """Layers of one kind, whose parameters are stacked along `layers`, in the order of `stack_order`."""

    def __init__(
        self,
        model: Model,
        dtype: jax.typing.DTypeLike,
        *,
        layer_stack: LayerStack,
        loop_settings: LayerLoopSettings,
        parallel: Parallel,
        key: Array,
        layer_type: type[Layer] = Layer,
    ) -> None:
        """Draws the parameters of the layers that `layer_stack` describes; `key` is split into one for each layer of
        the section, `parallel` says which of them each stage has, and `dtype` is that of products."""
        self.path = layer_stack.path
        self.order = stack_order(layer_stack, num_shards("layers"), parallel.chunks, parallel.layers_per_stage)
        # A layer draws from the key of its number, so that parameters do not depend on the pipeline's layer order.
        keys = jax.random.split(key, layer_stack.among or layer_stack.layers)
        if not self.order.is_plain or layer_stack.layers < len(keys):
            # Padding takes any key: its parameters become zeros.
            keys = keys[np.maximum(self.order.flat, 0)]
        draw = lambda key: layer_type(model, dtype, kind=layer_stack.kind, key=key)  # noqa: E731
        # Stacked by `vmap`, so that each rank draws its shards of all of its layers in one program.
        if num_shards("layers") == 1:
            self.layers = jax.vmap(draw)(keys)
        else:
            from mtjax.models.padding_layers import draw_on_stages

            self.layers = draw_on_stages(draw, keys, self.order)
        self.loop_settings = loop_settings

    def over_layers(self, context: LayerContext, states: State = None) -> LoopOverLayers:
        """Returns the function that runs all layers one after the other.

        Args:
          context: other inputs of all layers.
          states: the layers' states, each array stacked along `layers`; None in training.

        Returns:
          (hidden states) -> the hidden states, and the layers' new states, stacked likewise; None where no layer has
          any.
        """
        layers = LayerInputs(self.layers, jnp.asarray(self.order.flat), states)
        return loop_over_layers(partial(run_layer, context), layers, self.loop_settings)


def run_layer(context: LayerContext, x: Residual, inputs: LayerInputs) -> tuple[Residual, State]:
    """Runs one layer, with its number and dropout keys, on hidden states; returns them and the layer's new state."""
    # Here ZeRO-3 gathers the layer's parameters, and reductions of gradients are attached (`param_comm`).
    return materialize(inputs.parameters)(x, context_of_layer(context, inputs.number), inputs.state)


def context_of_layer(context: LayerContext, number: Array) -> LayerContext:
    """Returns the context of a layer: with its number, int32 [], and its dropout keys."""
    keys = context.dropout_keys
    # A key per sample and layer: masks depend neither on the mesh nor on the stage or loop in which a layer runs.
    layer_keys = None if keys is None else jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
    return dataclasses.replace(context, dropout_keys=layer_keys, layer=number)
