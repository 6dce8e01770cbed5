"""The manual region of a step, in which every mesh axis except `model` is manual: the differentiated part runs there.

XLA: with explicit axes, the partitioner would reduce each layer's gradients in the compute type once per microbatch,
inside the backward loop. With manual axes, all values are local to a rank and its samples, and the program itself
decides when and in which type gradients are reduced.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, auto_axes, explicit_axes, reshard

from mtjax.layout.mesh import MeshShape
from mtjax.layout.rules import MANUAL, STAGE, Axes, Rules
from mtjax.sharding.axes import only_axes, varying_like, with_axes
from mtjax.sharding.param_specs import partition_specs

Tree = Any


@dataclass(frozen=True)
class ManualRegion:
    """The manual region of a model on a mesh."""

    mesh: MeshShape
    rules: Rules
    records: Tree
    """The `ParamSpec` of each parameter."""

    @property
    def manual(self) -> Axes:
        """Axes that are manual inside."""
        return tuple(axis for axis in self.mesh.axes if axis in MANUAL)

    @property
    def explicit(self) -> Axes:
        """Axes that are explicit inside: XLA's partitioner inserts the collectives over these."""
        return tuple(axis for axis in self.mesh.axes if axis not in MANUAL)

    def batch_spec(self, dimensions: int) -> PartitionSpec:
        """Returns the sharding of an array of a batch, [batch] or [batch, seq]."""
        spec = PartitionSpec()
        for dim, axes in enumerate((self.rules.batch, self.rules.seq)[:dimensions]):
            # XLA: values that vary over an axis of degree 1 would be copied for a reduction over one rank.
            if sharded := tuple(axis for axis in axes if self.mesh.degree((axis,)) > 1):
                spec = with_axes(PartitionSpec(*spec, *(None,) * (dim + 1 - len(spec))), dim, sharded)
        return spec

    def mark_stage_varying(self, batch: Tree) -> Tree:
        """Marks a rank's batch as varying over pipeline stages, which do different work on the same samples."""
        if STAGE not in self.manual:
            return batch
        vary = lambda a: lax.pcast(a, (STAGE,), to="varying")  # noqa: E731
        return jax.tree.map(vary, batch)

    def shard_batch(self, batch: Tree) -> Tree:
        """Shards a batch, arrays [batch] or [batch, seq], over ranks."""
        return jax.tree.map(lambda a: reshard(a, self.batch_spec(a.ndim)), batch)

    def map(self, local: Callable[[Tree, Tree], Tree], batch: Tree, results: Tree) -> Callable[[Tree, Tree], Tree]:
        """Returns a function that runs `local` on every rank, with `model` explicit inside.

        Args:
          local: (this rank's shards of the parameters, its shard of the batch) -> results.
          batch: arrays like those of the batch, [batch] or [batch, seq].
          results: specs of what `local` returns; its values may vary only over the manual axes that these name.

        Returns:
          (parameters sharded as `storage_spec`, the result of `shard_batch`) -> results.
        """
        batch_specs = jax.tree.map(lambda a: PartitionSpec(*(None for _ in a.shape)), batch)
        param_specs = self._only(partition_specs(self.records, "compute_spec"), self.explicit)
        # `model` is explicit inside, but automatic at the border (`auto_axes` around `shard_map` around
        # `explicit_axes`): were it explicit there, jax would treat each parameter as replicated over `model`, and
        # gather it on entry and its gradient on exit. The results would be right, but slow.
        mapped = jax.shard_map(
            explicit_axes(local, axes=self.explicit, in_sharding=(param_specs, batch_specs)),
            axis_names=set(self.manual),
            in_specs=(
                self._only(partition_specs(self.records, "storage_spec"), self.manual),
                jax.tree.map(lambda a: self.batch_spec(a.ndim), batch),
            ),
            out_specs=self._only(results, self.manual),
        )
        return auto_axes(axes=self.explicit, out_sharding=results)(mapped)

    @staticmethod
    def _only(specs: Tree, axes: Axes) -> Tree:
        return jax.tree.map(lambda spec: only_axes(spec, axes), specs)


def mark_varying(values: Tree, batch: Tree) -> Tree:
    """Marks `values` as varying over every axis over which the batch varies."""
    # The transpose of a cast to varying is an all-reduce. Done here, outside the differentiated function, it is never
    # transposed. Without it, jax would insert the cast, and autodiff the all-reduce, at each use of a value.
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(batch)), values)
