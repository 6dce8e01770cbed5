"""Hugging Face folders (config.json, safetensors files and a tokenizer) as a source and as a sink."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mtjax.config import Config, replace
from mtjax.config.families import is_decoder
from mtjax.config.storage import Storage
from mtjax.convert.finite import are_equal
from mtjax.convert.model_types.family import QUANTIZED, ModelType, begin_of_text, labels_json, tensors_without
from mtjax.convert.model_types.registry import family_of_config, family_of_model
from mtjax.convert.named import NamedWeights
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.safetensors_files import DTYPES, LARGEST_FILE, SafetensorsReader, SafetensorsWriter
from mtjax.convert.stream import (
    Origin,
    carry_files,
    check_folder,
    config_of,
    looks_like,
    understood,
    unpadded_vocab_size,
)
from mtjax.convert.table import Table, name_of
from mtjax.convert.weights_path import ADAPTER_CONFIG
from mtjax.data.tokens.folder import GENERATION_CONFIG
from mtjax.data.tokens.pretrained_settings import TOKEN_IDS, ids_in
from mtjax.data.tokens.special_tokens import added_tokens, named_token
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError, parse_json_object
from mtjax.runtime.checkpoints.weights import special_ids

if TYPE_CHECKING:
    from mtjax.convert.compress import Quantization
    from mtjax.convert.compressed import Stored
    from mtjax.convert.kept_grids import GridSource
    from mtjax.models.weight_grid import Grid

_OLD_NAMES = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Endings of the names of layer norms in BERT's first checkpoints, and the current ones."""


SPECIAL_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
"""Keys of transformers' tokenizer_config.json -> BERT's special tokens."""


class HuggingFaceSource:
    """Weights in a folder that `save_pretrained` wrote, or that was downloaded."""

    def __init__(self, folder: Path, vocab_multiple: int | None = None) -> None:
        """Opens the files and checks every tensor's name and shape against the config.

        Raises:
          UserError: it is not such a folder, mtjax does not support the model, or tensors are missing, unexpected or of
            another shape (lists all of them).
        """
        self._open(folder, describe(folder, vocab_multiple), folder)

    def _open(self, folder: Path, described: "Described", files: Path) -> None:
        """Checks the tensors of a folder; `files` is the folder with the tokenizer."""
        raw, family, tensors, config, notes = described
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        selection = family.table_of(config.model).select(self.parameters)
        self._weights = NamedWeights(selection, tensors, config, unpadded_vocab_size(config.model), str(folder))
        tensors.check_floats()
        # After all checks of names and shapes, which report everything at once.
        fresh = self._weights.fresh_modules
        if fresh:
            notes += (f"not in {folder}, and therefore randomly initialized: {', '.join(fresh)}",)
        self.origin = Origin(
            config,
            tensors.dtype,
            files,
            raw,
            notes,
            self._weights.fresh,
            not_finite=self._weights.not_finite,
            generation=folder / GENERATION_CONFIG,
        )
        self.weight_files = (folder / "config.json", *sorted(folder.glob("*.safetensors")))

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, in the files' dtype."""
        return self._weights.slices(parameter)

    def quantized(self, storage: Storage) -> "list[GridSource]":
        """Returns sources of the scales, and perhaps the zero points, of matrices that the folder has quantized.

        Raises:
          UserError: `storage` would round quantized matrices again, to other numbers.
        """
        from mtjax.convert.kept_grids import kept_grids

        return kept_grids(self._weights, storage, self.origin)


class Described(NamedTuple):
    """A folder of Hugging Face's weights."""

    raw: dict[str, Any]
    """Its config.json."""
    family: ModelType
    tensors: "FolderTensors"
    config: Config
    notes: tuple[str, ...]
    """Notes for the user."""


def describe(
    folder: Path,
    vocab_multiple: int | None = None,
    tensors_of: "Callable[[SafetensorsReader, ModelType], FolderTensors] | None" = None,
) -> Described:
    """Reads the config.json of a folder, and the names and shapes of its tensors.

    Args:
      folder: the folder.
      vocab_multiple: the vocabulary is padded to a multiple of it.
      tensors_of: makes the tensors that are read from those of the files; the same when None.

    Raises:
      UserError: it is not such a folder, or mtjax does not support the model.
    """
    raw, source = read_config(folder), str(folder / "config.json")
    # transformers loads the adapters without being asked; to read the model alone would give other numbers.
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(
            f"{folder} has a model and adapters ({ADAPTER_CONFIG}), which transformers loads on top of the base model "
            "that they name: move one of the two to another folder"
        )
    family = family_of_config(raw, source)
    reader = SafetensorsReader(folder)
    tensors = tensors_of(reader, family) if tensors_of else FolderTensors(reader, family.table)
    for key in TOKEN_IDS:
        # Checked here for its errors alone: the ids are read when the tokenizer is opened, after the weights.
        ids_in(raw, key, folder / "config.json")
    with family.naming_keys(raw), understood(source):
        settings = family.model_settings(raw, frozenset(tensors.shapes), source)
    if vocab_multiple:
        settings["vocab_multiple"] = vocab_multiple
    # transformers ties the two, and would lose the second tensor.
    untied = family.unties and settings.get("tie_embeddings") and tensors.other_copy(family.table)
    notes = (f"{folder} has {untied}, which the config.json ties but is another tensor: not tied",) if untied else ()
    if untied:
        settings["tie_embeddings"] = False
    with family.naming_keys(raw):
        config = config_of(settings, source)
    tensors.ignore(family.table_of(config.model).ignored)
    # transformers has no layers of multi-token prediction, and drops them when it saves, but keeps the key.
    count = family.renamed(raw)[0].get("num_nextn_predict_layers") or 0
    if count != config.model.mtp_num_layers:
        notes += (f"num_nextn_predict_layers is {count}, and {folder} has no such layers: none are read",)
    # JSON's keys are strings: "10" sorts before "2".
    names = raw.get("id2label")
    if config.model.head == "classification" and isinstance(names, dict):
        config = replace(config, labels=tuple(str(names[key]) for key in sorted(names, key=int)))
    return Described(raw, family, tensors, config, notes)


class FolderTensors:
    """A folder's tensors by the names in the tables: adds the prefix of a bare model, and replaces old names."""

    ranks = 1

    def __init__(self, reader: SafetensorsReader, table: Table) -> None:
        self._reader = reader
        # A bare model (AutoModel) is saved without the prefix of the model in a class with a head.
        added = table.prefix if tensors_without(reader.shapes, table.prefix) else ""
        # The output has no prefix.
        self._names = {("" if name in table.copies else added) + _new_name(name): name for name in reader.shapes}
        for copy, name in table.copies.items():
            # A tied table may be saved under the other name alone.
            if copy in self._names and name not in self._names:
                self._names[name] = self._names.pop(copy)
        self.shapes: Mapping[str, tuple[int, ...]] = {new: reader.shapes[old] for new, old in self._names.items()}

    @property
    def dtype(self) -> str:
        """The dtype that represents every weight exactly."""
        return self._reader.dtype

    def ignore(self, patterns: Iterable[str]) -> None:
        """Leaves tensors out of `dtype` whose names match a regular expression: they are not weights."""
        found = {name for name in self.shapes if any(re.fullmatch(pattern, name) for pattern in patterns)}
        self._reader.ignore({self._names[name] for name in found})

    def check_floats(self) -> None:
        """Checks that all weights are floating-point numbers, as `SafetensorsReader.check_floats`."""
        self._reader.check_floats()

    def shard(self, name: str, rank: int) -> np.ndarray:
        """Reads a tensor; `rank` is 0."""
        return self._reader.read(self._names[name])

    def grid(self, name: str) -> "Grid | None":
        """Returns the values that a quantized tensor may have, in full size; None for any other."""
        return self._reader.grid(self._names[name])

    def stored(self, name: str) -> "Stored | None":
        """Returns how a quantized tensor is stored; None for any other."""
        return self._reader.compressed.get(self._names[name])

    def other_copy(self, table: Table) -> str | None:
        """Returns a tensor that may be saved as a copy of the embedding, but differs from it; None if there is none."""
        for copy, name in table.copies.items():
            both = copy in self._names and name in self._names
            if both and not are_equal(self.shard(copy, 0), self.shard(name, 0)):
                return copy
        return None


def _new_name(name: str) -> str:
    for pattern, new in _OLD_NAMES:
        name = re.sub(pattern, new, name)
    return name


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the config.json of a folder.

    Raises:
      UserError: it is missing, or is not a JSON object.
    """
    check_folder(folder, "hf")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} is not a Hugging Face model: it has no config.json{looks_like(folder)}")
    return parse_json_object(path.read_bytes(), path)


class HuggingFaceSink:
    """Writes a folder that `from_pretrained` loads."""

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        parameters: Mapping[str, Parameter],
        dtype: str | None = None,
        largest_file: int = LARGEST_FILE,
        compression: "Quantization | None" = None,
    ) -> None:
        """Creates the files at their full size; `compression` says how matrices are quantized, if they are.

        Raises:
          UserError: no model of transformers that mtjax writes has this architecture, or it can't be quantized.
        """
        self._folder, self._origin = folder, origin
        self._dtype = dtype or origin.dtype
        model, original = origin.config.model, origin.hugging_face.get("model_type")
        self._family = family_of_model(model, original)
        self._selection = self._family.table_of(model).select(parameters)
        shapes = self._selection.shapes(unpadded_vocab_size(origin.config.model))
        copies = self._selection.table.duplicates.items()
        self._copies = {name: [copy for copy, of in copies if of == name] for name in shapes}
        shapes |= {copy: shapes[of] for copy, of in copies}
        others = {}
        self._packed = compression.of(self._selection, model, self._dtype) if compression else None
        if self._packed:
            shapes, others = self._packed.tensors(shapes)
        self._writer = SafetensorsWriter(folder, shapes, self._dtype, largest_file, others)

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes the tensors of one layer's slice of a parameter.

        Raises:
          UserError: a value overflows float16.
        """
        for tensor in self._selection.tensors_of(parameter, layer):
            name = name_of(tensor, layer)
            extracted = tensor.extract(array, parameter)
            # Tensors that will be quantized are narrowed, too: the error for what overflows float16 is the same.
            values = narrowed(extracted, self._dtype, name)
            if self._packed and name in self._packed.scales:
                for part, array_of_part in self._packed.parts(name, extracted).items():
                    self._writer.write(part, array_of_part)
            elif tensor.is_part:
                # Several parameters fill a tensor, each its rows, in whatever order they come.
                into = tensor.view(self._writer.map(name), parameter)
                into[...] = values.reshape(into.shape)
            else:
                for each in (name, *self._copies[name]):
                    self._writer.write(each, values)

    def close(self) -> None:
        """Writes config.json and the tokenizer."""
        self._writer.close()
        # Before config.json, which depends on the tokenizer that was copied.
        names = carry_files(self._origin, self._folder)
        tokenizer = open_tokenizer(str(self._folder / "tokenizer.json")) if "tokenizer.json" in names else None
        if tokenizer is not None and "tokenizer_config.json" not in names:
            text = json.dumps(tokenizer_config(tokenizer), indent=2)
            (self._folder / "tokenizer_config.json").write_text(text + "\n")
        model = self._origin.config.model
        original = self._origin.hugging_face
        if original.get("model_type") != self._family.model_type:
            # Between types of models, only the ids of special tokens have the same meaning.
            original = special_ids(original) or self._special_ids(tokenizer)
        # Keys that the model's settings do not decide, such as ids of tokens, are kept from the original. Those that
        # describe the network are written from the settings: a value of the original might no longer be true.
        # transformers 5 writes dtype, 4 torch_dtype: only the latter is written, which both read.
        dropped = {"dtype", *QUANTIZED, *self._family.keys, *self._family.aliases}
        config = {k: v for k, v in original.items() if k not in dropped} | self._family.config_json(model)
        config |= {"torch_dtype": self._dtype} | (self._packed.config_json() if self._packed else {})
        if model.head != "language" and is_decoder(model):
            has_original = bool(self._origin.hugging_face)
            config["pad_token_id"] = pad_id(config.get("pad_token_id" if has_original else "eos_token_id"), tokenizer)
        if labels := self._origin.config.finetuning.labels:
            config |= labels_json(labels)
        (self._folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    def _special_ids(self, tokenizer: Tokenizer | None) -> dict[str, Any]:
        """Returns the ids of special tokens from the tokenizer and its files, for weights without a config.json."""
        ids = self._family.ids(tokenizer)
        if tokenizer is None or not is_decoder(self._origin.config.model):
            return ids
        # eos is the token that training appended to texts; bos and pad are those that the tokenizer's files name.
        named = {f"{kind}_id": named_token(tokenizer, self._folder, kind) for kind in ("bos_token", "pad_token")}
        return ids | {kind: index for kind, index in named.items() if index is not None}


def pad_id(pad: int | None, tokenizer: Tokenizer | None) -> int | None:
    """Returns the `pad_token_id` of a decoder's classifier, by which transformers finds the last token of a row.

    Args:
      pad: the padding id in the config.json of the original weights, if any; `eos_token_id` without a config.json.
      tokenizer: the tokenizer of the rows.
    """
    ends = added_tokens(tokenizer).back[-1:] if tokenizer else []
    # transformers classifies by the last token of a row that is not padding. If the tokenizer ends each text with that
    # very token, the one before it would be taken. With None, transformers takes the last token of a single row, and
    # refuses a batch of several.
    return None if pad in ends else pad


def narrowed(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Casts an array to a dtype that may be narrower.

    Raises:
      UserError: a value overflows float16.
    """
    # An overflow gives infinity, which is reported below with the tensor's name.
    with np.errstate(over="ignore"):
        cast = array.astype(DTYPES[dtype], copy=False)
    if dtype == "float16" and (too_large := np.isinf(cast) & np.isfinite(array)).any():
        raise UserError(
            f"{name} has values up to {np.abs(array[too_large]).max():g}, which overflow float16: use --dtype bfloat16"
        )
    return cast


def tokenizer_config(tokenizer: Tokenizer) -> dict[str, str]:
    """Returns a tokenizer_config.json, with the special tokens, for a tokenizer that came without one."""
    ids = {kind: tokenizer.special(name) for kind, name in SPECIAL_TOKENS.items()}
    special = {kind: tokenizer.token(index) for kind, index in ids.items() if index is not None}
    begin, end = (tokenizer.token(index) for index in (begin_of_text(tokenizer), tokenizer.eod))
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | (special or {"bos_token": begin, "eos_token": end})
