"""Reads peft's adapters of experts that transformers holds as one parameter for all of them (`target_parameters`): what
they add to each tensor of the base model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mtjax.config.adapters import EXPERT, GATE
from mtjax.convert.peft_adapters import Adapters
from mtjax.convert.peft_config import DOWN, TENSORS, UP, UP_WITHOUT_GATE
from mtjax.convert.table import Selection, Tensor, name_of
from mtjax.errors import UserError

OURS = ("up.weight", "down.weight")
"""mtjax's names of the parameters of experts, in transformers' order."""
INPUTS_FIRST = ("gpt_oss",)
"""Types whose parameters are [experts, inputs, outputs]; others' are [experts, outputs, inputs]."""


@dataclass(frozen=True)
class TensorUpdate:
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

    def array(self, adapters: Adapters) -> np.ndarray:
        """Computes it."""
        a, b = adapters.read_pair(self.down, self.up)
        # A is stacked expert by expert; in B the expert is the inner dimension of the second one.
        a, b = a.reshape(self.experts, -1, a.shape[1]), b.reshape(len(b), -1, self.experts)
        if self.expert is not None:
            # Only this expert's factors are multiplied, not those of all experts for each of its tensors.
            a, b = a[self.expert][None], b[..., self.expert][..., None]
        if self.part is not None:
            b = np.split(b, 2)[self.part]
        order = "eio" if self.inputs_first else "eoi"
        update = adapters.scale(self.module, a.shape[1]) * np.einsum(f"ore,eri->{order}", b, a, optimize=True)
        return update if self.expert is None else update[0]


@dataclass(frozen=True)
class _Layer:
    """Experts of a layer of the base model."""

    names: tuple[str, str]
    """transformers' names of both parameters."""
    tensors: tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]
    """The tensors of each in the files, with their names."""
    experts: int


def updates_of(
    adapters: Adapters, selection: Selection, shapes: Mapping[str, tuple[int, ...]], model_type: str, num_layers: int
) -> dict[str, TensorUpdate]:
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
    layers, updates, found = _layers_of(selection), dict[str, TensorUpdate](), dict[int, str]()
    for module, given in adapters.experts.items():
        layer = layers.get(_number(module))
        if layer is None:
            raise UserError(f"{file} adapts {module}, but the base model {adapters.base} has no experts there")
        # The same layer under two names: which of the adapters applies would depend on the order in the file.
        if (other := found.setdefault(_number(module), module)) != module:
            raise UserError(
                f"{file} adapts {other} and {module}, but the base model {adapters.base} has one module of experts in "
                "that layer: save the file again"
            )
        # The tensors' names don't say which parameter they adapt, only how often the module is wrapped:
        # target_parameters does.
        kinds = [kind for kind, name in enumerate(layer.names) if _is_wanted(f"{module}.{name}", wanted)]
        if len(kinds) != len(given):
            named = " and ".join(layer.names[kind] for kind in kinds) or "none of its parameters"
            raise UserError(
                f"{file} has {len(given)} adapter{'' if len(given) == 1 else 's'} of {module}, but target_parameters "
                f"in {adapters.path} names {named}: correct target_parameters, or save the file again"
            )
        # The first parameter is wrapped first, and so most deeply.
        for kind, depth in zip(kinds, sorted(given, reverse=True), strict=True):
            a, b = given[depth]["A"], given[depth]["B"]
            for name, tensor in layer.tensors[kind]:
                # Files may have gate and up apart, where transformers has one parameter with one adapter.
                part = tensor.part[1] if tensor.part else None
                update = TensorUpdate(
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


def _check_shapes(adapters: Adapters, update: TensorUpdate, file: Path, of: tuple[int, ...]) -> None:
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
    adapters: Adapters, layers: Mapping[int, _Layer], wanted: Sequence[str], file: Path, num_layers: int
) -> None:
    """Checks that every layer has the adapters that target_parameters names."""
    if wanted and layers and not adapters.experts:
        raise UserError(
            f"{file} has no adapter of experts, which target_parameters of {adapters.path} names: the file is "
            "incomplete, save it again"
        )
    module = next(iter(adapters.experts), "")
    for number, layer in layers.items():
        of_expert = re.sub(r"\.\d+\.", f".{number}.", module, count=1)
        lacking = [name for name in layer.names if _is_wanted(f"{of_expert}.{name}", wanted)]
        if number < num_layers and lacking and of_expert not in adapters.experts:
            raise UserError(
                f"{file} has no adapter of {of_expert}.{lacking[0]}, which target_parameters of {adapters.path} names: "
                "the file is incomplete, save it again"
            )
