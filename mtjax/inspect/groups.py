"""Replica groups, parsed from every syntax that XLA prints and mapped to mesh axes.

- lists: `replica_groups={{0,4},{1,5}}`; `{}` is one group of all devices
- iota: `replica_groups=[4,2]<=[2,4]T(1,0)`: iota, reshaped to the second list, transposed, reshaped to groups x members
- mesh: `replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`: the product of the named axes; `'b':(2)2` is
  the sub-axis of `b` of size 2 after a sub-axis of size 2
- pairs: `source_target_pairs={{0,1},{1,0}}` of a permute
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtjax.errors import UserError

_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=(\{\}|\{\{[\d,\s{}]*\}\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?)?")
_MESH = re.compile(
    r"replica_groups=(?:@?[\w.]*)mesh\[([^\]]*)\](?:,\s*device_ids=\((?:\[([\d,]+)\])(?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
_MESH_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Groups:
    """Groups of devices that communicate with each other, as rows: [groups, members]."""

    members: tuple[tuple[int, ...], ...]
    is_pairs: bool = False
    """Whether each row is (source, target) of a permute."""

    @property
    def size(self) -> int:
        """Members of the largest group."""
        return max((len(g) for g in self.members), default=1)


def parse_groups(attributes: str, num_devices: int) -> Groups | None:
    """Parses the groups in an instruction's attributes; None when it has none.

    Raises:
      UserError: the attribute has an unknown syntax.
    """
    if match := _LISTS.search(attributes):
        rows = re.findall(r"\{([\d,\s]+)\}", match[1])
        members = tuple(tuple(int(i) for i in row.split(",")) for row in rows) or (tuple(range(num_devices)),)
        return Groups(members, "source_target_pairs" in match[0])
    if match := _MESH.search(attributes):
        return _from_mesh(*match.groups(), num_devices=num_devices)
    if match := _IOTA.search(attributes):
        shape, source, transpose = (_ints(t) for t in match.groups())
        ids = _iota(source or (math.prod(shape),), transpose)
        return Groups(_rows(ids.reshape(shape)))
    if "replica_groups=" in attributes or "source_target_pairs=" in attributes:
        start = attributes.index("replica_groups=" if "replica_groups=" in attributes else "source_target_pairs=")
        raise UserError(f"unknown syntax of replica groups: {attributes[start : start + 100]}")
    return None


def _ints(text: str | None) -> tuple[int, ...]:
    return tuple(int(i) for i in text.split(",")) if text else ()


def _iota(shape: Sequence[int], transpose: Sequence[int]) -> np.ndarray:
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(transpose) if transpose else ids


def _rows(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in ids.reshape(-1, ids.shape[-1]).tolist())


def _from_mesh(axes: str, source: str | None, transpose: str | None, over: str, num_devices: int) -> Groups:
    sizes = {name: int(n) for name, n in _MESH_AXIS.findall(axes)}
    ids = _iota(_ints(source) or (num_devices,), _ints(transpose)).reshape(-1)
    # Every axis is cut into (before, part, after), so that a group is a product of entire dimensions.
    parts = {name: (int(pre or 1), int(n or sizes[name])) for name, pre, n in _MESH_PART.findall(over)}
    shape: list[int] = []
    inside: list[int] = []
    for name, size in sizes.items():
        before, part = parts.get(name, (size, 1))
        inside += [len(shape) + 1] if name in parts else []
        shape += [before, part, size // (before * part)]
    outside = [d for d in range(len(shape)) if d not in inside]
    grid = ids.reshape(shape).transpose(outside + inside)
    return Groups(_rows(grid.reshape(-1, math.prod(shape[d] for d in inside))))


def axes_of(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...] | None:
    """Returns the mesh axes that every group spans, outermost first; () for groups of one device; None if none match.

    Device numbers are places in the mesh, `mesh`'s last axis varying fastest.
    """
    sizes = tuple(mesh.values())
    # A permute may leave devices out; groups may not.
    if math.prod(sizes) != sum(len(g) for g in groups.members) and not groups.is_pairs:
        return None
    ids = np.array([i for g in groups.members for i in g])
    if ids.size and ids.max() >= math.prod(sizes):
        return None
    coordinates = [np.stack(np.unravel_index(np.array(g), sizes)) for g in groups.members]
    varying = {axis for c in coordinates for axis in np.flatnonzero((c != c[:, :1]).any(1)).tolist()}
    group_size = math.prod(sizes[a] for a in varying)
    if not groups.is_pairs and any(
        # Each group has to be a full product of these axes, or a group of half of the ranks would pass for one of all.
        len(set(g)) != group_size or _varying(c) != varying
        for g, c in zip(groups.members, coordinates, strict=True)
    ):
        return None
    return tuple(name for axis, name in enumerate(mesh) if axis in varying)


def _varying(coordinates: np.ndarray) -> set[int]:
    return set(np.flatnonzero((coordinates != coordinates[:, :1]).any(1)).tolist())


def servers_spanned(groups: Groups, devices_per_server: int) -> int:
    """Returns the most servers that a group spans; 1 if all traffic stays inside servers."""
    return max((len({i // devices_per_server for i in g}) for g in groups.members), default=1)
