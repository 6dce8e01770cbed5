import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtjax.data.samples.split import parse_split, split_bounds
from mtjax.errors import UserError


def test_shares():
    assert parse_split("949,50,1") == (0.949, 0.05, 0.001)
    assert parse_split("8/2") == (0.8, 0.2, 0.0)
    assert parse_split("1") == (1.0, 0.0, 0.0)


def test_bounds():
    assert split_bounds("969,30,1", 1000) == {"train": (0, 969), "valid": (969, 999), "test": (999, 1000)}
    assert split_bounds("100,0,0", 7) == {"train": (0, 7), "valid": None, "test": None}
    assert split_bounds("90,0,10", 10) == {"train": (0, 9), "valid": None, "test": (9, 10)}


@given(shares=st.tuples(*[st.integers(0, 1000)] * 3).filter(any), count=st.integers(0, 10_000))
def test_every_item_is_in_one_split(shares, count):
    found = [b for b in split_bounds(",".join(map(str, shares)), count).values() if b is not None]
    assert [i for begin, end in found for i in range(begin, end)] == list(range(found[0][0], found[-1][1]))
    assert found[-1][1] == count
    assert found[0][0] == 0


@pytest.mark.parametrize("text", ["", "a,b", "0,0,0", "1,2,3,4", "1..2"])
def test_splits_that_cannot_be(text):
    with pytest.raises(UserError, match="split"):
        parse_split(text)
