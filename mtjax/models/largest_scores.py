"""Observes the largest attention scores of a training step: as the gradients of zeros, which are reduced with the
other gradients.

A layer's attention has zeros [heads] that no score depends on. The backward rules of `observed`
(`mtjax.models.kernels.scores`) and of attention in blocks (`mtjax.sharding.flash`) return the largest score of each
head as their gradient. Where other gradients of microbatches and ranks are added up, of these the largest is taken:
there is no collective inside layers. The zeros are made where a step is traced: states and checkpoints have none.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from mtjax.layout.layouts import LARGEST_SCORES
from mtjax.sharding.axes import spec

Tree = Any


def observe_scores(model: Any, heads: int) -> None:
    """Adds zeros to the attention of a decoder's layers."""
    names = ("layers", "heads")
    for stack in model.decoder_stacks:
        zeros = jnp.zeros((len(stack.order.flat), heads), out_sharding=spec(*names))
        # Without `layers`: that is added to the axes of all parameters of a stack.
        stack.layers.attention.largest_scores = nnx.Param(zeros, axes=names[1:])


def observe_given(model: Any, parameters: Tree) -> None:
    """Removes the zeros from a model of parameters that have none."""
    if not only_observers(parameters):
        for stack in model.decoder_stacks:
            stack.layers.attention.largest_scores = None


def without_observers(tree: Tree) -> Tree:
    """Returns a tree like the parameters' without the zeros."""
    return _select(tree, is_observer=False)


def only_observers(tree: Tree) -> Tree:
    """Returns what a tree like the parameters' has for the zeros alone."""
    return _select(tree, is_observer=True)


def _select(tree: Tree, is_observer: bool) -> Tree:
    """Returns the leaves of a nested dict that are observers, or those that are not, without empty dicts."""
    selected = {}
    for name, below in tree.items():
        if isinstance(below, dict):
            if inside := _select(below, is_observer):
                selected[name] = inside
        elif (name == LARGEST_SCORES) == is_observer:
            selected[name] = below
    return selected


def with_observers(records: Tree, parameters: Tree) -> Tree:
    """Adds the zeros to a tree of parameters; `records` has those of both."""
    found = {}
    for name, below in records.items():
        if isinstance(below, dict):
            found[name] = with_observers(below, parameters[name])
        elif name == LARGEST_SCORES:
            found[name] = jnp.zeros(below.shape, out_sharding=below.storage_spec)
        else:
            found[name] = parameters[name]
    return {**parameters, **found}
