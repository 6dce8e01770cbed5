"""Draws the layers of pipeline stages; those with fewer than others have padding: rows of zeros, which do not run."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard

from mtjax.layout.stages import PADDING, LayerOrder
from mtjax.models.layer_context import MixerState
from mtjax.sharding.axes import spec, varying_like
from mtjax.sharding.rank_values import cond_by_stage


def draw_on_stages(draw: Callable[[Array], Any], keys: Array, order: LayerOrder) -> Any:
    """Draws layers of these keys, in this order, each stage its own."""

    def layer(key: Array, number: Array) -> Any:
        # Padding, on stages with fewer layers than others, is zeros: they stay zeros, and do not change a checksum.
        drawn = draw(key)
        return jax.tree.map(lambda a: jnp.where(number == PADDING, 0, a), drawn) if order.is_padded else drawn

    return jax.vmap(layer)(*(reshard(a, spec("layers")) for a in (keys, jnp.asarray(order.flat))))


def run_unless_padding(
    run: Callable[[Array], tuple[Array, MixerState]], number: Array, x: Array
) -> tuple[Array, MixerState]:
    """Runs a layer on hidden states [batch, act_seq, embed]; returns them where its number, int32 [], is `PADDING`."""
    # A branch, as padding would take a layer's time. The layer's collectives in it are between ranks of one stage.
    return cond_by_stage(number == PADDING, lambda x: (x, _zero_state(run, x)), run, x)


def _zero_state(run: Callable[[Array], tuple[Array, MixerState]], x: Array) -> MixerState:
    """Builds zeros like the state that a layer would return."""

    def zeros(like: jax.ShapeDtypeStruct) -> Array:
        return varying_like(jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding.spec), x)

    return jax.tree.map(zeros, jax.eval_shape(run, x)[1])
