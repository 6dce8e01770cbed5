"""A barrier against hoisting: a function as one primitive, whose jaxpr is opaque until it is lowered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir


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
