"""Quantizes the matrices of a Hugging Face folder that is written, in the layouts of `mtjax.convert.compressed`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mtjax.config import Model
from mtjax.config.families import is_decoder
from mtjax.convert.compressed import FLOAT8, LARGEST_FLOAT8, METHOD, PACKED, SCALE, SHAPE, WORD, ZERO, pack
from mtjax.convert.parameters import Parameter
from mtjax.convert.safetensors_files import DTYPES
from mtjax.convert.table import Selection, Tensor, name_of
from mtjax.errors import UserError
from mtjax.models.weight_grid import Grid, fitted_grid

Kind = Literal["int8", "int4", "fp8"]


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a decoder's layers are quantized: int8 and fp8 by output channel, int4 by groups."""

    kind: Kind
    group: int
    """Inputs that share a scale in int4."""
    zero_point: bool
    """Whether int4 has zero points."""
    is_calibrated: bool = False
    """Whether weights are rounded by GPTQ; otherwise each to the nearest value."""
    moments: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    """For GPTQ: sums over calibration tokens of the outer products of a matrix's inputs with themselves, by the
    dotted name of its module and the layer. They take long, so they are added after `of` has checked the model."""

    def of(self, selection: Selection, model: Model, dtype: str) -> "Compressed":
        """Returns what is quantized of a model whose other tensors are written in `dtype`.

        Raises:
          UserError: transformers has no modules of this model that can be quantized, or the group does not divide a
            matrix's inputs.
        """
        if not is_decoder(model) or model.head != "language":
            raise UserError(
                f"--quantize needs a decoder with a language head, and the model is a {model.family} with "
                f"head {model.head!r}: remove it"
            )
        rows = [(p, layer, t) for p, layer, t in selection.tensors() if layer is not None and p.is_layer_matrix]
        for parameter, layer, tensor in rows:
            self._check(parameter, layer, tensor, tensor.shape(parameter.sizes))
        found = {name_of(t, layer): (p.name, layer) for p, layer, t in rows}
        others = [name_of(t, layer) for p, layer, t in selection.tensors() if len(t.dims) == 2]
        # `ignore` of the config.json names modules, not tensors. Without it transformers would expect scales for the
        # output, which is a Linear, too.
        plain = [name.removesuffix(".weight") for name in others if name not in found and name.endswith(".weight")]
        return Compressed(self, dtype, found, plain)

    def _check(self, parameter: Parameter, layer: int, tensor: Tensor, shape: tuple[int, ...]) -> None:
        # A row of the tensor must be one output with all of its inputs: scales are per row, and groups are cut along
        # it. A parameter's last axis is its output, so a projection back to the hidden size has all other axes as
        # inputs.
        inputs = parameter.axes[:-1] if parameter.axes[-1] == "embed" else ("embed",)
        name = name_of(tensor, layer)
        if tensor.is_part or tensor.each or len(tensor.dims) != 2 or tensor.dims[1] != inputs:
            raise UserError(
                f"--quantize needs separate matrices, as in Llama's layers, and {name} is not one: remove it"
            )
        if self.kind == "int4" and shape[1] % self.group:
            raise UserError(
                f"--group-size is {self.group}, and {name} has {shape[1]} inputs, not a multiple: "
                f"use {np.gcd(self.group, shape[1])}, or another divisor of {shape[1]}"
            )
        # Moments are of inputs as mtjax orders them. A permuted tensor (RoPE's channels) would be matched with those of
        # other inputs, without an error.
        if self.is_calibrated and tensor.order and tensor.order[0] in inputs:
            raise UserError(f"--calibration needs inputs in mtjax's order, and those of {name} have another: remove it")


@dataclass(frozen=True)
class Compressed:
    """The quantized tensors of a folder that is written."""

    how: Quantization
    dtype: str
    scales: Mapping[str, tuple[str, int]]
    """Names of the quantized tensors -> the parameter's name, and its layer."""
    plain: list[str]
    """Modules that are not quantized."""

    @property
    def bits(self) -> int:
        """Bits of a weight."""
        return 4 if self.how.kind == "int4" else 8

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
        """Returns the shapes of all tensors with the parts of quantized ones, and the dtypes of these."""
        result, dtypes = {}, {}
        for name, shape in shapes.items():
            if name not in self.scales:
                result[name] = shape
                continue
            rows, columns = shape
            groups = columns // self.how.group if self.how.kind == "int4" else 1
            result[name + SCALE] = (rows, groups)
            if self.how.kind == "fp8":
                result[name], dtypes[name] = shape, "float8"
                continue
            result[name + PACKED] = (rows, -(-columns * self.bits // WORD))
            result[name + SHAPE] = (2,)
            dtypes |= {name + PACKED: "int32", name + SHAPE: "int64"}
            if self.how.zero_point:
                result[name + ZERO], dtypes[name + ZERO] = (-(-rows * self.bits // WORD), groups), "int32"
        return result, dtypes

    def parts(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """Quantizes a matrix [outputs, inputs]; returns its tensors by name.

        Raises:
          UserError: it has a value that is not finite.
        """
        weight = weight.astype(np.float32)
        if not np.isfinite(weight).all():
            raise UserError(f"{name} has a value that is not finite, and can't be quantized: remove --quantize")
        dtype = DTYPES[self.dtype]
        if self.how.kind == "fp8":
            largest = np.abs(weight).max(1, keepdims=True)
            # Rounded to the type of the file before the division: a reader multiplies by the rounded scale.
            scales = (largest / LARGEST_FLOAT8).astype(dtype).astype(np.float32)
            # A row of zeros has the scale 0, and so has one whose scale underflows in float16.
            scales = np.where(scales > 0, scales, 1).astype(np.float32)
            # A scale that was rounded down would put the largest value beyond the format, where it is not a number.
            scaled = np.clip(weight / scales, -LARGEST_FLOAT8, LARGEST_FLOAT8)
            return {name: scaled.astype(FLOAT8), name + SCALE: scales.astype(dtype)}
        blocks = weight.reshape(len(weight), -1, self.how.group if self.how.kind == "int4" else weight.shape[1])
        moments = self._moments(*self.scales[name]) if self.how.is_calibrated else None
        if moments is None:
            grid = fitted_grid(blocks, 2, self.bits, dtype, zero_point=self.how.zero_point)
            integers = grid.round(blocks)
        else:
            from mtjax.convert.gptq import quantize

            integers, grid = quantize(weight, moments, self.bits, blocks.shape[2], dtype, self.how.zero_point)
        return self._packed(name, integers.reshape(weight.shape), grid)

    def _moments(self, parameter: str, layer: int) -> np.ndarray:
        """Returns the moments of a parameter's inputs, which parts of a module share."""
        module = parameter
        # Query and key_value have one input, and moments are collected for the module that contains both.
        while module and (module, layer) not in self.how.moments:
            module = module.rpartition(".")[0]
        return self.how.moments[module, layer]

    def _packed(self, name: str, integers: np.ndarray, grid: Grid) -> dict[str, np.ndarray]:
        parts = {
            name + PACKED: pack(integers, self.bits),
            name + SCALE: grid.scales[..., 0].astype(DTYPES[self.dtype]),
            name + SHAPE: np.array(integers.shape, np.int64),
        }
        if grid.zeros is not None:
            # compressed-tensors packs zero points along outputs, unlike weights, which it packs along inputs.
            parts[name + ZERO] = np.ascontiguousarray(pack(grid.zeros[..., 0].T, self.bits).T)
        return parts

    def config_json(self) -> dict[str, Any]:
        """Returns the keys of config.json."""
        how = self.how
        weights = {
            "num_bits": self.bits,
            "type": "float" if how.kind == "fp8" else "int",
            "symmetric": not how.zero_point,
            # compressed-tensors calls one scale per output "channel", and rejects a group size beside it.
            "strategy": "group" if how.kind == "int4" else "channel",
            "group_size": how.group if how.kind == "int4" else None,
            "dynamic": False,
        }
        layout = "float-quantized" if how.kind == "fp8" else "pack-quantized"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        settings = {"quant_method": METHOD, "format": layout, "quantization_status": "compressed"}
        return {"quantization_config": settings | {"config_groups": {"group_0": group}, "ignore": self.plain}}
