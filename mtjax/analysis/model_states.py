"""Bytes on a GPU of the model states: weights, gradients and the optimizer's, as ZeRO shards them."""

from dataclasses import dataclass

from mtjax.analysis.counts import Counts
from mtjax.layout.plan import Plan, Precision


def bytes_per_parameter(precision: Precision, zero: int, degree: int) -> tuple[float, float, float]:
    """Returns the bytes per parameter of weights, gradients and optimizer: w, g, k.

    ZeRO-1 divides k by its degree d, ZeRO-2 also g, ZeRO-3 also w (arXiv 1910.02054, section 5); master weights are
    sharded with k, and their gathered copies are not counted here.
    """
    w, g, k = precision.weights, precision.gradients, precision.optimizer
    # mtjax's weights are the float32 masters, which ZeRO-1 shards with the moments; Megatron's weights are 16-bit
    # copies beside masters that count as optimizer state.
    d, first = degree, 1 if precision.are_masters else 3
    return (w / d if zero >= first else w, g / d if zero >= 2 else g, k / d if zero >= 1 else k)


@dataclass(frozen=True)
class States:
    """Bytes on a GPU of the model states of parameters with the same ZeRO degree."""

    weights: float
    gradients: float
    optimizer: float


def model_states(plan: Plan, counts: Counts, trainable: Counts, degree: int) -> States:
    """Returns the bytes of the model states of parameters that ZeRO shards over `degree` ranks.

    Args:
      plan: of the run.
      counts: of all these parameters, on a device before ZeRO.
      trainable: of the trainable ones among them.
      degree: of ZeRO.
    """
    w, _, k = bytes_per_parameter(plan.precision, plan.zero, degree)
    # mtjax shards arrays along a dimension; Megatron's optimizer shards one buffer of all of them.
    replicated, unsharded = (held.replicated if plan.residuals == "jax" else 0 for held in (counts, trainable))
    sharded, full = trainable.all - unsharded, plan.precision
    # ZeRO-1 and 2 shard what the optimizer updates, and it does not update these.
    frozen = w if plan.zero == 3 else full.weights
    return States(
        weights=w * sharded + frozen * (counts.all - replicated - sharded) + full.weights * replicated,
        gradients=gradient_bytes(plan, degree) * sharded + full.gradients * unsharded,
        optimizer=k * sharded + full.optimizer * unsharded,
    )


def gradient_bytes(plan: Plan, degree: int) -> float:
    """Returns the bytes of the accumulated gradient of a parameter that ZeRO shards over `degree` ranks."""
    _, g, _ = bytes_per_parameter(plan.precision, plan.zero, degree)
    return g / degree if plan.zero == 1 and plan.reduces_in_backward else g
