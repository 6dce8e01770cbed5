import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.errors import UserError
from mtjax.layout.generation_mesh import check_generation_mesh
from mtjax.layout.mesh import AXES, MeshShape, parse_mesh

WAYS = st.integers(1, 16)


@given(WAYS, WAYS)
def test_both_forms_say_the_same(data, model):
    shape = MeshShape(data=data, model=model)
    assert str(shape) == f"{data}x{model}"
    assert parse_mesh(str(shape)) == shape
    assert parse_mesh(f"data={data},model={model}") == shape
    assert parse_mesh(f" model = {model} , data={data}") == shape
    assert shape.size == data * model


@given(st.fixed_dictionaries(dict.fromkeys(AXES, st.integers(1, 10))), st.randoms())
def test_axes_may_be_named_in_any_order(ways, random):
    shape = MeshShape(**ways)
    names = list(ways)
    random.shuffle(names)
    assert parse_mesh(",".join(f"{name}={ways[name]}" for name in names)) == shape
    assert parse_mesh(str(shape)) == shape


def test_three_numbers_are_data_stage_and_model():
    assert parse_mesh(" 8x4x2 ") == MeshShape(data=8, stage=4, model=2)


def test_one_number_is_data_parallel():
    assert parse_mesh("8") == MeshShape(data=8)
    assert str(parse_mesh("8")) == "8x1"


def test_the_usual_abbreviations_name_axes():
    assert parse_mesh("tp=8,pp=4,dp=2,cp=16,ep=32") == MeshShape(model=8, stage=4, data=2, context=16, expert=32)
    assert parse_mesh("TP=8,stage=4") == MeshShape(model=8, stage=4)
    named = MeshShape(data=4, shard=8, model=2)
    assert parse_mesh("dp_replicate=4,dp_shard=8,tp=2") == parse_mesh("dp=4,FSDP=8,model=2") == named
    assert (str(named), named.axes) == ("data=4,shard=8,model=2", ("data", "shard", "model"))


def test_axes_left_out_have_one_way():
    assert parse_mesh("model=8") == MeshShape(model=8)
    assert parse_mesh("context=2").axes == ("data", "context", "model")


@pytest.mark.parametrize("text", ["", "64x", "3y4", "-1x4", "2x4x2x2", "data=2;model=4", "data=two", "data=2,", "2 x4"])
def test_nonsense_is_refused_with_both_forms(text):
    with pytest.raises(UserError, match="neither DATAxMODEL, such as 64x8, nor named, such as data=8,stage=4,model=8"):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,modle=4", "no axis is called 'modle' - did you mean 'model'"),
        (
            "rows=4",
            r"'rows'; the axes are data \(dp\), stage \(pp\), shard \(fsdp\), context \(cp\), expert \(ep\), .* \(tp\)",
        ),
        ("data=8,data=2", "sets data twice"),
        ("dp=8,data=2", "sets data twice"),
        ("fsdp=8,dp_shard=2", "sets shard twice"),
        ("data=2,dp_shards=4", "no axis is called 'dp_shards' - did you mean 'dp_shard'"),
        ("tp=0", "sets model to 0"),
        ("0", "sets data to 0"),
        ("0x8", "sets data to 0; every axis needs at least 1"),
        ("data=2,stage=0", "sets stage to 0; every axis needs at least 1"),
    ],
)
def test_wrong_meshes(text, message):
    with pytest.raises(UserError, match=message):
        parse_mesh(text)


def test_axes_together_split_by_their_product():
    mesh = MeshShape(data=2, context=3, model=4)
    assert mesh.degree(()) == 1
    assert mesh.degree(("data", "context")) == 6
    assert mesh.size == 24


def test_what_trains_only_is_said_where_nothing_is_trained():
    check_generation_mesh(parse_mesh("8x8"))
    with pytest.raises(
        UserError, match="mesh data=1,context=2,model=4 has context parallelism .* training and evaluation only: remove"
    ):
        check_generation_mesh(parse_mesh("context=2,model=4"))
    with pytest.raises(UserError, match="mesh data=2,shard=4,model=1 has sharding groups .* use data=8 in place of"):
        check_generation_mesh(parse_mesh("data=2,shard=4"))
