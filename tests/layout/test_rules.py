import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.layout.rules import MANUAL, Axes, Rules

RULES = Rules(batch=("data", "expert"), heads=("model",), layers=("stage",), vocab=("stage", "model"))


def test_a_name_is_split_by_any_number_of_axes():
    assert [RULES.mesh_axes(name) for name in ("embed", "heads", "vocab", None)] == [
        (),
        ("model",),
        ("stage", "model"),
        (),
    ]


@given(st.lists(st.sampled_from(["batch", "heads", "layers", "vocab", "embed", None])))
def test_replicas_are_the_manual_axes_that_split_no_dimension(names):
    splitting = {axis for name in names for axis in RULES.mesh_axes(name)}
    assert set(RULES.replicated_axes(names)) == set(MANUAL) - splitting
    assert RULES.replicated_axes(names) == tuple(sorted(RULES.replicated_axes(names), key=MANUAL.index))


def test_a_typo_names_the_nearest():
    for lookup in (lambda: RULES.mesh_axes("head"), lambda: RULES.replicated_axes(("layers", "head"))):
        with pytest.raises(AttributeError, match="no logical axis is called 'head' - did you mean 'heads'"):
            lookup()


def test_an_axis_that_is_not_in_a_tuple_is_refused():
    with pytest.raises(TypeError, match=r"batch must be a tuple of mesh axes, such as \('data',\), and is 'data'"):
        Rules(batch="data")  # pyright: ignore[reportArgumentType]


def test_a_mesh_without_an_axis_does_not_split_by_it():
    rules = RULES.restricted_to(("data", "model"))
    assert (rules.batch, rules.layers, rules.vocab, rules.heads) == (("data",), (), ("model",), ("model",))


def test_a_new_name_is_a_field():
    @dataclasses.dataclass(frozen=True)
    class WithStates(Rules):
        states: Axes = ()

    rules = WithStates(states=("data", "model"))
    assert rules.mesh_axes("states") == ("data", "model")
    assert "data" not in rules.replicated_axes(("embed", "states"))
    assert rules.restricted_to(("model",)).mesh_axes("states") == ("model",)
