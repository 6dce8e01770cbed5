"""A barrier against hoisting: a function as one primitive, whose jaxpr is opaque until it is lowered.

`lax.scan` hoists what is computed from constants alone, such as a number, a mask or a bias broadcast to the shape of
attention scores. The program would materialize that array, keep it alive through the step, and read it in every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jaxtyping import Bool, Float


@dataclass(frozen=True, eq=False)
class _Opaque:
    """A traced function as a primitive's parameter. Of a primitive with a jaxpr itself, jax 0.12 requires more
    rules."""

    jaxpr: Any


_opaque_p = Primitive("opaque")
_opaque_p.multiple_results = True
_opaque_p.def_abstract_eval(lambda *_, traced: traced.jaxpr.out_avals)
_opaque_p.def_impl(lambda *arrays, traced: jaxpr_as_fun(traced.jaxpr)(*arrays))
mlir.register_lowering(
    _opaque_p, mlir.lower_fun(lambda *arrays, traced: jaxpr_as_fun(traced.jaxpr)(*arrays), multiple_results=True)
)


def no_hoist(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function(*arguments)` as one primitive, out of which `lax.scan` hoists nothing.

    The scan over layers hoists constants even out of a nested `shard_map`, which then does not lower.
    """
    arrays, tree = jax.tree.flatten(arguments)
    flat = lambda *arrays: function(*jax.tree.unflatten(tree, arrays))  # noqa: E731
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), _opaque_p.bind(*arrays, traced=_Opaque(jaxpr)))


def where(keep: Bool[Array, "..."], x: Float[Array, "..."], otherwise: float) -> Float[Array, "..."]:
    """Selects `x` where `keep`, which may have dimensions of 1, and the number `otherwise` elsewhere."""
    return cast(Array, _where(keep, x, otherwise))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _where(keep: Array, x: Array, otherwise: float) -> Array:
    return no_hoist(lambda keep, x: jnp.where(keep, x, otherwise), keep, x)


def _where_forward(keep: Array, x: Array, otherwise: float) -> tuple[Array, Array]:
    return where(keep, x, otherwise), keep


def _where_backward(_: float, keep: Array, gradient: Array) -> tuple[None, Array]:
    """Selects the gradient, in the shape of x, where `keep`."""
    return None, where(keep, gradient, 0.0)


_where.defvjp(_where_forward, _where_backward)
