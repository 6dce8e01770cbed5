"""Our Threefry is jax's, to the bit, and what it gives is random enough to drop by."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry_2x32

from mtjax.layout.dropout import keep_share, keep_threshold
from mtjax.models.threefry import halves, random_bits, random_halves, threefry
from tests.tiny import mesh_of


def bits_of(seed, *shape):
    with jax.set_mesh(mesh_of("1x1")):
        return np.asarray(jax.jit(lambda key: random_bits(key, shape, jax.P()))(jax.random.key(seed)))


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 7])
def test_is_the_function_of_jax_random(seed):
    key = jax.random.key_data(jax.random.key(seed))
    counters = jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, 512, dtype=np.uint32))
    expected = threefry_2x32(key, counters)
    np.testing.assert_array_equal(jnp.concatenate(jax.jit(threefry)(key, *jnp.split(counters, 2))), expected)


def test_published_vectors():
    """Of Random123's `kat_vectors`: counter, key, result of threefry2x32 with 20 rounds."""
    for counter, key, expected in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ):
        words = jax.jit(threefry)(jnp.array(key, jnp.uint32), *(jnp.uint32(c) for c in counter))
        assert tuple(int(w) for w in words) == expected


@pytest.mark.parametrize("shape", [(64,), (6, 64), (2, 3, 64)])
def test_every_index_has_its_own_bits(shape):
    bits = bits_of(5, *shape)
    assert bits.shape == shape and len(np.unique(bits)) == bits.size
    other = bits_of(6, *shape)
    assert (bits != other).all()
    flat = bits_of(5, bits.size // shape[-1], shape[-1])
    np.testing.assert_array_equal(bits.reshape(flat.shape), flat)


def test_bits_are_even_and_neighbours_unrelated():
    bits = bits_of(1, 512, 512)
    ones = np.unpackbits(bits.view(np.uint8)).reshape(-1, 32).mean(0)
    assert np.abs(ones - 0.5).max() < 5 * 0.5 / bits.size**0.5
    low = (bits >> 31).astype(float) - 0.5
    for a, b in ((low[1:], low[:-1]), (low[:, 1:], low[:, :-1])):
        assert abs((4 * a * b).mean()) < 5 / a.size**0.5


@pytest.mark.parametrize(("shape", "site"), [((2, 3, 8), 0), ((2, 2, 3, 7), 5), ((1, 5), 2)])
def test_four_neighbours_share_the_words_of_one_counter(shape, site):
    """By jax's Threefry, also where the last dimension is not a multiple of four."""
    keys = jax.random.split(jax.random.key(3), shape[0])
    with jax.set_mesh(mesh_of("1x1")):
        place = jax.P(*[None] * len(shape))
        found = np.asarray(jax.jit(lambda keys: random_halves(keys, shape, place, site=site))(keys))
    rows, length = math.prod(shape[1:-1]), shape[-1]
    stride = -(-length // 4) * 4
    order = np.arange(rows, dtype=np.uint32)[:, None] ^ np.uint32(site)
    blocks = (order * (stride // 4) + np.arange(stride // 4, dtype=np.uint32)).ravel()
    for sample, key in zip(found, keys, strict=True):
        both = threefry_2x32(jax.random.key_data(key), jnp.concatenate([jnp.zeros_like(blocks), blocks]))
        words = np.stack(np.split(np.asarray(both), 2), axis=-1).astype("<u4")  # [blocks, 2]
        expected = words.view("<u2").reshape(rows, stride)[:, :length]
        np.testing.assert_array_equal(sample.reshape(rows, length), expected)


def test_large_samples_repeat_no_counter():
    """Rows whose elements are 2^32 and more apart, as scores of 128k tokens."""
    row, column = jnp.uint32([0, 2**14, 2**14 + 1, 2**20]), jnp.uint32([5])
    draw = jax.jit(lambda row, column: halves(jnp.uint32([1, 2]), row, column, 2**18))
    drawn = [draw(row, column + step) for step in (0, 4, 8)]
    assert len({tuple(map(int, line)) for line in np.stack(drawn).T}) == 4
    words = threefry(jnp.uint32([1, 2]), jnp.uint32(1), jnp.uint32((2**18 + 5) >> 2))
    assert int(halves(jnp.uint32([1, 2]), jnp.uint32(2**14 + 1), jnp.uint32(5), 2**18)) == int(words[0]) >> 16


def test_rates_are_rounded_to_sixteen_bits_but_not_away():
    assert [keep_threshold(rate) for rate in (0.5, 0.1, 1e-9, 1 - 1e-9)] == [32768, 6554, 1, 65535]
    assert keep_share(0.1) == 1 - 6554 / 65536
