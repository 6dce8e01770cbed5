"""A model's parameters as a converter sees them: named, in layers, with named dimensions."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from mtjax.config import Config
from mtjax.sharding.mesh import make_mesh
from mtjax.sharding.placement import is_names
from mtjax.theory.mesh import MeshShape
from mtjax.train.step import make_program

STACKED = "layers"


@dataclass(frozen=True)
class Parameter:
    """One parameter of the model; of all layers when it is stacked."""

    name: str
    """Dotted, say `stack.layers.mlp.up.weight`."""
    axes: tuple[str, ...]
    """Names of the dimensions of one layer's slice; the second of two that are called alike is primed: `embed'`."""
    shape: tuple[int, ...]
    """Of one layer's slice."""
    num_layers: int | None
    """None when it is not stacked."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each dimension, by name."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def stacked_shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        return self.shape if self.num_layers is None else (self.num_layers, *self.shape)

    @property
    def layers(self) -> Iterator[int | None]:
        """The number of each slice; None alone when it is not stacked."""
        return iter([None] if self.num_layers is None else range(self.num_layers))

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's slice in float32."""
        return 4 * int(np.prod(self.shape, dtype=np.int64))


def parameters_of(config: Config) -> dict[str, Parameter]:
    """The parameters of a config's model, from its abstract program: nothing is allocated.

    Raises:
      UserError: the config can't be.
    """
    program = make_program(config, make_mesh(MeshShape(), jax.devices("cpu")))
    shapes = jax.tree_util.tree_leaves_with_path(program.abstract_parameters)
    names = jax.tree_util.tree_leaves(program.axes, is_leaf=is_names)
    found = [_parameter(path, leaf.shape, axes) for (path, leaf), axes in zip(shapes, names, strict=True)]
    return {parameter.name: parameter for parameter in found}


def _parameter(path: object, shape: tuple[int, ...], axes: tuple[str, ...]) -> Parameter:
    name = jax.tree_util.keystr(path, simple=True, separator=".")  # pyright: ignore[reportArgumentType]
    num_layers = shape[0] if axes[0] == STACKED else None
    if num_layers is not None:
        shape, axes = shape[1:], axes[1:]
    distinct: list[str] = []
    for axis in axes:
        distinct.append(axis + "'" * sum(seen.rstrip("'") == axis for seen in distinct))
    return Parameter(name, tuple(distinct), tuple(shape), num_layers)
