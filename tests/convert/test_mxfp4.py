"""4-bit experts beside numpy's arithmetic of single values, and transformers' own unpacking."""

import ml_dtypes
import numpy as np
import pytest

from mtjax.convert.mxfp4 import unpacked
from mtjax.convert.safetensors_files import SafetensorsReader

EXPERTS, OUT, GROUPS = 2, 5, 3


def packed():
    """Blocks with every byte, and scales of all sizes that a float32 can hold."""
    random = np.random.default_rng(0)
    blocks = random.permutation(np.arange(EXPERTS * OUT * GROUPS * 16) % 256).astype(np.uint8)
    scales = random.integers(1, 250, (EXPERTS, OUT, GROUPS)).astype(np.uint8)
    return blocks.reshape(EXPERTS, OUT, GROUPS, 16), scales


def value(bits):
    """A 4-bit float by its definition: sign, exponent with a bias of 1, half steps; no exponent is subnormal."""
    sign, exponent, half = -1 if bits & 8 else 1, bits >> 1 & 3, bits & 1
    return sign * (half / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + half / 2))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_values_are_those_of_the_format(dtype):
    blocks, scales = packed()
    found = unpacked(blocks, scales, dtype)
    assert (found.shape, found.dtype) == ((EXPERTS, 32 * GROUPS, OUT), dtype)
    for (e, o, g, i), byte in np.ndenumerate(blocks):
        for half, bits in enumerate((byte & 15, byte >> 4)):
            known = value(int(bits)) * 2.0 ** (int(scales[e, o, g]) - 127)
            assert float(found[e, 32 * g + 2 * i + half, o]) == known


def test_a_folder_has_packed_tensors_under_their_own_names(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    blocks, scales = packed()
    bias = np.arange(6, dtype=ml_dtypes.bfloat16)
    tensors = {"a.up_blocks": blocks, "a.up_scales": scales, "a.up_bias": bias, "a.other_blocks": bias}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert reader.shapes == {"a.up": (EXPERTS, 96, OUT), "a.up_bias": (6,), "a.other_blocks": (6,)}
        np.testing.assert_array_equal(reader.read("a.up"), unpacked(blocks, scales))
        np.testing.assert_array_equal(reader.read("a.up_bias"), bias)


@pytest.mark.torch
def test_values_are_those_that_transformers_unpacks():
    torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4", reason="needs the extra parity")
    blocks, scales = packed()
    known = mxfp4.convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    np.testing.assert_array_equal(unpacked(blocks, scales, np.float32), known.numpy())
