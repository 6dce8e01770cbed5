"""Reads a folder that `peft` wrote: the weights of its base model with the adapters (LoRA) merged into them."""

import re
from functools import cached_property
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Model
from mtjax.config.sizes import decoder_layers
from mtjax.convert.hub import local_folder
from mtjax.convert.hugging_face import FolderTensors, HuggingFaceSource, describe
from mtjax.convert.peft import IS_TRANSPOSED, PREFIX, TENSORS
from mtjax.convert.peft_config import FACTORS, Adapter, check_expression, check_names, is_named, matching, unread
from mtjax.convert.peft_copies import join_copies
from mtjax.convert.safetensors_files import SafetensorsReader
from mtjax.convert.stream import check_folder, looks_like
from mtjax.convert.table import Table
from mtjax.convert.weights_path import ADAPTER_CONFIG
from mtjax.data.tokens.folder import tokenizer_files, tokenizer_of
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
        if not (folder / TENSORS).is_file():
            raise UserError(
                f"{folder} has no {TENSORS}: save the adapters with peft's save_pretrained, which writes it"
            )
        try:
            self._file = require("safetensors", "convert").safe_open(folder / TENSORS, framework="np")
        except Exception as e:  # the library's exception class is not public
            raise UserError(f"{folder / TENSORS} can't be read as safetensors; it may be incomplete: {e}") from e
        self.modules: dict[str, Adapter] = {}
        self.joined: tuple[str, ...] = ()
        self.full: dict[str, str] = {}
        for name in self._file.keys():  # noqa: SIM118 (it is not a dict)
            self._sort(name)
        for module, adapter in self.modules.items():
            if lacking := sorted({"down", "up"} - set(adapter.names)):
                raise UserError(f"{folder / TENSORS} has no lora_{'AB'['du'.index(lacking[0][0])]} of {module}")
        if not self.modules and not self.full:
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
        for name in (*self.full.values(), *(name for each in self.modules.values() for name in each.names.values())):
            if (dtype := self._file.get_slice(name).get_dtype()) not in DTYPES:
                raise UserError(f"{source}: {name} has dtype {dtype}, but must have {', '.join(DTYPES)}")
        is_dora = bool(self.config.get("use_dora"))
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
        own = name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        end = next((end for end in FACTORS if own.endswith(f".{end}")), None)
        if end is not None:
            self.modules.setdefault(own.removesuffix(f".{end}"), Adapter()).names[FACTORS[end]] = name
        elif re.search(r"\.(lora_|trainable_tokens)", own):
            raise UserError(f"{self.path.parent / TENSORS} has {name}, which mtjax does not read")
        else:
            self.full[own] = name

    @cached_property
    def base(self) -> Path:
        """The folder of the base model, downloaded if it is on the hub.

        Raises:
          UserError: it is not named, is not a Hugging Face folder, or can't be downloaded.
        """
        name, revision = self.config.get("base_model_name_or_path"), self.config.get("revision")
        if not name or not isinstance(name, str):
            raise UserError(f"{self.path} does not name the base model: set base_model_name_or_path to its folder")
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

    def scale(self, module: str, rank: int) -> float:
        """Returns the factor of `up down`.

        Raises:
          UserError: the config has another rank.
        """
        ranks, alphas = (self._pattern(key) for key in ("rank_pattern", "alpha_pattern"))
        expected = matching(ranks, module, self.config.get("r"))
        if expected != rank:
            raise UserError(f"the adapter of {module} has rank {rank}, but {self.path} says {expected!r}")
        alpha = matching(alphas, module, self.config.get("lora_alpha"))
        if type(alpha) not in (int, float) or not isfinite(alpha):
            raise UserError(f"{self.path}: lora_alpha of {module} is {alpha!r}, and must be a number")
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


class AdaptedTensors(FolderTensors):
    """The tensors of the base model with the adapters merged into them, in float32."""

    def __init__(
        self,
        reader: SafetensorsReader,
        table: Table,
        model_type: str,
        adapters: Adapters,
        model: Model,
        ignored: tuple[str, ...],
    ) -> None:
        """Checks the adapters' names and shapes against the base model's.

        Args:
          reader: the base model's files.
          table: of its family.
          model_type: its type.
          adapters: the adapters.
          model: the base model.
          ignored: regular expressions of tensors in the files that the model does not read.

        Raises:
          UserError: they do not fit.
        """
        super().__init__(reader, table)
        self._outputs, self._table_copies = frozenset(table.copies), table.copies
        self._adapters, self._is_transposed = adapters, model_type in IS_TRANSPOSED
        self._full = {self._own_name(name, table): name for name in adapters.full}
        self._modules = {self._own_name(f"{module}.weight", table): module for module in adapters.modules}
        source = adapters.path.parent / TENSORS
        unknown = [name for name in self._modules if name not in self.shapes]
        unknown += [name for name in self._full if name not in {*self.shapes, *table.copies}]
        if unknown:
            raise UserError(
                f"{source} adapts {', '.join(sorted(unknown)[:4])}{' ...' if len(unknown) > 4 else ''}, which the base "
                f"model {adapters.base} does not have"
            )
        tied = {name for copy, name in table.copies.items() if not {copy} & {*self.shapes, *self._full}}
        both = sorted(tied & {*self._modules, *self._full})
        if both and not adapters.config.get("ensure_weight_tying"):
            raise UserError(
                f"{source} changes {both[0]}, to which the base model ties its output, which peft leaves as it is: "
                "save the base model untied (tie_word_embeddings false, with a tensor of the output), and name that one"
            )
        self._check_layers()
        for own, name in self._full.items():
            of = self.shapes.get(own, self.shapes[table.copies.get(own, own)])
            self._check(source, own, adapters.shape(adapters.full[name]), of)
            self.shapes = {**self.shapes, own: of}
            self._names.setdefault(own, own)
        for own, module in self._modules.items():
            names, of = adapters.modules[module].names, self.shapes[own]
            down, up = adapters.shape(names["down"]), adapters.shape(names["up"])
            of = of[::-1] if self._is_turned(own) else of
            self._check(source, own, (up[0], down[1]), of)
            adapters.scale(module, down[0])
        self._check_complete(source, model, ignored)

    @property
    def dtype(self) -> str:
        """The dtype of merged weights."""
        return "float32"

    def _own_name(self, name: str, table: Table) -> str:
        """Returns the name in the files of a tensor in memory: the modules of some types are renamed when loaded."""
        renamed = table.prefix + name.removeprefix("model.")
        return renamed if name not in self.shapes and renamed in self.shapes else name

    def _check_layers(self) -> None:
        """Checks that only layers have adapters that the config says.

        Raises:
          UserError: another layer has one.
        """
        for module in self._modules.values():
            if not self._is_in_layers(module):
                layers = self._adapters.config["layers_to_transform"]
                raise UserError(f"{self._adapters.path}: layers_to_transform is {layers}, but {module} has an adapter")

    def _is_in_layers(self, module: str) -> bool:
        """Returns whether layers_to_transform has the layer of a module, or does not say."""
        layers = self._adapters.config.get("layers_to_transform")
        allowed = None if layers is None or layers == [] else layers if isinstance(layers, list) else [layers]
        number = _layer_of(module)
        return allowed is None or number is None or number in allowed

    def _check_complete(self, source: Path, model: Model, ignored: tuple[str, ...]) -> None:
        """Checks that the file has the modules that the config names, as far as the base model's files have them.

        `target_modules` needs those in layers: of poolers and heads, each class of transformers has others.

        Raises:
          UserError: it lacks some (experts excepted, which transformers holds under other names).
        """
        config = self._adapters.config
        targets, others, saved = (config.get(key) for key in ("target_modules", "exclude_modules", "modules_to_save"))
        matrices = [name for name, shape in self.shapes.items() if len(shape) == 2 and ".experts." not in name]
        modules = [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]
        changed = {name.removesuffix(".weight") for name in self._modules}
        modules = [module for module in modules if not module.startswith(self._adapters.joined)]
        modules = [m for m in modules if not any(re.fullmatch(pattern, f"{m}.weight") for pattern in ignored)]
        # In these layers only: transformers has none of multi-token prediction.
        modules = [m for m in modules if (number := _layer_of(m)) is None or number < _layers_beside(m, model)]
        in_layers = [m for m in modules if _layer_of(m) is not None and self._is_in_layers(m)]
        wanted = [m for m in in_layers if is_named(m, targets) and not is_named(m, others)]
        full = {name.rpartition(".")[0] for name in self._full}
        outputs = [name.removesuffix(".weight") for name in self._outputs]
        for key, names in (
            ("target_modules", [module for module in wanted if module not in changed | full]),
            ("modules_to_save", [m for m in dict.fromkeys(modules + outputs) if is_named(m, saved) and m not in full]),
        ):
            if names:
                raise UserError(
                    f"{source} has no tensors of {names[0]}, which {key} of {self._adapters.path} names "
                    f"({len(names)} such module{'' if len(names) == 1 else 's'}): the file is incomplete, save it again"
                )

    def _check(self, source: Path, name: str, shape: tuple[int, ...], of: tuple[int, ...]) -> None:
        if shape == of:
            return
        tables = {*self._outputs, *self._table_copies.values()}
        if name in tables and len(shape) == len(of) == 2 and shape[1] == of[1]:
            raise UserError(
                f"{source}: {name} has {shape[0]} tokens, but that of the base model has {of[0]}: save the base model "
                f"after resize_token_embeddings({shape[0]}), and name that one in {self._adapters.path}"
            )
        raise UserError(f"{source}: {name} is for a tensor of shape {shape}, but the base model's has {of}")

    def _is_turned(self, name: str) -> bool:
        """Returns whether a matrix is [inputs, outputs] in the files; an output is a Linear in every type."""
        is_conv = self._is_transposed and name not in self._outputs
        return is_conv or self._adapters.modules[self._modules[name]].is_of_embedding

    def _is_changed(self, name: str) -> bool:
        return name in self._modules or name in self._full

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Reads a tensor, merged with its adapter; `rank` is 0."""
        if name in self._full:
            base = self._adapters.read(self._adapters.full[self._full[name]])
        else:
            base = super().shard(name, rank).astype(np.float32, copy=False)
        if name not in self._modules:
            return base
        adapter = self._adapters.modules[self._modules[name]]
        down, up = (self._adapters.read(adapter.names[part]) for part in ("down", "up"))
        update = self._adapters.scale(self._modules[name], len(down)) * (up @ down)
        turned = self._is_turned(name)
        merged = base + (update.T if turned else update)
        if "magnitude" in adapter.names:  # DoRA, arXiv 2402.09353: the length of each output's weights
            magnitude = self._adapters.read(adapter.names["magnitude"]).reshape(-1)
            inputs = 0 if turned else 1
            lengths = magnitude / np.linalg.norm(merged, axis=inputs)
            merged *= np.expand_dims(lengths, inputs)
        if not np.isfinite(merged).all():
            raise UserError(f"{self._adapters.path.parent / TENSORS}: {name}, merged with its adapter, is not finite")
        return merged

    def grid(self, name: str) -> Any:
        """Returns the values that a quantized tensor may have, in full size; None for any other."""
        return None if self._is_changed(name) else super().grid(name)

    def stored(self, name: str) -> Any:
        """Returns how a quantized tensor is stored; None for any other."""
        return None if self._is_changed(name) else super().stored(name)


def _layer_of(module: str) -> int | None:
    """Returns the number of a module's layer in its stack; None for one outside of layers."""
    number = re.search(r"\.(\d+)\.", module)
    return None if number is None else int(number[1])


def _layers_beside(module: str, model: Model) -> int:
    """Returns the number of layers of a module's stack, or more: a layer of a hybrid may be two of mtjax."""
    return decoder_layers(model) if module.startswith("decoder.") else model.num_layers


def describe_adapted(folder: Path, vocab_multiple: int | None = None) -> tuple[Adapters, Any]:
    """Reads the settings of a folder of peft, and what `describe` does of its base model.

    Raises:
      UserError: it is not such a folder, the adapters do not fit, or mtjax does not support the model.
    """
    adapters, files = Adapters(folder), tokenizer_files(folder)
    if tokenizer_of(files, folder) is None and (templates := [name for name in files if name.endswith(".jinja")]):
        raise UserError(f"{folder} has {templates[0]}, but no tokenizer: copy that of the base model, {adapters.base}")
    plain = describe(adapters.base, vocab_multiple)
    join_copies(adapters, plain.family.shared(plain.config.model))
    model = plain.config.model
    ignored = plain.family.table_of(model).ignored
    described = describe(
        adapters.base,
        vocab_multiple,
        lambda reader, family: AdaptedTensors(reader, family.table, family.model_type, adapters, model, ignored),
    )
    count = len(adapters.modules)
    note = f"{folder}: {count} adapter{'' if count == 1 else 's'}, merged into the weights of {adapters.base}"
    return adapters, described._replace(notes=(note, *described.notes))


class PeftSource(HuggingFaceSource):
    """Weights in a Hugging Face folder with adapters in another one, which names it."""

    def __init__(self, folder: Path, vocab_multiple: int | None = None) -> None:
        """Opens the files of both folders, and checks every tensor's name and shape.

        Raises:
          UserError: as `describe_adapted`.
        """
        adapters, described = describe_adapted(folder, vocab_multiple)
        has_tokenizer = tokenizer_of(tokenizer_files(folder), folder) is not None
        self._open(adapters.base, described, files=folder if has_tokenizer else adapters.base)
        self.weight_files = (*self.weight_files, adapters.path, folder / TENSORS)
