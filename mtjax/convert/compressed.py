"""Quantized weights in the layouts of compressed-tensors, which transformers and vLLM read: integers of 4 or 8 bits
packed in words of 32, and 8-bit floats, with scales of output channels or of groups of inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mtjax.config.storage import Storage
from mtjax.convert import fp8
from mtjax.errors import shortened
from mtjax.models.weight_grid import Grid

METHOD = "compressed-tensors"
PACKED, SCALE, SHAPE, ZERO = "_packed", "_scale", "_shape", "_zero_point"
"""Suffixes of the tensors of `NAME.weight`."""
WORD = 32
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_FLOAT8 = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)
_OFFLINE = ("weight_input", "weight_output")
"""Locations in a `transform_config` whose rotations have been applied to the weights in the files."""
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")

Shapes = Mapping[str, tuple[int, ...]]


def pack(integers: np.ndarray, bits: int) -> np.ndarray:
    """Packs signed integers of `bits` bits [rows, columns] to int32 [rows, columns * bits / 32, rounded up].

    The first value is in the lowest bits; values are shifted to be 0 or more, and rows are padded with zeros.
    """
    per_word = WORD // bits
    # int16 holds the sum: int8's 127 + 128 would wrap.
    shifted = (integers.astype(np.int16) + (1 << (bits - 1))).astype(np.uint32)
    shifted = np.pad(shifted, ((0, 0), (0, -shifted.shape[1] % per_word)))
    words = shifted.reshape(len(shifted), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
    return np.bitwise_or.reduce(words, axis=2).astype(np.uint32).view(np.int32)


def unpack(words: np.ndarray, bits: int, columns: int) -> np.ndarray:
    """Unpacks what `pack` packed, without its padding: int8 [rows, columns]."""
    shifts = np.arange(WORD // bits, dtype=np.uint32) * bits
    values = (words.view(np.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    shifted = values.reshape(len(words), -1)[:, :columns].astype(np.int16) - (1 << (bits - 1))
    return shifted.astype(np.int8)


@dataclass(frozen=True)
class Stored:
    """A quantized tensor of a folder."""

    shape: tuple[int, int]
    bits: int
    is_packed: bool
    has_zeros: bool
    groups: int
    """Scales of an output."""
    is_float: bool = False

    @property
    def settings(self) -> Storage | None:
        """Returns with which settings generation stores the same numbers; None if there are none."""
        # Generation has groups for int4 alone, as `Storage` says.
        if self.bits == 4:
            return Storage("int4", self.shape[1] // self.groups, self.has_zeros)
        if self.groups != 1 or self.has_zeros:
            return None
        return Storage("fp8" if self.is_float else "int8")

    def parts(self, name: str) -> list[str]:
        """Returns the names of its tensors in the files."""
        weight_names = [name + PACKED, name + SHAPE] if self.is_packed else [name]
        return [*weight_names, name + SCALE, *([name + ZERO] if self.has_zeros else [])]

    def grid(self, name: str, read: Callable[[str], np.ndarray]) -> Grid:
        """Returns the values that its weights may have, in full size; of floats, only the scales."""
        scales = read(name + SCALE).astype(np.float32)
        # A scale of the whole tensor (strategy "tensor") has no dimension or one.
        scales = scales if scales.ndim == 2 else scales.reshape(-1, 1)
        zeros = None
        if self.has_zeros:
            zeros = read(name + ZERO)
            # Packed along outputs. Those of a whole tensor are bytes, and so were all until 2025 (pull request 296 of
            # compressed-tensors), in files of the same format.
            if self.is_packed and zeros.dtype == np.int32:
                zeros = unpack(np.ascontiguousarray(zeros.T), self.bits, self.shape[0]).T
            zeros = _expanded(zeros.reshape(scales.shape), self.shape).astype(np.float32)
        return Grid(_expanded(scales, self.shape), zeros, self.bits)

    def values(self, name: str, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns the weights in float32."""
        integers = unpack(read(name + PACKED), self.bits, self.shape[1]) if self.is_packed else read(name)
        return self.grid(name, read).values(integers.astype(np.float32))


def _expanded(of_groups: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Repeats [rows or 1, groups] for the inputs of each group."""
    return np.broadcast_to(np.repeat(of_groups, shape[1] // of_groups.shape[1], axis=1), shape)


def stored_tensors(shapes: Shapes, codes: Mapping[str, str], read: Callable[[str], np.ndarray]) -> dict[str, Stored]:
    """Returns the quantized tensors among those of a folder, by the name of the weight.

    Args:
      shapes: of all tensors.
      codes: their types in the files.
      read: reads a tensor.
    """
    found = {}
    for scale, of_groups in shapes.items():
        name = scale.removesuffix(SCALE)
        # `input_scale` and `k_scale` of quantized activations and caches are not scales of weights.
        if not scale.endswith(".weight" + SCALE) or len(of_groups) > 2:
            continue
        if name + PACKED in shapes and name + SHAPE in shapes:
            rows, columns = (int(n) for n in read(name + SHAPE))
            words = shapes[name + PACKED]
            # By the size of the words, not by `num_bits` of the config.json: groups of modules may have different ones.
            bits = next((b for b in (4, 8) if words == (rows, -(-columns * b // WORD))), None)
            if bits and columns % _groups(of_groups) == 0:
                found[name] = Stored((rows, columns), bits, True, name + ZERO in shapes, _groups(of_groups))
        elif codes.get(name) in (fp8.CODE, "I8") and len(shapes[name]) == 2:
            rows, columns = shapes[name]
            # Blocks of several rows (`weight_block_size`) are not this layout: see `fp8`.
            if columns % _groups(of_groups) == 0 and of_groups[:1] in ((rows,), (1,), ()):
                found[name] = Stored(
                    (rows, columns), 8, False, name + ZERO in shapes, _groups(of_groups), codes[name] != "I8"
                )
    return found


def _groups(scales: tuple[int, ...]) -> int:
    return scales[1] if len(scales) == 2 else 1


def unread(settings: Mapping[str, Any]) -> list[str]:
    """Returns what a config.json's quantization_config of this method has that is not read."""
    wrong, layout = [], settings.get("format", "dense")
    if layout not in FORMATS:
        wrong.append(f"quantization_config has format {layout!r}, but must have {' or '.join(map(repr, FORMATS))}")
    if settings.get("quantization_status", "compressed") != "compressed":
        wrong.append("quantization_config has quantization_status other than 'compressed'")
    if settings.get("kv_cache_scheme"):
        wrong.append("quantization_config has a kv_cache_scheme, which is not read")
    for name, scheme in _members(settings, "transform_config.config_groups", wrong):
        # Where the files have rotated weights, another weight or the activations need the inverse rotation. That of a
        # weight is in the files as well; that of activations has to be computed while the model runs, and without it
        # the outputs would be wrong, with the right shapes.
        online = [where for where in _locations(scheme) if where not in _OFFLINE]
        if online:
            wrong.append(
                f"quantization_config has transform_config {name} with location {online[0]}, which is not read"
            )
    for name, group in _members(settings, "config_groups", wrong):
        weights = group.get("weights") or {}
        if not _is_object(weights, "weights", f" in {name}", wrong):
            continue
        # With actorder "group", inputs of a group are not consecutive, and a tensor `weight_g_idx` says which they are.
        known = {"num_bits": (4, 8), "strategy": ("group", "channel", "tensor"), "actorder": (None, "static", "weight")}
        for key, values in known.items():
            if weights.get(key) not in values:
                expected = " or ".join(str(value) for value in values)
                wrong.append(f"quantization_config has {key} {weights.get(key)!r} in {name}, but must have {expected}")
    return wrong


def _members(settings: Mapping[str, Any], path: str, wrong: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the objects by name at a path of keys; what is of another kind is added to `wrong` instead."""
    found: Any = settings
    for key in path.split("."):
        found = found.get(key) or {}
        if not _is_object(found, key, "", wrong):
            return []
    return [(name, member) for name, member in found.items() if _is_object(member, name, f" in {path}", wrong)]


def _is_object(value: Any, name: str, where: str, wrong: list[str]) -> bool:
    """Returns whether a value is a JSON object; adds to `wrong` what has another value."""
    if isinstance(value, dict):
        return True
    wrong.append(f"quantization_config has {name} {shortened(repr(value))}{where}, which must be an object")
    return False


def _locations(scheme: Mapping[str, Any]) -> list[Any]:
    """Returns where the rotations of a scheme are; for a malformed entry, the entry itself as text."""
    applied = scheme.get("apply") or []
    each = applied if isinstance(applied, list) else [applied]
    return [one.get("location") if isinstance(one, dict) else shortened(repr(one)) for one in each]
