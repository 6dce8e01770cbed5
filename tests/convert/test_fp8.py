"""8-bit weights with scales of blocks, beside torch's arithmetic of the published formula."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from mtjax.convert.compressed import pack
from mtjax.convert.fp8 import unpacked
from mtjax.convert.model_types.registry import MODEL_TYPES
from mtjax.convert.safetensors_files import SafetensorsReader
from mtjax.errors import UserError

SHAPE = (300, 200)


def packed():
    """Every byte but the two that are not numbers, and scales of a factor of 10^4."""
    random = np.random.default_rng(0)
    bytes_ = random.integers(0, 254, SHAPE).astype(np.uint8)
    bytes_[bytes_ == 0x7F] = 1
    scales = np.exp(random.uniform(-9, 0, (3, 2))).astype(np.float32)
    return bytes_.view(ml_dtypes.float8_e4m3fn), scales


def write(folder, tensors):
    """A safetensors file, whose library has no 8-bit floats for numpy."""
    codes = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16"}
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": codes[str(array.dtype)], "shape": list(array.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_torch(dtype):
    torch = pytest.importorskip("torch", reason="needs the extra parity: pip install '.[parity]'")
    values, scales = packed()
    wide = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn).float()
    of_each = torch.from_numpy(scales).repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    known = (wide * of_each).to(getattr(torch, dtype)).float().numpy()
    found = unpacked(values, scales, {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype])
    np.testing.assert_array_equal(found.astype(np.float32), known)


def test_a_folder_has_packed_tensors_without_their_scales(tmp_path):
    values, scales = packed()
    bias = np.arange(6, dtype=ml_dtypes.bfloat16)
    write(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "a.bias": bias})
    with SafetensorsReader(tmp_path) as reader:
        assert (reader.shapes, reader.dtype) == ({"a.weight": SHAPE, "a.bias": (6,)}, "bfloat16")
        np.testing.assert_array_equal(reader.read("a.weight"), unpacked(values, scales))
        np.testing.assert_array_equal(reader.read("a.bias"), bias)


@pytest.mark.parametrize("scales", [None, np.ones((300, 1), np.float32), np.ones((1, 1), np.float32)])
def test_other_scales_are_refused(tmp_path, scales):
    values, bias = packed()[0], np.arange(6, dtype=ml_dtypes.bfloat16)
    write(tmp_path, {"a.weight": values, "b": bias} | ({} if scales is None else {"a.weight_scale_inv": scales}))
    with pytest.raises(UserError, match=r"contains F8_E4M3 \(a.weight\); .* scales of blocks of 128 x 128"):
        SafetensorsReader(tmp_path)


def test_zero_points_of_files_that_do_not_pack_them_are_read(tmp_path):
    """compressed-tensors packs them since its pull request 296; before, and for a whole tensor, they are bytes."""
    random, rows, columns, groups = np.random.default_rng(0), 16, 32, 2
    integers = random.integers(-8, 8, (rows, columns)).astype(np.int8)
    scales, zeros = np.full((rows, groups), 0.5, np.float32), random.integers(-8, 8, (rows, groups)).astype(np.int8)
    known = (integers - np.repeat(zeros, columns // groups, axis=1)) * np.float32(0.5)
    tensors = {"a.weight_packed": pack(integers, 4), "a.weight_shape": np.array([rows, columns])}
    tensors |= {"a.weight_scale": scales, "a.weight_zero_point": zeros}
    save_file(tensors, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        np.testing.assert_array_equal(reader.read("a.weight"), known)
    save_file(tensors | {"a.weight_zero_point": pack(zeros.T, 4).T.copy()}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        np.testing.assert_array_equal(reader.read("a.weight"), known)


def compressed(**settings):
    return {"quant_method": "compressed-tensors", "format": "pack-quantized"} | settings


def rotated(location):
    """A config of compressed-tensors whose weights are rotated at `location`, as llm-compressor's SpinQuant writes."""
    scheme = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": location, "inverse": False}]}
    return compressed(transform_config={"config_groups": {"R4": scheme}})


def test_weights_that_are_rotated_in_the_files_alone_are_read():
    config = {"model_type": "llama", "quantization_config": rotated("weight_output")}
    MODEL_TYPES["llama"].model_settings(config, frozenset(), "config.json")


@pytest.mark.parametrize(
    ("kind", "packed", "said"),
    [
        ("llama", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "'bitsandbytes', but must have 'fp8'"),
        ("gpt2", {"quant_method": "gptq", "bits": 4}, "'gptq', but must have 'fp8'"),
        ("qwen2", {"quant_method": "awq"}, "'awq', but must have 'fp8'"),
        ("llama", {"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
        ("llama", rotated("input"), "transform_config R4 with location input"),
        ("llama", rotated(None), "transform_config R4 with location None"),
        (
            "llama",
            compressed(transform_config={"config_groups": {"R4": {"apply": [{}, {"location": "input"}]}}}),
            "None",
        ),
        ("llama", compressed(transform_config={"config_groups": {"R4": {"apply": ["input"]}}}), "location 'input'"),
        ("llama", rotated(["input"]), r"location \['input'\]"),
        ("llama", compressed(transform_config={"config_groups": {"R4": "input"}}), "R4 'input' .* must be an object"),
        ("llama", compressed(transform_config=["R4"]), "transform_config .* must be an object"),
        ("llama", compressed(config_groups=[{"weights": {}}]), "config_groups .* must be an object"),
        ("llama", compressed(config_groups={"g": {"weights": "int4"}}), "weights 'int4' in g, which must be an object"),
        ("gpt_oss", {"quant_method": "fp8"}, "'fp8', but must have 'mxfp4'"),
        ("deepseek_v3", {"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size \\[64, 64\\]"),
        ("deepseek_v3", {"quant_method": "fp8"}, "weight_block_size None"),
        ("deepseek_v3", {"bits": 8}, "'not given'"),
    ],
)
def test_other_quantization_is_refused_by_name(kind, packed, said):
    with pytest.raises(UserError, match=f"quantization_config has .*{said}"):
        config = {"model_type": kind, "quantization_config": packed}
        MODEL_TYPES[kind].model_settings(config, frozenset(), "config.json")
