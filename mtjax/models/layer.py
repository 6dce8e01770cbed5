"""One layer: mixers (attention, MLP, experts) that run one after the other, each connected to the residual stream."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax import Array
from jaxtyping import Float

from mtjax.config import Model
from mtjax.models.dropout import dropout
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.mixers.mixer import State
from mtjax.models.mixers.registry import KINDS, mixer_of
from mtjax.models.norms import make_norm

Pointwise = Callable[[Array], Array]
Mix = Callable[[Array], tuple[Array, State]]


def pre_norm(x: Array, norm: Pointwise, mix: Mix, drop: Pointwise) -> tuple[Array, State]:
    """Computes `x + mix(norm(x))`: pre-LN (Figure 7b of the paper)."""
    mixed, state = mix(norm(x))
    return x + drop(mixed), state


def post_norm(x: Array, norm: Pointwise, mix: Mix, drop: Pointwise) -> tuple[Array, State]:
    """Computes `norm(x + mix(x))`: post-LN, the original BERT (Figure 7a of the paper)."""
    mixed, state = mix(x)
    return norm(x + drop(mixed)), state


Connection = Callable[[Array, Pointwise, Mix, Pointwise], tuple[Array, State]]
CONNECTIONS: Mapping[str, Connection] = {"pre": pre_norm, "post": post_norm}


class Layer(nnx.Module):
    """The mixers of a kind of layer, each with its norm, connected to the residual stream by `norm_placement`."""

    def __init__(self, model: Model, dtype: jax.typing.DTypeLike, *, kind: str, key: Array) -> None:
        """Draws the parameters of a layer of a kind in `KINDS`."""
        self.mixers = KINDS[kind]
        # GPT-2: products before the residual stream are initialized smaller, by the number of additions to it.
        output_std = model.init_std / (2 * model.num_layers) ** 0.5 if model.scaled_init else model.init_std
        for name in self.mixers:
            mixer = mixer_of(name, model)
            mixer_key = jax.random.fold_in(key, mixer.init_number)
            # The attributes' names are the parameters' names: `attention`, `attention_norm`, `mlp`, `mlp_norm`.
            setattr(self, _norm_of(name), make_norm(model, dtype))
            setattr(self, name, mixer(model, output_std=output_std, key=mixer_key))
        self.connect = CONNECTIONS[model.norm_placement]
        self.rate = model.hidden_dropout

    def __call__(
        self, x: Float[Array, "batch act_seq embed"], context: LayerContext, states: Mapping[str, State] | None
    ) -> tuple[Float[Array, "batch act_seq embed"], dict[str, State] | None]:
        """Runs the mixers one after the other, each adding its output to the residual stream.

        Args:
          x: hidden states.
          context: with the layer's dropout keys.
          states: of the mixers that have one, by name; None if none has.

        Returns:
          The hidden states, and the new states of the mixers that have one; None if none has.
        """
        after: dict[str, Any] = {}
        for name in self.mixers:
            mixer = getattr(self, name)
            with jax.named_scope(mixer.scope):
                mix = partial(mixer, context=context, state=(states or {}).get(name))
                x, state = self.connect(x, getattr(self, _norm_of(name)), mix, self._dropout(mixer, context))
            if state is not None:
                after[name] = state
        return x, after or None

    def _dropout(self, mixer: Any, context: LayerContext) -> Pointwise:
        """Returns the dropout of a mixer's output, before it is added to the residual stream."""
        keys, positions = context.dropout_keys, context.positions
        return lambda x: dropout(x, self.rate, keys, mixer.dropout_site, RESIDUAL, positions=positions)


def _norm_of(mixer: str) -> str:
    return f"{mixer}_norm"
