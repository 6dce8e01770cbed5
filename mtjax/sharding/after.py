"""What must wait: arrays with which XLA can't compute before others are known, in the order of a schedule."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mtjax.sharding.axes import PartitionSpec, map_ranks, non_manual_axes

T = TypeVar("T")


def after(known: Sequence[Array], x: Array) -> Array:
    """Returns `x`, with which XLA can't compute before it has computed all of `known`."""
    return of_ranks(lambda *arrays: _after_p.bind(*arrays), jax.typeof(x).sharding.spec, x, *known)


def _select(x: Array, *known: Array) -> Array:
    # An element of each array: the lowest bit of anything, NaN included, is 0 or 1.
    bits = sum(lax.bitcast_convert_type(first(a), jnp.uint32) & 1 for a in known)
    # XLA: the condition is always true, which XLA can't prove; the select is fused into what reads `x`, without a copy.
    return jnp.where(bits <= len(known), x, jnp.zeros_like(x))


# A primitive, because the result varies over no more axes than `x`, whatever `known` varies over.
_after_p = Primitive("after")
_after_p.def_abstract_eval(lambda x, *known: x)
_after_p.def_impl(_select)
mlir.register_lowering(_after_p, mlir.lower_fun(_select, multiple_results=False))


def barrier(tree: T) -> T:
    """Returns `tree`; XLA computes all of it before anything that reads some of it."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _barrier_p.bind(*leaves))


# A primitive, because results of `lax.optimization_barrier` vary over the axes of all of its operands.
_barrier_p = Primitive("barrier")
_barrier_p.multiple_results = True
_barrier_p.def_abstract_eval(lambda *arrays: arrays)
_barrier_p.def_impl(lambda *arrays: lax.optimization_barrier(arrays))
mlir.register_lowering(_barrier_p, mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays)))


def is_tensor_parallel() -> bool:
    """Returns whether several ranks share what is computed here, over axes that are not manual."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in non_manual_axes()) > 1


def of_ranks(function: Callable[..., Array], out_spec: PartitionSpec, *arrays: Array) -> Array:
    """Calls a function of each rank's shards."""
    if not non_manual_axes():
        return function(*arrays)
    return map_ranks(function, tuple(jax.typeof(a).sharding.spec for a in arrays), out_spec)(*arrays)


def first(a: Array) -> Array:
    """Returns the first element, in float32."""
    return a[(0,) * a.ndim].astype(jnp.float32)
