"""Our own format: weights of a run or of an earlier conversion as a source, and a converted folder as a sink.

A converted folder has `weights/` (see `mtjax.train.checkpoints.weights`), a `config.toml` that names the model, and
the tokenizer's files. Every layer of a parameter is written, and can be read, on its own.
"""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
import tomli_w

from mtjax import config as configs
from mtjax.config import Config, sizes
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.stream import Origin, carry_tokenizer, rows_of
from mtjax.convert.table import SPLIT, with_vocab
from mtjax.data.tokens.folder import tokenizer_of
from mtjax.errors import UserError
from mtjax.theory.adapters import ADAPTER
from mtjax.train.checkpoints.checkpoint import fingerprint_of_slice
from mtjax.train.checkpoints.corruption import metadata_checksum
from mtjax.train.checkpoints.weights import CONVERTED, PREFIX, find_weights

LARGEST_CHUNK = 64 << 20
"""Bytes of an array that are read at once; a device that holds a part of it reads the chunks that touch the part."""


class MtjaxSource:
    """The weights of a run, a checkpoint or a converted folder; low-rank adapters are merged into them."""

    def __init__(self, folder: Path) -> None:
        """Opens the newest weights in `folder`.

        Raises:
          UserError: there are none, or they are not those of the model that their config describes.
        """
        self.weights = find_weights(folder)
        page = self.weights.metadata
        saved = self.weights.config
        config = without_adapters(saved)
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        every = self.parameters if config == saved else parameters_of(saved)
        self.adapters = {name: parameter for name, parameter in every.items() if name not in self.parameters}
        differing = set(every) ^ set(self.weights.names)
        if differing:
            raise UserError(f"{self.weights.folder} was saved by another version: {', '.join(sorted(differing))}")
        origin = page.get("origin", {})
        self.origin = Origin(
            config,
            origin.get("dtype", "float32"),
            self.weights.root,
            self.weights.hugging_face,
            (f"from {self.weights.folder}",),
            is_run=self.weights.is_run,
        )

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """One layer's slice after the other, float32, merged with its adapter."""
        module, _, kind = parameter.name.rpartition(".")
        names = [f"{module}.{ADAPTER}.{matrix}" for matrix in "ab"]
        if kind != "weight" or names[0] not in self.adapters:
            yield from self.saved(parameter)
            return
        a, b = (self.adapters[name] for name in names)
        model = self.weights.config.model
        for weight, *factors in zip(self.saved(parameter), self.saved(a), self.saved(b), strict=True):
            added = product_of(parameter, (a, b), factors) * (model.lora_alpha / model.lora_rank)
            yield (weight + added).astype(np.float32)

    def saved(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """One layer's slice after the other as it lies there, float32; in the end compares what was read with what was
        saved."""
        fingerprint, offset = 0, 0
        for block in self._blocks(parameter):
            fingerprint += fingerprint_of_slice(block, offset)
            offset += block.size
            for array in [block] if parameter.num_layers is None else block:
                yield with_vocab(array, parameter, rows_of(self.origin.config.model))
        if fingerprint % 2**32 != self.weights.metadata["fingerprints"][f"{PREFIX}.{parameter.name}"]:
            raise UserError(f"{self.weights.folder} is damaged: {parameter.name} is not what was saved")

    def _blocks(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """As many layers at a time as stand together in the file."""
        store = self.weights.open(parameter.name)
        if store.shape != parameter.stacked_shape:
            raise UserError(f"{self.weights.folder}: {parameter.name} is {store.shape}, not {parameter.stacked_shape}")
        try:
            if parameter.num_layers is None:
                yield np.asarray(store.read().result(), np.float32)
                return
            shape: Any = store.chunk_layout.read_chunk.shape
            together = int(shape[0] or 1)  # where layers lie in another order, one by one
            for first in range(0, parameter.num_layers, together):
                yield np.asarray(store[first : first + together].read().result(), np.float32)
        except ValueError as e:
            raise UserError(f"{self.weights.folder} is damaged: {parameter.name} can't be read: {e}") from e


def without_adapters(config: Config) -> Config:
    """The config of the same weights with their adapters merged."""
    plain = configs.Model()
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    return configs.replace(config, **{name: getattr(plain, name) for name in names})


def product_of(weight: Parameter, names: tuple[Parameter, Parameter], factors: Sequence[np.ndarray]) -> np.ndarray:
    """A B of an adapter, with the dimensions of its weight in their order: one layer's slice, float64."""
    letters: dict[str, str] = {}
    terms = [
        "".join(letters.setdefault(axis, string.ascii_letters[len(letters)]) for axis in parameter.axes)
        for parameter in (*names, weight)
    ]
    return np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *(factor.astype(np.float64) for factor in factors))


class MtjaxSink:
    """A converted folder, written layer by layer."""

    def __init__(self, folder: Path, origin: Origin, final: Path) -> None:
        """Begins to write to `folder`, which will be called `final`."""
        self._folder, self._origin, self._final = folder, origin, final
        self._stores: dict[str, ts.TensorStore] = {}
        self._fingerprints: dict[str, int] = {}

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes one layer's slice, with the vocabulary padded."""
        rows = sizes.padded_vocab_size(self._origin.config.model)
        array = np.ascontiguousarray(with_vocab(array, parameter, rows), np.float32)
        if parameter.name not in self._stores:
            self._stores = {parameter.name: self._create(parameter)}  # only the current one is open
        store = self._stores[parameter.name]
        (store if layer is None else store[layer]).write(array).result()
        name = f"{PREFIX}.{parameter.name}"
        number = fingerprint_of_slice(array, (layer or 0) * array.size)
        self._fingerprints[name] = (self._fingerprints.get(name, 0) + number) % 2**32

    def close(self) -> None:
        """Writes the page, the config and the tokenizer."""
        tables = configs.to_dict(self._origin.config)
        kept = {"model": tables["model"]}
        if self._origin.config.finetuning.labels:
            kept["finetuning"] = {"labels": tables["finetuning"]["labels"]}
        page: dict[str, Any] = {
            "version": 1,
            "step": 0,
            "consumed_samples": 0,
            "config": kept,
            "fingerprints": self._fingerprints,
            "origin": {
                "dtype": self._origin.dtype,
                "hugging_face": dict(self._origin.hugging_face),
                "is_run": self._origin.is_run,
            },
        }
        page["checksum"] = metadata_checksum(page)
        path = self._folder / CONVERTED / "page" / "metadata"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(page))
        written: dict[str, Any] = dict(kept)
        tokenizer = tokenizer_of(carry_tokenizer(self._origin, self._folder), self._final.resolve())
        if tokenizer:
            written["data"] = {"tokenizer": tokenizer}
        (self._folder / "config.toml").write_text(tomli_w.dumps(written))

    def _create(self, parameter: Parameter) -> ts.TensorStore:
        path = self._folder.resolve() / CONVERTED / "state" / f"{PREFIX}.{parameter.name}"
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {"compressor": {"id": "zstd", "level": 1}},  # as Orbax does
        }
        chunks = ts.ChunkLayout(chunk_shape=chunk_shape(parameter))
        shape = parameter.stacked_shape
        return ts.open(spec, create=True, dtype=ts.float32, shape=shape, chunk_layout=chunks).result()


def chunk_shape(parameter: Parameter) -> tuple[int, ...]:
    """One layer or less, at most LARGEST_CHUNK; cut first where devices share it."""
    shape = list(parameter.shape)
    while 4 * prod(shape) > LARGEST_CHUNK:
        shared = [i for i, axis in enumerate(parameter.axes) if axis in SPLIT and shape[i] > 8]
        at = shared[0] if shared else shape.index(max(shape))
        shape[at] = -(-shape[at] // 2)
    return tuple(shape) if parameter.num_layers is None else (1, *shape)
