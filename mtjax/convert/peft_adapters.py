"""The adapters (LoRA) in a folder that `peft` wrote."""

import re
from functools import cached_property, lru_cache
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.convert.hub import local_folder
from mtjax.convert.peft_config import (
    FACTORS,
    OF_EXPERTS,
    PREFIX,
    TENSORS,
    AdapterNames,
    check_expression,
    check_names,
    check_parameters,
    matching,
    unread,
)
from mtjax.convert.stream import check_folder, looks_like
from mtjax.convert.weights_path import ADAPTER_CONFIG
from mtjax.errors import UserError, parse_json_object, require

DTYPES = ("F32", "F16", "BF16")
"""Dtypes of adapters, as safetensors names them."""


class Adapters:
    """The adapters of a folder, and the tensors that replace those of the base model."""

    def __init__(self, folder: Path) -> None:
        """Reads the settings, and the names of the tensors.

        Raises:
          UserError: it is not such a folder, or its adapters are of a kind that is not read.
        """
        check_folder(folder)
        self.path = folder / ADAPTER_CONFIG
        if not self.path.is_file():
            raise UserError(f"{folder} has no {ADAPTER_CONFIG}, which peft writes{looks_like(folder)}")
        self.config = parse_json_object(self.path.read_bytes(), self.path)
        if wrong := unread(self.config):
            raise UserError(f"{self.path} has adapters that mtjax does not read: {'; '.join(wrong)}")
        check_names(self.config, self.path)
        check_parameters(self.config.get("target_parameters"), self.path)
        if not (folder / TENSORS).is_file():
            raise UserError(
                f"{folder} has no {TENSORS}: save the adapters with peft's save_pretrained, which writes it"
            )
        try:
            self._file = require("safetensors", "convert").safe_open(folder / TENSORS, framework="np")
        except Exception as e:  # the library's exception class is not public
            raise UserError(f"{folder / TENSORS} can't be read as safetensors; it may be incomplete: {e}") from e
        self.read_pair = lru_cache(maxsize=1)(self._read_pair)
        """Reads A and B, by their names; keeps the last two, which the tensors of all experts of a layer need."""
        self.modules: dict[str, AdapterNames] = {}
        self.joined: tuple[str, ...] = ()
        self.full: dict[str, str] = {}
        self.experts: dict[str, dict[int, dict[str, str]]] = {}
        """Modules -> how often each of their adapters is wrapped -> names of its A and B."""
        for name in self._file.keys():  # noqa: SIM118 (it is not a dict)
            self._sort(name)
        for module, adapter in self.modules.items():
            if lacking := sorted({"down", "up"} - set(adapter.names)):
                raise UserError(f"{folder / TENSORS} has no lora_{'AB'['du'.index(lacking[0][0])]} of {module}")
        for module, wrapped in self.experts.items():
            for matrices in wrapped.values():
                if lacking := sorted({"A", "B"} - set(matrices)):
                    raise UserError(f"{folder / TENSORS} has no lora_{lacking[0]} of {module}")
        if not self.modules and not self.full and not self.experts:
            raise UserError(
                f"{folder / TENSORS} has no tensors: save the adapters again, under DeepSpeed ZeRO-3 with the "
                "parameters gathered"
            )
        self._check_tensors(folder / TENSORS)

    def _check_tensors(self, source: Path) -> None:
        """Checks dtypes and shapes of the tensors, and that the config says which adapters have magnitudes.

        Raises:
          UserError: a tensor is not of floating-point numbers, shapes are not those of an adapter, or the config says
            otherwise.
        """
        of_experts = [name for each in self.experts.values() for pair in each.values() for name in pair.values()]
        of_modules = [name for each in self.modules.values() for name in each.names.values()]
        for name in (*self.full.values(), *of_modules, *of_experts):
            if (dtype := self._file.get_slice(name).get_dtype()) not in DTYPES:
                raise UserError(f"{source}: {name} has dtype {dtype}, but must have {', '.join(DTYPES)}")
        is_dora = bool(self.config.get("use_dora"))
        for key in ("use_dora", "fan_in_fan_out"):
            if self.config.get(key) and self.experts:
                raise UserError(
                    f"{self.path}: {key} is {self.config[key]!r}, which peft does not have with adapters of experts, "
                    f"but {source} has one of {next(iter(self.experts))}: set {key} false, or save the adapters again"
                )
        for module, adapter in self.modules.items():
            down, up = (self.shape(adapter.names[part]) for part in ("down", "up"))
            if len(down) != 2 or len(up) != 2 or not down[0] or down[0] != up[1]:
                raise UserError(
                    f"{source}: the adapter of {module} has shapes {down} and {up}, not [rank, inputs] and [outputs, "
                    "rank]"
                )
            if is_dora != ("magnitude" in adapter.names):
                raise UserError(
                    f"{self.path}: use_dora is {self.config.get('use_dora')!r}, but the adapter of {module} in "
                    f"{source} has {'no' if is_dora else 'a'} lora_magnitude_vector"
                )
            if is_dora and prod(size := self.shape(adapter.names["magnitude"])) != up[0]:
                raise UserError(
                    f"{source}: the lora_magnitude_vector of {module} has shape {size}, but its matrix has "
                    f"{up[0]} outputs"
                )

    def _sort(self, name: str) -> None:
        """Finds out what a tensor of the file is.

        Raises:
          UserError: it is of a kind that is not read.
        """
        if not name.startswith(PREFIX):
            raise UserError(f"{self.path.parent / TENSORS} has {name}, which does not start with {PREFIX}")
        if of_experts := OF_EXPERTS.fullmatch(name.removeprefix(PREFIX)):
            module, depth, matrix = of_experts["module"], of_experts["depth"].count("."), of_experts["matrix"]
            self.experts.setdefault(module, {}).setdefault(depth, {})[matrix] = name
            return
        # peft wraps what it adapts or saves; the names of the base model have neither word.
        base_name = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        end = next((end for end in FACTORS if base_name.endswith(f".{end}")), None)
        if end is not None:
            self.modules.setdefault(base_name.removesuffix(f".{end}"), AdapterNames()).names[FACTORS[end]] = name
        # A kind of adapter of another version of peft: to take it for a full weight would lose it.
        elif re.search(r"\.(lora_|trainable_tokens)", base_name):
            raise UserError(f"{self.path.parent / TENSORS} has {name}, which mtjax does not read")
        else:
            self.full[base_name] = name

    @cached_property
    def base(self) -> Path:
        """The folder of the base model, downloaded if it is on the hub.

        Raises:
          UserError: it is not named, is not a Hugging Face folder, or can't be downloaded.
        """
        name, revision = self.config.get("base_model_name_or_path"), self.config.get("revision")
        if not name or not isinstance(name, str):
            raise UserError(f"{self.path} does not name the base model: set base_model_name_or_path to its folder")
        # A folder wins over a model of the same name on the hub, as in transformers.
        path = Path(name).expanduser()
        folder = path if path.exists() else local_folder(Path(f"{name}@{revision}" if revision else name))
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{self.path} names the base model {name}, which is not a folder with a config.json of Hugging Face: "
                "set base_model_name_or_path to one"
            )
        return folder

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor of the file."""
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor of the file, as float32."""
        return np.asarray(self._file.get_tensor(name), np.float32)

    def _read_pair(self, down: str, up: str) -> tuple[np.ndarray, np.ndarray]:
        return self.read(down), self.read(up)

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of `up down`.

        Raises:
          UserError: the config has another rank.
        """
        ranks, alphas = (self._pattern(key) for key in ("rank_pattern", "alpha_pattern"))
        expected = matching(ranks, module, self.config.get("r"))
        # rank_pattern names modules by patterns: another rank shows that one was read differently, and the scale would
        # be wrong.
        if expected != rank:
            raise UserError(f"the adapter of {module} has rank {rank}, but {self.path} says {expected!r}")
        alpha = matching(alphas, module, self.config.get("lora_alpha"))
        if type(alpha) not in (int, float) or not isfinite(alpha):
            raise UserError(f"{self.path}: lora_alpha of {module} is {alpha!r}, and must be a number")
        # arXiv 2312.03732 (rsLoRA), else arXiv 2106.09685.
        return alpha / rank**0.5 if self.config.get("use_rslora") else alpha / rank

    def _pattern(self, key: str) -> dict[str, Any]:
        """Returns rank_pattern or alpha_pattern.

        Raises:
          UserError: it is not an object with numbers, or a name in it is not a regular expression.
        """
        pattern = self.config.get(key) or {}
        if not isinstance(pattern, dict) or any(type(value) not in (int, float) for value in pattern.values()):
            raise UserError(f"{self.path}: {key} is {pattern!r}, and must be an object with numbers")
        for name in pattern:
            check_expression(name, f"{self.path}: {name!r} in {key}")
        return pattern
