"""One microbatch after the other, each through the entire model, and the sum of their gradients."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.sharding.parameters import differentiable, with_parts, zeros_like_parts
from mtjax.sharding.records import ParameterRecord
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.schedules.adding import accumulated, accumulating
from mtjax.sharding.schedules.schedule import CutModel, Sums
from mtjax.sharding.unstacked import put_together, take_apart
from mtjax.sharding.zero import for_use, materialize_outside_stacks

Tree = Any


@dataclass(frozen=True)
class Accumulate:
    """Every rank has the entire model, and adds up the gradients of its microbatches."""

    num_microbatches: int
    unrolled: int = 0
    """Stacks of at most so many layers are differentiated without a loop over them."""
    compute_dtype: str = "float32"

    def gradients(self, model: CutModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """As `Schedule.gradients` says."""
        records, wrapped = reduction.records, reduction.wrap(parameters)
        apart = self._apart(records, wrapped)
        sums = self._sums(records, differentiable(wrapped), differentiable(apart))
        wrapped, parts = apart, differentiable(apart)
        microbatches = jax.tree.map(lambda a: a.reshape(self.num_microbatches, -1, *a.shape[1:]), batch)

        def loss_by_parts(parts: Tree, sums: Tree, microbatch: Tree) -> tuple[Array, Sums]:
            parameters = accumulating(records, with_parts(wrapped, parts), sums, self._adds_up)
            losses = model.loss_sums(materialize_outside_stacks(records, parameters), microbatch)
            return sum(losses.values(), start=jnp.zeros(())), losses

        def accumulate(sums: Tree, microbatch: Tree) -> tuple[Tree, Sums]:
            gradients, losses = jax.grad(loss_by_parts, has_aux=True)(parts, sums, microbatch)
            with jax.named_scope("gradients"):
                return accumulated(records, sums, gradients, self._adds_up), losses

        gradients, losses = lax.scan(accumulate, sums, microbatches)
        with jax.named_scope("gradients"):
            return jax.tree.map(lambda scalars: scalars.sum(0), losses), put_together(gradients)

    def losses(self, model: CutModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """As `Schedule.losses` says; the batch is one microbatch."""
        return model.loss_sums(for_use(records, parameters), batch)

    def _apart(self, records: Tree, wrapped: Tree) -> Tree:
        """Wrapped parameters; stacks whose layers run without a loop, layer by layer."""

        def one(record: ParameterRecord, leaf: Any) -> Any:
            return take_apart(record, leaf, self.compute_dtype) if self._is_unrolled(record) else leaf

        return jax.tree.map(one, records, wrapped)

    def _sums(self, records: Tree, stacked: Tree, apart: Tree) -> Tree:
        """Zeros to which gradients are added: of matrices layer by layer, so that the product adds; of vectors stacked.

        Of vectors each addition would be an operation of its own.
        """
        pick = lambda record, whole, rows: rows if record.is_matrix else whole  # noqa: E731
        return zeros_like_parts(jax.tree.map(pick, records, stacked, apart))

    def _is_unrolled(self, record: ParameterRecord) -> bool:
        return record.is_stacked and record.shape[0] <= self.unrolled

    def _adds_up(self, record: ParameterRecord) -> bool:
        return record.is_stacked and self.num_microbatches > 1 and not self._is_unrolled(record)
