"""Padding layers: rows of zeros in the stacks of pipeline stages with fewer layers than others, which do not run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.layout.stages import PADDING
from mtjax.models.mixers.mixer import State
from mtjax.sharding.axes import cond_by_stage, varying_like


def run_unless_padding(run: Callable[[Array], tuple[Array, State]], number: Array, x: Array) -> tuple[Array, State]:
    """Runs a layer on hidden states [batch, act_seq, embed]; returns them where its number, int32 [], is `PADDING`."""
    return cond_by_stage(number == PADDING, lambda x: (x, _zero_state(run, x)), run, x)


def _zero_state(run: Callable[[Array], tuple[Array, State]], x: Array) -> State:
    """Builds zeros like the state that a layer would return."""

    def zeros(like: jax.ShapeDtypeStruct) -> Array:
        return varying_like(jnp.zeros(like.shape, like.dtype, out_sharding=like.sharding.spec), x)

    return jax.tree.map(zeros, jax.eval_shape(run, x)[1])
