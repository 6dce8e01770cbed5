"""Writes the LoRA adapters of a run to a folder that `peft` loads on top of the run's initial weights."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config.adapters import ADAPTER, EXPERT, PARTS
from mtjax.config.families import is_decoder
from mtjax.config.sizes import dense_layers
from mtjax.convert.families.registry import family_of_model
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.convert.parameters import Parameter
from mtjax.convert.stream import Source
from mtjax.convert.table import Tensor, name_of
from mtjax.convert.weights_path import ADAPTER_CONFIG
from mtjax.errors import UserError, require

PREFIX = "base_model.model."
"""Prefix of peft's names of tensors."""
TENSORS = "adapter_model.safetensors"
IS_TRANSPOSED = ("gpt2", "openai-gpt")
"""Types whose matrices are [inputs, outputs]: transformers' Conv1D."""


def write_adapters(source: Source, folder: Path) -> int:
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
    if model.num_experts and model.lora_targets != "attention" and (model.shared_expert_size or dense_layers(model)):
        raise UserError(
            "peft: cannot be told that experts and other MLPs, such as a shared expert, both have adapters; use --to "
            "hf:DIR, which merges them, or train with --lora-targets attention"
        )
    if (base := str(source.weights.config.training.init_from or "")).startswith("peft:"):
        raise UserError(
            f"peft: needs the folder of a base model, and these adapters were trained on weights merged from {base}: "
            "use --to hf:DIR, which merges both"
        )
    family = family_of_model(source.origin.config.model, source.origin.hugging_face.get("model_type"))
    _check_matrices(source)
    selection = family.table_of(model).select(source.parameters)
    is_transposed = family.model_type in IS_TRANSPOSED
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for weight, row in selection.rows:
        module = weight.name.removesuffix(".weight")
        names = [f"{module}.{ADAPTER}.{matrix}" for matrix in "ab"]
        if names[0] not in source.adapters:
            continue
        a, b = (source.adapters[name] for name in names)
        for layer, layer_a, layer_b in zip(a.layers, source.saved(a), source.saved(b), strict=True):
            for tensor in (one for each in row.tensors for one in each.spread(weight)):
                _check_order(tensor, family.model_type)
                down, up = factors(tensor, (a, b), (layer_a, layer_b))
                name = name_of(tensor, layer).removesuffix(".weight")
                tensors |= {f"{PREFIX}{name}.lora_A.weight": down, f"{PREFIX}{name}.lora_B.weight": up}
                ranks[name.rpartition(".")[2] if not is_transposed else re.sub(r".*\.\d+\.", "", name)] = len(down)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(_config(source, ranks, is_transposed), indent=2) + "\n")
    require("safetensors.numpy", "convert").save_file(tensors, folder / TENSORS, {"format": "pt"})
    return sum(array.size for array in tensors.values())


def _check_matrices(source: MtjaxSource) -> None:
    """Checks that every adapter is of one matrix.

    Raises:
      UserError: several parameters share one, as the parts of Mamba-2's first product do.
    """
    of = {name.rpartition(f".{ADAPTER}.")[0] for name in source.adapters}
    if shared := sorted(name for name in of if f"{name}.weight" not in source.parameters):
        raise UserError(
            f"peft: the adapters of {shared[0]} are shared by several parameters, which is not supported; use "
            "--to hf:DIR, which merges them"
        )


def _check_order(tensor: Tensor, model_type: str) -> None:
    """Checks that the rows of a matrix are in mtjax's order, part by part.

    Raises:
      UserError: transformers has one matrix for several of mtjax's, or another order of rows.
    """
    inner = {axis for group in tensor.dims for axis in group[1:]}
    if tensor.is_part or inner & set(PARTS) or tensor.first or (EXPERT in tensor.axes and tensor.expert is None):
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
        "alpha_pattern": {name: alpha * count / rank for name, count in other.items()},
        "fan_in_fan_out": is_transposed,
        "inference_mode": True,
    }
