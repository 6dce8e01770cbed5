"""Gradients that are computed at one time."""

import jax
from jax import Array, lax


@jax.custom_vjp
def gradients_together(*arrays: Array) -> tuple[Array, ...]:
    """Returns the arrays; none of their gradients is used before all are computed."""
    return arrays


def _forward(*arrays: Array) -> tuple[tuple[Array, ...], None]:
    return arrays, None


def _backward(_: None, gradients: tuple[Array, ...]) -> tuple[Array, ...]:
    # XLA: without the barrier, it would compute a gradient that is needed late only there, and keep what it is computed
    # from in float32.
    return lax.optimization_barrier(gradients)


gradients_together.defvjp(_forward, _backward)
