"""Builds a mesh of devices from its shape.

The last axis varies fastest, so that a tensor parallel group is inside one server (appendix B of the paper).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

from mtjax.layout.mesh import MeshShape
from mtjax.layout.rules import DATA


def make_mesh(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """Builds a mesh of the first `shape.size` devices, attached or compile-only, with all axes explicit."""
    axes = shape.axes
    # Row-major over the axes' order, so devices with consecutive indices differ in the last axis, `model`.
    grid = np.array(devices[: shape.size], dtype=object).reshape([shape.degree((axis,)) for axis in axes])
    return Mesh(grid, axes, axis_types=(AxisType.Explicit,) * len(axes))


def replica_meshes(mesh: Mesh) -> list[Mesh]:
    """Builds a mesh of the devices of each index along `data`: a replica that can run without the other ones."""
    # Slices of the device array along `data`, each with a `data` axis of size 1.
    names, axis = mesh.axis_names, mesh.axis_names.index(DATA)
    replicas = np.split(mesh.devices, mesh.shape[DATA], axis=axis)
    return [Mesh(replica, names, axis_types=(AxisType.Explicit,) * len(names)) for replica in replicas]
