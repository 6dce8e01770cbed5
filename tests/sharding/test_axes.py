import re

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mtjax.layout.layouts import TENSOR
from mtjax.layout.rules import Rules
from mtjax.sharding.axes import merge, only_axes, partition_spec, spec, use_rules, with_axes
from tests.tiny import mesh_of

NAMES = sorted(vars(Rules()))
AXES = st.sampled_from([(), ("data",), ("model",), ("data", "model")])
RULES = st.builds(Rules, **dict.fromkeys(NAMES, AXES))


@given(RULES, st.lists(st.one_of(st.none(), st.sampled_from(NAMES))))
def test_spec_maps_each_name_by_its_field(rules, names):
    with use_rules(rules):
        found = spec(*names)
    assert found == partition_spec(rules, names)
    for entry, name in zip(found, names, strict=True):
        axes = () if name is None else getattr(rules, name)
        assert entry == {0: None, 1: axes[0] if axes else None}.get(len(axes), axes)


@given(st.text().filter(lambda name: name not in NAMES))
def test_unknown_name_is_an_attribute_error(name):
    with use_rules(TENSOR.rules), pytest.raises(AttributeError, match="no logical axis"):
        spec("batch", name)


def test_typo_names_the_nearest():
    with pytest.raises(AttributeError, match="'heads'"):
        partition_spec(TENSOR.rules, ("head",))


def test_outside_of_rules_is_an_error():
    with pytest.raises(LookupError):
        spec("batch")


def test_rules_nest_and_end():
    with use_rules(TENSOR.rules):
        with use_rules(Rules()):
            assert spec("batch", "heads") == P(None, None)
        assert spec("batch", "heads") == P("data", "model")


def test_manual_axes_are_left_out():
    seen = []

    def body(x):
        seen.append(spec("batch", "heads"))
        return x

    mesh = mesh_of("2x4")
    with use_rules(TENSOR.rules), jax.set_mesh(mesh):
        jax.eval_shape(
            jax.shard_map(body, axis_names={"data"}, in_specs=P("data"), out_specs=P("data")),
            jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P("data", None))),
        )
    assert seen == [P(None, "model")]


def test_places_are_cut_to_some_axes_and_widened_by_others():
    place = P(("data", "expert"), None, "model")
    assert only_axes(place, ("data", "stage")) == P("data", None, None)
    assert only_axes(place, ("expert", "data", "model")) == place
    assert with_axes(place, 1, ("stage",)) == P(("data", "expert"), "stage", "model")
    assert with_axes(P(None), 0, ("data", "context")) == P(("data", "context"))


@pytest.mark.parametrize(
    ("mesh", "dims", "shape"),
    [
        ("2x1", (0, 3), (64,)),  # split, but among one
        ("2x4", (0, 3), None),
        ("2x4", (1, 3), (4, 16)),  # split where the new dimension begins
        ("2x4", (0, 1), (4, 8, 2)),
    ],
)
def test_dimensions_merge_unless_one_inside_is_split(mesh, dims, shape):
    found = []

    def body(x):
        found.append(merge(x, *dims))
        return x

    attached = mesh_of(mesh)
    place = NamedSharding(attached, P(None, "model", None))
    values = np.arange(64.0).reshape(4, 8, 2)
    with jax.set_mesh(attached):
        jax.jit(body)(jax.device_put(values, place))
        merged = found.pop()
        assert (None if merged is None else merged.shape) == shape
        if shape is not None:
            compiled = jax.jit(lambda x: merge(x, *dims)).lower(jax.device_put(values, place)).compile()
            assert not re.search(r"all-(gather|to-all|reduce)|collective-permute", compiled.as_text() or "")
            np.testing.assert_array_equal(compiled(jax.device_put(values, place)), values.reshape(shape))
