"""Attention sinks: a logit per head in the denominator of the softmax, as a key without a value."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def with_sinks(
    output: Float[Array, "batch seq heads head_dim"],
    log_sums: Float[Array, "batch seq heads"],
    sinks: Float[Array, " heads"],
) -> tuple[Float[Array, "batch seq heads head_dim"], Float[Array, "batch seq heads"]]:
    """Adds a logit per head to the denominators: that scales the output, and nothing else in a row.

    Args:
      output: of attention without sinks.
      log_sums: log-sum-exp of each row of scores, float32.
      sinks: the logits.

    Returns:
      Output and log-sums with the sinks.
    """
    # The statistics that the backward pass reads include the sink, so that its probabilities are those of the forward
    # pass.
    sums = jnp.logaddexp(log_sums, sinks)
    return (output * jnp.exp(log_sums - sums)[..., None]).astype(output.dtype), sums


def gradient_of_sinks(
    output: Float[Array, "batch seq heads head_dim"],
    log_sums: Float[Array, "batch seq heads"],
    sinks: Float[Array, " heads"],
    gradient: Float[Array, "batch seq heads head_dim"],
) -> Float[Array, " heads"]:
    """Computes the gradient of sinks from output and log-sums with them, and the output's gradient."""
    # The derivative of a score is P (dP - rowsum(dO O)); of a sink's only the row sum is left, as it has no value.
    row_sums = (output.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1)
    return -(jnp.exp(sinks - log_sums) * row_sums).sum((0, 1))
