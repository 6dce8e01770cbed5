"""Replica groups, in every syntax, against the mesh that made them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.errors import UserError
from mtjax.inspect.groups import Groups, axes_of, parse_groups, servers_spanned

MESH = {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ("model",)),
        ("replica_groups={}, to_apply=%add", ("data", "model")),
        ("channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}", ("model",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", ("data",)),
        ("replica_groups=[1,8]<=[8]", ("data", "model")),
        ("replica_groups=[8,1]<=[8]", ()),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", ("data",)),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("data", "model")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}", ("model",)),
        ("replica_groups=mesh['all'=8] {'all':(1)2}", ("data",)),
        ("replica_groups=mesh['all'=8] {'all':(2)4}", ("model",)),
        ("source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("model",)),
        ("source_target_pairs={{0,4},{4,0}}", ("data",)),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", None),
        ("replica_groups={{0,1,2},{3,4,5},{6,7}}", None),
        ("replica_groups={{0,5},{1,4},{2,7},{3,6}}", None),
    ],
)
def test_axes_of_every_syntax(attributes, axes):
    groups = parse_groups(attributes, 8)
    assert groups is not None
    assert axes_of(groups, MESH) == axes


def test_no_groups_and_unknown_syntax():
    assert parse_groups("dimensions={0}", 8) is None
    with pytest.raises(UserError, match="hypercube"):
        parse_groups("replica_groups=<hypercube>, to_apply=%add", 8)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_groups_of_any_mesh_map_back_to_its_axes(sizes, data):
    """Groups made with numpy from a mesh, printed as lists and as an iota, name the axes they were made of."""
    mesh = {f"axis{i}": n for i, n in enumerate(sizes)}
    chosen = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    rest = [i for i in range(len(sizes)) if i not in chosen]
    order = [*rest, *sorted(chosen)]
    width = math.prod(sizes[i] for i in chosen)
    rows = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, width)
    lists = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in rows.tolist()) + "}"
    iota = f"[{rows.shape[0]},{width}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})"
    expected = tuple(f"axis{i}" for i in sorted(chosen) if sizes[i] > 1)
    for text in (lists, iota):
        groups = parse_groups(f"replica_groups={text}", math.prod(sizes))
        assert groups is not None
        assert groups.members == tuple(map(tuple, rows.tolist()))
        assert axes_of(groups, mesh) == expected


@pytest.mark.parametrize(("per_server", "servers"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_servers_that_a_group_touches(per_server, servers):
    assert servers_spanned(Groups((tuple(range(8)),)), per_server) == servers


def test_the_widest_group_counts():
    groups = (
        Groups(tuple(itertools.batched(range(12), 6)))
        if hasattr(itertools, "batched")
        else Groups((tuple(range(6)), tuple(range(6, 12))))
    )
    assert servers_spanned(groups, 4) == 2
