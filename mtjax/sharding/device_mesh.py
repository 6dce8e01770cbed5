"""Builds a mesh of devices."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from mtjax.layout.mesh import MeshShape


def make_mesh(mesh_shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """Builds a mesh of the first `mesh_shape.size` devices, attached or compile-only, with all axes explicit."""
    axes = mesh_shape.axes
    # The last axis varies fastest, so that a tensor parallel group is inside one server (appendix B of arXiv
    # 2104.04473).
    grid = np.array(devices[: mesh_shape.size], dtype=object).reshape([mesh_shape.degree((axis,)) for axis in axes])
    return Mesh(grid, axes, axis_types=(AxisType.Explicit,) * len(axes))
