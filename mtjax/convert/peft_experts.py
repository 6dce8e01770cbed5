"""peft's adapters of experts that transformers holds as one parameter for all of them (`target_parameters`)."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtjax.config.adapters import EXPERT
from mtjax.convert.parameters import Parameter
from mtjax.convert.peft_config import TENSORS
from mtjax.convert.table import Selection, Tensor, name_of
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.convert.peft_adapters import Adapters

NAME = re.compile(r"(?P<module>.*\.experts)(?P<depth>(\.base_layer)*)\.lora_(?P<matrix>[AB])\.weight")
"""Names of adapters of experts: a module with two adapted parameters is wrapped twice, the first of them inside."""
UP, UP_WITHOUT_GATE, DOWN = "gate_up_proj", "up_proj", "down_proj"
"""transformers' names of the parameters of experts, in the order in which a module has them."""
OURS = ("up.weight", "down.weight")
"""mtjax's, in the same order."""
IN_FILES = {"input_linear.weight": UP, "output_linear.weight": DOWN}
"""Ends of names of tensors with all experts, of types whose files have others than transformers' modules."""
GATE = "gate"
INPUTS_FIRST = ("gpt_oss",)
"""Types whose parameters are [experts, inputs, outputs]; others' are [experts, outputs, inputs]."""


@dataclass(frozen=True)
class Update:
    """What is added to a tensor of the files by an adapter, or a part of one."""

    module: str
    """The parameter, by transformers' name."""
    down: str
    """Name of A [experts * rank, inputs]."""
    up: str
    """Name of B [outputs, rank * experts]."""
    experts: int
    expert: int | None
    """The expert of the tensor; None if it has all of them."""
    part: int | None
    """0 for the first half of the outputs, 1 for the second one; None for all."""
    inputs_first: bool

    def array(self, adapters: "Adapters") -> np.ndarray:
        """Computes it."""
        a, b = adapters.read_pair(self.down, self.up)
        a, b = a.reshape(self.experts, -1, a.shape[1]), b.reshape(len(b), -1, self.experts)
        if self.expert is not None:
            a, b = a[self.expert][None], b[..., self.expert][..., None]
        if self.part is not None:
            b = np.split(b, 2)[self.part]
        order = "eio" if self.inputs_first else "eoi"
        update = adapters.scale(self.module, a.shape[1]) * np.einsum(f"ore,eri->{order}", b, a, optimize=True)
        return update if self.expert is None else update[0]


def is_of_all_experts(tensor: Tensor) -> bool:
    """Returns whether a tensor stacks the matrices of all experts."""
    return EXPERT in tensor.axes and not tensor.each


def _parameter_of(name: str) -> tuple[str, str]:
    """Returns transformers' module and parameter of a tensor in the files that stacks all experts."""
    for end, parameter in IN_FILES.items():
        if name.endswith(f".{end}"):
            return f"{name.removesuffix(end)}experts", parameter
    module, _, parameter = name.rpartition(".")
    return module, parameter


def stacked_factors(
    tensor: Tensor, names: tuple[Parameter, Parameter], layer: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns peft's A [experts * rank, inputs] and B [outputs, rank * experts] of a tensor that stacks all experts.

    The adapters of gate and up become one with the sum of their ranks.

    Args:
      tensor: with all experts.
      names: mtjax's A and B.
      layer: their arrays of a layer.
    """
    (a, b), axes = layer, [list(parameter.axes) for parameter in names]
    if GATE not in axes[0]:
        a, b = np.expand_dims(a, -2), np.expand_dims(b, 1)
    experts, _, parts, rank = a.shape
    # [experts, parts, rank, inputs]; of B only the blocks of equal parts, [experts, parts, outputs, parts, rank]
    down, up = a.transpose(0, 2, 3, 1), np.zeros((experts, parts, b.shape[-1], parts, rank), np.float32)
    for part in range(parts):
        up[:, part, :, part] = b[:, part].swapaxes(1, 2)
    if any(group[-1] == GATE and len(group) > 1 for group in tensor.dims):  # gate and up alternate
        up = up.swapaxes(1, 2)
    up = up.reshape(experts, parts * b.shape[-1], parts * rank)
    up = up.transpose(1, 2, 0).reshape(up.shape[1], -1)
    return down.reshape(-1, down.shape[-1]), np.ascontiguousarray(up)


def named_factors(tensor: Tensor, layer: int | None, pair: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns peft's names of A and B of a tensor that stacks all experts; both of a module's parameters have some."""
    module, parameter = _parameter_of(name_of(tensor, layer))
    wrapped = "" if parameter == DOWN else ".base_layer"
    return {f"{module}{wrapped}.lora_{matrix}.weight": array for matrix, array in zip("AB", pair, strict=True)}


def with_experts(config: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    """Returns an adapter_config.json with the parameters of experts, whose adapters have no dropout in peft."""
    names = sorted({_parameter_of(tensor.name)[1] for tensor in tensors})
    found = dict(config) | {"target_parameters": [f"experts.{name}" for name in names], "lora_dropout": 0.0}
    if UP in names:  # gate and up
        for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
            found[pattern] = config[pattern] | {f"experts.{UP}": 2 * config[key]}
    return found


def check_parameters(names: object, source: Path) -> None:
    """Checks that target_parameters of an adapter_config.json has parameters of experts only.

    Raises:
      UserError: it is not a list of names, or another parameter is among them; `source` names the file.
    """
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UserError(f"{source}: target_parameters is {names!r}, and must be a list of names or null")
    known = UP, UP_WITHOUT_GATE, DOWN
    if others := [name for name in names or () if name.rpartition(".")[2] not in known]:
        raise UserError(
            f"{source}: target_parameters has {others[0]!r}, but must have names that end in {known[0]}, {known[1]} or "
            f"{known[2]}, the parameters of experts: merge the adapters with peft"
        )


@dataclass(frozen=True)
class _Layer:
    """Experts of a layer of the base model."""

    names: tuple[str, str]
    """transformers' names of both parameters."""
    tensors: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]
    """The tensors of each in the files, with their names."""
    experts: int


def updates_of(
    adapters: "Adapters", selection: Selection, shapes: Mapping[str, tuple[int, ...]], model_type: str, num_layers: int
) -> dict[str, Update]:
    """Returns the tensors of the files that adapters of experts change -> what is added to each.

    Args:
      adapters: of a folder.
      selection: the table of the base model.
      shapes: of the base model's tensors.
      model_type: its type.
      num_layers: its layers in transformers, which has none of multi-token prediction.

    Raises:
      UserError: the adapters do not fit the base model, or a layer lacks one.
    """
    file, wanted = adapters.path.parent / TENSORS, adapters.config.get("target_parameters") or []
    layers, updates, found = _layers_of(selection), dict[str, Update](), dict[int, str]()
    for module, given in adapters.experts.items():
        layer = layers.get(_number(module))
        if layer is None:
            raise UserError(f"{file} adapts {module}, but the base model {adapters.base} has no experts there")
        if (other := found.setdefault(_number(module), module)) != module:
            raise UserError(
                f"{file} adapts {other} and {module}, but the base model {adapters.base} has one module of experts in "
                "that layer: save the file again"
            )
        kinds = [kind for kind, name in enumerate(layer.names) if _is_wanted(f"{module}.{name}", wanted)]
        if len(kinds) != len(given):
            named = " and ".join(layer.names[kind] for kind in kinds) or "none of its parameters"
            raise UserError(
                f"{file} has {len(given)} adapter{'' if len(given) == 1 else 's'} of {module}, but target_parameters "
                f"in {adapters.path} names {named}: correct target_parameters, or save the file again"
            )
        for kind, depth in zip(kinds, sorted(given, reverse=True), strict=True):
            a, b = given[depth]["A"], given[depth]["B"]
            for name, tensor in layer.tensors[kind]:
                part = tensor.part[1] if tensor.part else None
                update = Update(
                    f"{module}.{layer.names[kind]}",
                    *(a, b, layer.experts, tensor.expert, part),
                    inputs_first=model_type in INPUTS_FIRST,
                )
                _check_shapes(adapters, update, file, shapes[name])
                updates[name] = update
    _check_complete(adapters, layers, wanted, file, num_layers)
    return updates


def _layers_of(selection: Selection) -> dict[int, _Layer]:
    """Returns the numbers of layers with experts in the files -> the experts."""
    layers: dict[int, _Layer] = {}
    for parameter, layer, tensor in selection.tensors():
        kind = next((kind for kind, name in enumerate(OURS) if parameter.name.endswith(f".experts.{name}")), None)
        if kind is None or layer is None:
            continue
        number, experts = tensor.numbers[layer], parameter.sizes[EXPERT]
        found = layers.setdefault(number, _Layer((UP, DOWN), ([], []), experts))
        found.tensors[kind].append((name_of(tensor, layer), tensor))
        if kind == 0 and GATE not in parameter.axes:
            layers[number] = replace(found, names=(UP_WITHOUT_GATE, DOWN))
    return layers


def _number(module: str) -> int:
    """Returns the number of a module's layer; -1 if it has none."""
    found = re.search(r"\.(\d+)\.", module)
    return int(found[1]) if found else -1


def _is_wanted(parameter: str, wanted: Sequence[str]) -> bool:
    """Returns whether target_parameters has a parameter, by its name or the end of it, as in peft."""
    return any(parameter == name or parameter.endswith(f".{name}") for name in wanted)


def _check_shapes(adapters: "Adapters", update: Update, file: Path, of: tuple[int, ...]) -> None:
    """Checks the shapes of an adapter against that of a tensor of the base model."""
    a, b = (adapters.shape(name) for name in (update.down, update.up))
    outputs, inputs = of[-2:][::-1] if update.inputs_first else of[-2:]
    outputs *= 1 if update.part is None else 2
    fits = len(a) == len(b) == 2 and a[0] == b[1] and a[0] > 0 and a[0] % update.experts == 0
    if not fits or a[1] != inputs or b[0] != outputs:
        raise UserError(
            f"{file}: the adapter of {update.module} has shapes {a} and {b}, but the {update.experts} experts of the "
            f"base model need [experts * rank, {inputs}] and [{outputs}, experts * rank]"
        )
    adapters.scale(update.module, a[0] // update.experts)


def _check_complete(
    adapters: "Adapters", layers: Mapping[int, _Layer], wanted: Sequence[str], file: Path, num_layers: int
) -> None:
    """Checks that every layer has the adapters that target_parameters names."""
    if wanted and layers and not adapters.experts:
        raise UserError(
            f"{file} has no adapter of experts, which target_parameters of {adapters.path} names: the file is "
            "incomplete, save it again"
        )
    module = next(iter(adapters.experts), "")
    for number, layer in layers.items():
        own = re.sub(r"\.\d+\.", f".{number}.", module, count=1)
        lacking = [name for name in layer.names if _is_wanted(f"{own}.{name}", wanted)]
        if number < num_layers and lacking and own not in adapters.experts:
            raise UserError(
                f"{file} has no adapter of {own}.{lacking[0]}, which target_parameters of {adapters.path} names: the "
                "file is incomplete, save it again"
            )
