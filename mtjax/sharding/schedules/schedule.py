"""The interface of a schedule: loss and gradients of a rank's own samples, microbatches in some order."""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from mtjax.sharding.reduction import Reduction

Tree = Any
LossSum = Callable[[Tree, Tree], tuple[jax.Array, Tree]]
"""(parameters, microbatch) -> the weighted sum of its losses, and a tree of scalars to report with it."""


class Schedule(Protocol):
    """Runs inside a `Region`."""

    def gradients(
        self, loss_sum: LossSum, parameters: Tree, batch: Tree, reduction: Reduction
    ) -> tuple[jax.Array, Tree, Tree]:
        """Loss, report and gradients of this rank's samples.

        Args:
          loss_sum: differentiated.
          parameters: this rank's, varying over the axes over which the batch does.
          batch: arrays [samples, ...], this rank's.
          reduction: which gradients are summed over ranks inside the backward pass; its `finish` does the rest.

        Returns:
          The loss and the scalars reported with it, summed over microbatches; float32 gradients, summed over them too.
        """
        ...
