"""A model's parameters for conversion: names, layers and named dimensions."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from mtjax.config import Config, Model, Parallel
from mtjax.layout.layouts import gathers_in_compute_dtype
from mtjax.layout.mesh import MeshShape
from mtjax.layout.stages import layer_numbers
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.device_mesh import make_mesh
from mtjax.sharding.param_specs import ParamSpec


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model, stacked over layers if it belongs to a layer."""

    name: str
    """Dotted name, such as `stack.layers.mlp.up.weight`."""
    axes: tuple[str, ...]
    """Names of the dimensions of one layer's slice; the second of two equal names is primed: `embed'`."""
    shape: tuple[int, ...]
    """Shape of one layer's slice."""
    num_layers: int | None
    """None if not stacked."""
    numbers: tuple[int, ...] = ()
    """Its layers' numbers in the model; empty if not stacked."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension, by name."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Shape of the entire array."""
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape)

    @property
    def layers(self) -> Iterator[int | None]:
        """The index of each slice, from 0; a single None if not stacked."""
        return iter([None] if self.num_layers is None else range(self.num_layers))

    @property
    def is_layer_matrix(self) -> bool:
        """Whether it is a matrix of the layers: what is quantized."""
        axes = tuple(axis.rstrip("'") for axis in self.axes)
        return self.num_layers is not None and gathers_in_compute_dtype(axes)

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's slice in float32."""
        return 4 * int(np.prod(self.shape, dtype=np.int64))


def parameters_of(config: Config) -> dict[str, Parameter]:
    """Returns the parameters of a config's model, without allocating them.

    Raises:
      UserError: the config is invalid.
    """
    # On one device, whatever the mesh of the run: names and shapes don't depend on it.
    one_device = dataclasses.replace(config, parallel=Parallel())
    sharded_model = ShardedModel(one_device, make_mesh(MeshShape(), jax.devices("cpu")))
    return {record.name: _parameter(record, config.model) for record in jax.tree.leaves(sharded_model.records)}


def _parameter(record: ParamSpec, model: Model) -> Parameter:
    distinct: list[str] = []
    for axis in record.layer_logical_axes:
        # A square matrix [embed, embed] would have one dimension in a dict by name.
        distinct.append(axis + "'" * sum(seen.rstrip("'") == axis for seen in distinct))
    num_layers = record.shape[0] if record.is_stacked else None
    numbers = layer_numbers(model, record.name)
    return Parameter(record.name, tuple(distinct), record.shape[record.is_stacked :], num_layers, numbers)
