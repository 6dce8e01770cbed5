import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from mtjax.errors import UserError
from mtjax.sharding.mesh import MeshShape, attach_devices, parse_mesh
from tests.tiny import mesh_of

WAYS = st.integers(1, 10_000)


@given(WAYS, WAYS)
def test_both_forms_say_the_same(data, model):
    shape = MeshShape(data, model)
    assert parse_mesh(str(shape)) == shape
    assert parse_mesh(f"data={data},model={model}") == shape
    assert parse_mesh(f" model = {model} , data={data}") == shape
    assert shape.size == data * model


def test_axes_left_out_have_one_way():
    assert parse_mesh("model=8") == MeshShape(1, 8)


@pytest.mark.parametrize("text", ["", "8", "3y4", "-1x4", "2x4x2", "data=2;model=4", "data=two", "2x"])
def test_nonsense_is_refused_with_both_forms(text):
    with pytest.raises(UserError, match="64x8"):
        parse_mesh(text)


def test_unknown_axis_names_the_nearest():
    with pytest.raises(UserError, match="'modle'.*'model'"):
        parse_mesh("data=2,modle=4")


@pytest.mark.parametrize("text", ["0x8", "data=2,model=0"])
def test_no_axis_has_zero_ways(text):
    with pytest.raises(UserError, match="at least 1"):
        parse_mesh(text)


def test_model_is_the_fastest_axis_and_all_are_explicit():
    mesh = mesh_of("2x4")
    assert [d.id for d in mesh.devices[0]] == [0, 1, 2, 3]
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)


def test_too_few_devices_offers_inspect():
    with pytest.raises(UserError, match=r"needs 64 devices, and there are 8 .*mtjax inspect --mesh 8x8"):
        attach_devices(MeshShape(8, 8))


def test_places_must_divide_over_processes():
    with pytest.raises(UserError, match="8 places, which don't divide over 3 processes"):
        attach_devices(MeshShape(2, 4), num_processes=3)
