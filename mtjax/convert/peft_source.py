"""Reads a folder that `peft` wrote: the weights of its base model with the adapters (LoRA) merged into them."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Model
from mtjax.config.sizes import decoder_layers
from mtjax.convert.finite import count_not_finite
from mtjax.convert.hugging_face import FolderTensors, HuggingFaceSource, describe
from mtjax.convert.parameters import parameters_of
from mtjax.convert.peft import IS_TRANSPOSED
from mtjax.convert.peft_adapters import Adapters
from mtjax.convert.peft_config import TENSORS, is_named
from mtjax.convert.peft_copies import join_copies
from mtjax.convert.peft_expert_updates import updates_of
from mtjax.convert.safetensors_files import SafetensorsReader
from mtjax.convert.table import Selection, Table
from mtjax.data.tokens.folder import tokenizer_files, tokenizer_of
from mtjax.errors import UserError


class AdaptedTensors(FolderTensors):
    """The tensors of the base model with the adapters merged into them, in float32."""

    def __init__(
        self,
        reader: SafetensorsReader,
        table: Table,
        model_type: str,
        adapters: Adapters,
        model: Model,
        selection: Selection,
    ) -> None:
        """Checks the adapters' names and shapes against the base model's.

        Args:
          reader: the base model's files.
          table: of its family.
          model_type: its type.
          adapters: the adapters.
          model: the base model.
          selection: the rows of the base model's parameters.

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
        # peft adapts the embedding alone and leaves a tied output as it was, for which mtjax has no second table.
        tied = {name for copy, name in table.copies.items() if not {copy} & {*self.shapes, *self._full}}
        both = sorted(tied & {*self._modules, *self._full})
        if both and not adapters.config.get("ensure_weight_tying"):
            raise UserError(
                f"{source} changes {both[0]}, to which the base model ties its output, which peft leaves as it is: "
                "save the base model untied (tie_word_embeddings false, with a tensor of the output), and name that one"
            )
        self._check_layers()
        for base_name, name in self._full.items():
            # A full output of a tied model makes it untied.
            of = self.shapes.get(base_name, self.shapes[table.copies.get(base_name, base_name)])
            self._check(source, base_name, adapters.shape(adapters.full[name]), of)
            self.shapes = {**self.shapes, base_name: of}
            self._names.setdefault(base_name, base_name)
        for base_name, module in self._modules.items():
            names, of = adapters.modules[module].names, self.shapes[base_name]
            down, up = adapters.shape(names["down"]), adapters.shape(names["up"])
            of = of[::-1] if self._is_turned(base_name) else of
            self._check(source, base_name, (up[0], down[1]), of)
            adapters.scale(module, down[0])
        self._experts = updates_of(adapters, selection, self.shapes, model_type, model.num_layers)
        self._check_complete(source, model, selection.table.ignored)

    @property
    def dtype(self) -> str:
        """The dtype of merged weights."""
        return "float32"

    def _own_name(self, name: str, table: Table) -> str:
        """Returns the name in the files of a tensor in memory: the modules of some types are renamed when loaded."""
        # peft has the names of modules in memory, which for some types are not those of the tensors in the files.
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
        return name in self._modules or name in self._full or name in self._experts

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Reads a tensor, merged with its adapter; `rank` is 0."""
        if name in self._full:
            base = self._adapters.read(self._adapters.full[self._full[name]])
            self._check_finite(name, base)
        else:
            base = super().shard(name, rank).astype(np.float32, copy=False)
        if name in self._experts:
            update = self._experts[name].array(self._adapters)
            merged = base + update
            self._check_finite(name, update, *([merged] if count_not_finite(base) == 0 else []))
            base = merged
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
            self._check_finite(name, magnitude)
        self._check_finite(name, update, *([merged] if count_not_finite(base) == 0 else []))
        return merged

    def _check_finite(self, name: str, *arrays: np.ndarray) -> None:
        """Checks what the adapters' file says of a tensor: what the base model's files have is kept as it is.

        Raises:
          UserError: a number is NaN or infinite.
        """
        if any(count_not_finite(array) for array in arrays):
            raise UserError(
                f"{self._adapters.path.parent / TENSORS}: {name} has NaN or infinities that are not the base "
                "model's: save the adapters of an earlier step"
            )

    def grid(self, name: str) -> Any:
        """Returns the values that a quantized tensor may have, in full size; None for any other."""
        # A merged matrix is no longer on the grid of the quantized one.
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
    # Twice: which tensors the base model shares decides how adapters are read, and its config says that.
    plain = describe(adapters.base, vocab_multiple)
    join_copies(adapters, plain.family.shared(plain.config.model))
    model = plain.config.model
    selection = plain.family.table_of(model).select(parameters_of(plain.config))
    described = describe(
        adapters.base,
        vocab_multiple,
        lambda reader, family: AdaptedTensors(reader, family.table, family.model_type, adapters, model, selection),
    )
    count = len(adapters.modules) + sum(len(wrapped) for wrapped in adapters.experts.values())
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
