"""Writes the LoRA adapters of a run to a folder that `peft` loads on top of the run's initial weights."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtjax.config import Model
from mtjax.config.adapters import PARTS, adapts
from mtjax.config.families import is_decoder
from mtjax.config.sizes import dense_layers
from mtjax.config.ssm import has_state_space, letters_of
from mtjax.convert.model_types.family import ModelType
from mtjax.convert.model_types.registry import family_of_model
from mtjax.convert.mtjax_folder import MtjaxSource, adapter_names
from mtjax.convert.parameters import Parameter
from mtjax.convert.peft_config import PREFIX, TENSORS
from mtjax.convert.peft_expert_factors import is_of_all_experts, named_factors, stacked_factors, with_experts
from mtjax.convert.stream import WeightSource
from mtjax.convert.table import Tensor, name_of
from mtjax.convert.weights_path import ADAPTER_CONFIG
from mtjax.errors import UserError, require
from mtjax.runtime.processes.notes import say_notes

IS_TRANSPOSED = ("gpt2", "openai-gpt")
"""Types whose matrices are [inputs, outputs]: transformers' Conv1D."""

FUSED = ("qwen3_next",)
"""Types with experts, of which peft 0.21 takes every MLP for experts', also where a model has none."""
WITHOUT_OUT_PROJ = ("falcon_h1", "mamba2", "nemotron_h")
"""Types in which peft 0.21 refuses adapters of out_proj."""


def write_adapters(source: WeightSource, folder: Path) -> int:
    """Writes `adapter_config.json` and `adapter_model.safetensors`; returns the number of weights in the adapters.

    Raises:
      UserError: the weights have no adapters, or the model is not a decoder with a language head.
    """
    if not isinstance(source, MtjaxSource) or not source.adapters:
        raise UserError(
            "peft: needs the adapters of a run of mtjax finetune with --lora-rank, but these weights have none"
        )
    model = source.weights.config.model
    if model.head != "language" or not is_decoder(model):
        raise UserError(
            "peft: needs adapters of a gpt or llama with a language head; for a task's model use --to hf:DIR"
        )
    if (base := str(source.weights.config.training.init_from or "")).startswith("peft:"):
        raise UserError(
            f"peft: needs the folder of a base model, and these adapters were trained on weights merged from {base}: "
            "use --to hf:DIR, which merges both"
        )
    family = family_of_model(source.origin.config.model, source.origin.hugging_face.get("model_type"))
    _check_type(model, family.model_type)
    is_transposed = family.model_type in IS_TRANSPOSED
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    adapted = list(_adapted_tensors(source, family))
    say_notes(source.origin.not_finite.notes)
    matrices = _adapted_matrices(adapted, family.model_type)
    for copy, first in family.shared(model).items():  # peft has an adapter for each use of a shared module
        matrices |= {copy + n.removeprefix(first): m for n, m in matrices.items() if n.startswith(f"{first}.")}
    for name, (down, up) in matrices.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": down, f"{PREFIX}{name}.lora_B.weight": up}
        # GPT-2's c_proj is a module of attention and of the MLP, with different ranks if one is adapted in parts: the
        # longer name tells them apart.
        ranks[name.rpartition(".")[2] if not is_transposed else re.sub(r".*\.\d+\.", "", name)] = len(down)
    config = _config(source, ranks, is_transposed)
    if of_experts := [each for each in adapted if is_of_all_experts(each.tensor)]:
        for each in of_experts:
            pair = stacked_factors(each.tensor, each.names, each.arrays)
            tensors |= {PREFIX + name: array for name, array in named_factors(each.tensor, each.layer, pair).items()}
        config = with_experts(config, [each.tensor for each in of_experts])
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    require("safetensors.numpy", "convert").save_file(tensors, folder / TENSORS, {"format": "pt"})
    return sum(array.size for array in tensors.values())


def _check_type(model: Model, model_type: str) -> None:
    """Checks that peft loads the adapters of a type.

    Raises:
      UserError: it refuses them, or takes those of MLPs for experts'.
    """
    has_mlps = model.shared_expert_size or dense_layers(model) or "-" in letters_of(model)
    if has_mlps and (model.num_experts or model_type in FUSED) and adapts(model, "mlp"):
        raise UserError(
            "peft cannot distinguish MLPs outside of experts (a shared expert, dense layers) from experts in a "
            f"{model_type}: use --to hf:DIR, which merges the adapters, or train with --lora-targets mixers"
        )
    if model_type in WITHOUT_OUT_PROJ and adapts(model, "mamba") and has_state_space(model):
        raise UserError(
            f"peft: refuses adapters of Mamba-2's out_proj in a {model_type}, and these weights have some; use --to "
            "hf:DIR, which merges them, or train with --lora-targets attention or mlp"
        )


class AdaptedTensor(NamedTuple):
    """A tensor of transformers with adapters."""

    weight: Parameter
    tensor: Tensor
    layer: int | None
    names: tuple[Parameter, Parameter]
    """mtjax's A and B."""
    arrays: tuple[np.ndarray, np.ndarray]
    """Of the layer."""


def _adapted_tensors(source: MtjaxSource, family: ModelType) -> Iterator[AdaptedTensor]:
    """Yields every tensor with adapters, layer by layer of each parameter."""
    for weight, row in family.table_of(source.origin.config.model).select(source.parameters).rows:
        names = adapter_names(weight.name)
        if names[1] not in source.adapters:
            continue
        a, b = (source.adapters[name] for name in names)
        for layer, *arrays in zip(a.layers, source.saved(a), source.saved(b), strict=True):
            for tensor in (one for each in row.tensors for one in each.spread(weight)):
                yield AdaptedTensor(weight, tensor, layer, (a, b), (arrays[0], arrays[1]))


def _adapted_matrices(adapted: Iterable[AdaptedTensor], model_type: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns A [rank, inputs] and B [outputs, rank] of transformers' matrices, by the names of their modules.

    Of a matrix with several of mtjax's parameters, those that share an A add up their B's, each 0 outside its own rows
    (Mamba-2's in_proj); of others the ranks add up (queries and their gates).
    """
    found: dict[str, dict[tuple[str, Any], tuple[np.ndarray, np.ndarray]]] = {}
    for weight, tensor, layer, names, arrays in adapted:
        if is_of_all_experts(tensor):
            continue
        # peft's A and B are of the file's matrix, row by row: only parts that follow each other can be written.
        _check_order(tensor, model_type)
        down, up = factors(tensor, names, arrays)
        up = _in_rows_of_file(tensor, weight, up)
        of_module = found.setdefault(name_of(tensor, layer).removesuffix(".weight"), {})
        has_parts = bool(set(PARTS) & set(names[0].axes))  # each of query, key and value has an A
        of = names[0].name, tensor.part if has_parts else None
        before = of_module.get(of)
        of_module[of] = (down, up if before is None else before[1] + up)
    return {
        name: (
            np.concatenate([down for down, _ in of_module.values()]),
            np.hstack([up for _, up in of_module.values()]),
        )
        for name, of_module in found.items()
    }


def _in_rows_of_file(tensor: Tensor, weight: Parameter, up: np.ndarray) -> np.ndarray:
    """Puts the rows of B [outputs, rank] into their places in the tensor of the file, which may have others: zeros."""
    if not tensor.is_part:
        return up
    rows = np.zeros((tensor.shape(weight.sizes)[0], up.shape[1]), np.float32)
    into = tensor.view(rows, weight)
    into[...] = up.reshape(into.shape)
    return rows


def _check_order(tensor: Tensor, model_type: str) -> None:
    """Checks that the rows of a matrix are in mtjax's order, part by part.

    Raises:
      UserError: transformers has another order of rows.
    """
    inner = {axis for group in tensor.dims for axis in group[1:]}
    if inner & set(PARTS) or tensor.first:
        raise UserError(
            f"peft: adapters of a {model_type} are not supported, since {tensor.name} has another order of rows; use "
            "--to hf:DIR, which merges them"
        )


def factors(
    tensor: Tensor, names: tuple[Parameter, Parameter], layer: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns peft's A [rank, inputs] and B [outputs, rank] of one of transformers' matrices.

    A matrix that stacks several of mtjax's, such as GPT-2's c_attn, gets one adapter with the sum of their ranks, whose
    B is block-diagonal.
    """
    (a, b), (inputs, outputs) = layer, (list(parameter.axes) for parameter in names)
    if tensor.expert is not None:
        a, b = (each.take(tensor.expert, 0) for each in (a, b))
        inputs, outputs = inputs[1:], outputs[1:]
    if tensor.order is not None:  # of rows: the channels that RoPE rotates
        axis, order = tensor.order
        b = b.take(np.argsort(order), outputs.index(axis))
    part = next((axis for axis in inputs if axis in PARTS), None)
    if part is None and tensor.part is not None:  # of B alone, as of the parts of Mamba-2's first product
        b = b.take(tensor.part[1], outputs.index(tensor.part[0]))
    if part is None:
        return _matrices(a, b)
    # One adapter for each of query, key and value (or gate and up), which are stacked in mtjax.
    each = [_matrices(np.take(a, i, axis=inputs.index(part)), b[i]) for i in range(len(b))]
    if tensor.part is not None:
        return each[tensor.part[1]]
    blocks = [up for _, up in each]
    rows, columns = (sum(block.shape[i] for block in blocks) for i in (0, 1))
    block_diagonal, row, column = np.zeros((rows, columns), np.float32), 0, 0
    for block in blocks:
        # Each part's rows see its own A alone.
        block_diagonal[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return np.concatenate([down for down, _ in each]), block_diagonal


def _matrices(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reshapes [*inputs, rank] and [rank, *outputs] to matrices, transposed to torch's [outputs, inputs]."""
    down, up = a.reshape(-1, a.shape[-1]).T, b.reshape(len(b), -1).T
    return np.ascontiguousarray(down), np.ascontiguousarray(up)


def _config(source: MtjaxSource, ranks: dict[str, int], is_transposed: bool) -> dict[str, Any]:
    """Returns the adapter_config.json; `ranks` maps the names of modules to the ranks of their adapters."""
    config = source.weights.config
    rank, alpha = config.model.lora_rank, config.model.lora_alpha
    other = {name: count for name, count in ranks.items() if count != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(config.training.init_from or "").removeprefix("hf:"),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": config.model.lora_dropout,
        "bias": "none",
        "target_modules": sorted(ranks),
        "rank_pattern": other,
        # peft scales by alpha / rank of the module: where the rank is a sum, alpha must grow by the same factor.
        "alpha_pattern": {name: alpha * count / rank for name, count in other.items()},
        # Without it peft would set it for Conv1D, with a warning.
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
    }
