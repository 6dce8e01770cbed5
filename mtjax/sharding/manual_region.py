"""The region of a step in which every mesh axis but `model` is manual: the differentiated part runs there.

Were all axes explicit, XLA would reduce each layer's gradients in the compute type once per microbatch, inside the
backward loop. Manual axes leave the reduction to us: each rank has its own samples, and what it computes is local.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec, auto_axes, explicit_axes, reshard

from mtjax.sharding.axes import only_axes, varying_like, with_axes
from mtjax.sharding.param_specs import partition_specs
from mtjax.theory.mesh import MeshShape
from mtjax.theory.rules import MANUAL, STAGE, Axes, Rules

Tree = Any


@dataclass(frozen=True)
class ManualRegion:
    """The manual region of a model on a mesh."""

    mesh: MeshShape
    rules: Rules
    records: Tree
    """Of each parameter."""

    @property
    def manual(self) -> Axes:
        """Axes that are manual inside."""
        return tuple(axis for axis in self.mesh.axes if axis in MANUAL)

    @property
    def explicit(self) -> Axes:
        """Axes that are explicit inside: XLA's partitioner inserts the collectives over these."""
        return tuple(axis for axis in self.mesh.axes if axis not in MANUAL)

    def batch_spec(self, dimensions: int) -> PartitionSpec:
        """How ranks share an array of a batch: [batch], or [batch, seq].

        Nothing varies over a single rank: XLA would copy every gradient to sum it over one.
        """
        place = PartitionSpec()
        for dim, axes in enumerate((self.rules.batch, self.rules.seq)[:dimensions]):
            if split := tuple(axis for axis in axes if self.mesh.degree((axis,)) > 1):
                place = with_axes(PartitionSpec(*place, *(None,) * (dim + 1 - len(place))), dim, split)
        return place

    def mark_stage_varying(self, batch: Tree) -> Tree:
        """Marks a rank's batch as varying over the stages of a pipeline: they do other work on the same samples."""
        if STAGE not in self.manual:
            return batch
        vary = lambda a: lax.pcast(a, (STAGE,), to="varying")  # noqa: E731
        return jax.tree.map(vary, batch)

    def map(self, local: Callable[[Tree, Tree], Tree], parameters: Tree, batch: Tree, results: Tree) -> Tree:
        """Runs `local` on every rank: its parameters, its own part of the batch, `model` explicit inside.

        At the border of the region `model` is automatic: were it explicit there, jax would treat each parameter as
        replicated over `model` and gather it on the way in, and its gradient on the way out - with the right numbers.

        Args:
          local: (parameters, batch) -> results.
          parameters: placed as `stored`.
          batch: arrays [batch] or [batch, seq].
          results: specs of what `local` returns; its values may vary only over the manual axes that these name.
        """
        split = jax.tree.map(lambda a: self.batch_spec(a.ndim), batch)
        batch = jax.tree.map(reshard, batch, split)
        batch_specs = jax.tree.map(lambda a: PartitionSpec(*(None for _ in a.shape)), batch)
        whole = self._only(partition_specs(self.records, "compute_spec"), self.explicit)
        mapped = jax.shard_map(
            explicit_axes(local, axes=self.explicit, in_sharding=(whole, batch_specs)),
            axis_names=set(self.manual),
            in_specs=(self._only(partition_specs(self.records, "storage_spec"), self.manual), split),
            out_specs=self._only(results, self.manual),
        )
        return auto_axes(axes=self.explicit, out_sharding=results)(mapped)(parameters, batch)

    @staticmethod
    def _only(specs: Tree, axes: Axes) -> Tree:
        return jax.tree.map(lambda place: only_axes(place, axes), specs)


def mark_varying(values: Tree, batch: Tree) -> Tree:
    """Marks `values` as varying over every axis over which the batch varies.

    Otherwise autodiff sums the cotangent of each of them over these axes separately, where it is used.
    """
    return jax.tree.map(lambda x: varying_like(x, *jax.tree.leaves(batch)), values)
