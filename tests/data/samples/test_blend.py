import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtjax.data.cache import Cache
from mtjax.data.samples.blend import BlendedDataset, blend_index, normalize, samples_of_each
from mtjax.errors import UserError


class Numbers:
    """A dataset whose samples say their own number."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return {"tokens": np.array([self.length, index])}


def test_the_order_is_megatrons():
    dataset, sample = blend_index([0.3, 0.7], 12)
    assert dataset.tolist() == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1]
    assert sample.tolist() == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6, 3, 7]


def test_surplus_is_megatrons():
    assert samples_of_each([0.3, 0.7], 1000) == [302, 704]
    assert samples_of_each([1.0, 0.0], 10) == [11, 0]


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6), size=st.integers(1, 400))
@settings(deadline=None, max_examples=100)
def test_every_prefix_holds_the_shares(weights, size):
    shares = normalize(weights)
    dataset, sample = blend_index(shares, size)
    for d, share in enumerate(shares):
        taken = np.cumsum(dataset == d)
        assert np.abs(taken - share * np.arange(1, size + 1)).max() <= len(shares)
        assert sample[dataset == d].tolist() == list(range(int(taken[-1])))


def test_a_weight_of_zero_is_never_taken():
    dataset, _ = blend_index([0.0, 1.0, 0.0], 50)
    assert set(dataset.tolist()) == {1}


def test_pieces_change_nothing(monkeypatch):
    whole = blend_index([0.2, 0.5, 0.3], 1000)
    monkeypatch.setattr("mtjax.data.samples.blend.CHUNK", 7)
    for a, b in zip(blend_index([0.2, 0.5, 0.3], 1000), whole, strict=True):
        assert np.array_equal(a, b)


def greedy(lengths, size):
    """Megatron's rule with the lengths as weights, one sample at a time."""
    shares, taken, picks = [n / sum(lengths) for n in lengths], [0] * len(lengths), []
    for i in range(size):
        best = max(range(len(lengths)), key=lambda d: (shares[d] * max(i, 1) - taken[d], -d))
        picks.append((lengths[best], taken[best]))
        taken[best] += 1
    return picks


def test_without_weights_lengths_are_the_weights_and_no_sample_comes_twice():
    lengths = [3, 50, 7]
    for size, expected in ((20, 20), (60, 60), (1000, 60)):
        blend = BlendedDataset([Numbers(n) for n in lengths], None, size)
        seen = [tuple(blend[i]["tokens"].tolist()) for i in range(len(blend))]
        assert len(blend) == expected
        assert seen == greedy(lengths, expected)


def test_a_dataset_without_a_sample_is_refused_where_no_weight_repeats_it():
    with pytest.raises(UserError, match="dataset 1 of the blend has too few tokens for one sample"):
        BlendedDataset([Numbers(3), Numbers(0)], None, 3)


def test_a_cached_blend_is_the_same(tmp_path):
    parts = [Numbers(100), Numbers(100)]
    fresh, cached = (BlendedDataset(parts, [1, 2], 60, cache) for cache in (None, Cache(tmp_path)))
    again = BlendedDataset(parts, [1, 2], 60, Cache(tmp_path))
    for i in range(60):
        assert fresh[i]["tokens"].tolist() == cached[i]["tokens"].tolist() == again[i]["tokens"].tolist()


@pytest.mark.parametrize("weights", [[-1, 2], [0, 0], [float("nan"), 1], [float("inf"), 1]])
def test_weights_that_cannot_be(weights):
    with pytest.raises(UserError, match="blend weights"):
        BlendedDataset([Numbers(3), Numbers(3)], weights, 3)


def test_an_exhausted_dataset_is_named():
    with pytest.raises(UserError, match="dataset 0 of the blend has 2 samples; 5 are needed"):
        BlendedDataset([Numbers(2), Numbers(50)], [1, 1], 10)
