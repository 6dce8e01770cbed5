"""A function that nothing looks into until it is lowered."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir


@dataclass(frozen=True, eq=False)
class _Whole:
    """A traced function, held where jax looks for none: of a primitive that has one jax 0.12 asks for more rules."""

    jaxpr: Any


_opaque_p = Primitive("opaque")
_opaque_p.multiple_results = True
_opaque_p.def_abstract_eval(lambda *_, whole: whole.jaxpr.out_avals)
_opaque_p.def_impl(lambda *arrays, whole: jaxpr_as_fun(whole.jaxpr)(*arrays))
mlir.register_lowering(
    _opaque_p, mlir.lower_fun(lambda *arrays, whole: jaxpr_as_fun(whole.jaxpr)(*arrays), multiple_results=True)
)


def no_hoist(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function`, whole: the scan over layers takes constants even out of a nested map, which then does not lower."""
    arrays, tree = jax.tree.flatten(arguments)
    flat = lambda *arrays: function(*jax.tree.unflatten(tree, arrays))  # noqa: E731
    jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*arrays)
    return jax.tree.unflatten(jax.tree.structure(shapes), _opaque_p.bind(*arrays, whole=_Whole(jaxpr)))
