"""mtjax's format: weights of a run or of an earlier conversion as a source, and a converted folder as a sink.

A converted folder contains `weights/` (see `mtjax.runtime.checkpoints.weights`), a `config.toml` with the model's
settings, and the tokenizer's files. Every layer of a parameter is written, and can be read, separately.
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
from mtjax.config import Config, Model, sizes
from mtjax.config.adapters import ADAPTER
from mtjax.convert.finite import NotFinite
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.stream import Origin, carry_tokenizer, unpadded_vocab_size
from mtjax.convert.table import SPLIT, with_vocab
from mtjax.data.tokens.folder import tokenizer_of
from mtjax.errors import UserError
from mtjax.runtime.checkpoints.checkpoint import fingerprint_of_slice
from mtjax.runtime.checkpoints.corruption import metadata_checksum
from mtjax.runtime.checkpoints.weights import CONVERTED, PREFIX, find_weights

CONTINUED_BATCH = 32
"""Global batch size of continued training, in samples."""
TOKENS_OF_MICROBATCH = 4096
"""Tokens of a microbatch of continued training, unless one sample has more."""
LARGEST_CHUNK = 64 << 20
"""Largest chunk of an array, in bytes; a device reads the chunks that overlap its shard."""


class MtjaxSource:
    """The weights of a run, a checkpoint or a converted folder, with LoRA adapters merged into them."""

    def __init__(self, folder: Path) -> None:
        """Opens the newest weights in `folder`.

        Raises:
          UserError: there are none, or their names do not match the model in their config.
        """
        self.weights = find_weights(folder)
        saved = self.weights.config
        config = without_adapters(saved)
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        with_adapters = self.parameters if config == saved else parameters_of(saved)
        self.adapters = {n: parameter for n, parameter in with_adapters.items() if n not in self.parameters}
        differing = set(with_adapters) ^ set(self.weights.names)
        if differing:
            raise UserError(
                f"{self.weights.folder} was saved by another version of mtjax: parameters that differ: "
                f"{', '.join(sorted(differing))}"
            )
        origin = self.weights.metadata.get("origin", {})
        self.origin = Origin(
            config,
            origin.get("dtype", "float32"),
            self.weights.root,
            self.weights.hugging_face,
            (f"from {self.weights.folder}",),
            is_run=self.weights.is_run,
            not_finite=NotFinite(str(folder)),
        )

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, float32, with its adapter merged."""
        names = adapter_names(parameter.name)
        if names[1] not in self.adapters:
            yield from self.saved(parameter)
            return
        a, b = (self.adapters[name] for name in names)
        model = self.weights.config.model
        saved = zip(parameter.layers, self.saved(parameter), self.saved(a), self.saved(b), strict=True)
        for layer, weight, *factors in saved:
            # W + (alpha / rank) A B, as in LoRA (arXiv 2106.09685), section 4.1
            update = product_of(parameter, (a, b), factors) * (model.lora_alpha / model.lora_rank)
            # In float64 up to here, so that merging rounds once.
            merged = (weight + update).astype(np.float32)
            self._count_not_finite(parameter, layer, merged)
            yield merged

    def saved(self, parameter: Parameter, prefix: str = PREFIX) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, float32, and verifies the fingerprint of what was saved at the end.

        `prefix` is another one for the optimizer's state.

        Raises:
          UserError: the parameter is corrupted.
        """
        fingerprint, offset, layers = 0, 0, iter(parameter.layers)
        for block in self._blocks(parameter, prefix):
            # The fingerprint is of the numbers as saved, before they are widened and their padding is cut off.
            fingerprint += fingerprint_of_slice(block, offset)
            offset += block.size
            wide = np.asarray(block, np.float32)
            for array in [wide] if parameter.num_layers is None else wide:
                layer, used = next(layers), with_vocab(array, parameter, unpadded_vocab_size(self.origin.config.model))
                if prefix == PREFIX:
                    self._count_not_finite(parameter, layer, used)
                yield used
        if fingerprint % 2**32 != self.weights.metadata["fingerprints"][f"{prefix}.{parameter.name}"]:
            raise UserError(f"{self.weights.folder} is corrupted: {parameter.name} differs from what was saved")

    def _count_not_finite(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Counts the NaN and infinities of a layer's slice, for the note on what has been read."""
        self.origin.not_finite.add(parameter.name if layer is None else f"{parameter.name}[{layer}]", [array])

    def _blocks(self, parameter: Parameter, prefix: str) -> Iterator[np.ndarray]:
        """Yields a stacked parameter in blocks of as many layers as a chunk of the file contains, in the type in which
        it was saved."""
        store = self.weights.open(parameter.name, prefix)
        if store.shape != parameter.stacked_shape:
            raise UserError(
                f"{self.weights.folder}: {parameter.name} has shape {store.shape}, not {parameter.stacked_shape}"
            )
        try:
            if parameter.num_layers is None:
                yield np.asarray(store.read().result())
                return
            shape: Any = store.chunk_layout.read_chunk.shape
            # Chunks are compressed: to read a layer of a chunk with several would decompress it as often as it has
            # layers.
            layers = int(shape[0] or 1)  # 1 if layers are stored in another order
            for first in range(0, parameter.num_layers, layers):
                yield np.asarray(store[first : first + layers].read().result())
        except ValueError as e:
            raise UserError(f"{self.weights.folder} is corrupted: {parameter.name} can't be read: {e}") from e


def adapter_names(weight: str) -> tuple[str, str]:
    """Returns the names of A and B of a weight's adapter, if it has one."""
    module, _, kind = weight.rpartition(".")
    # The parts of Mamba-2's first product share an A.
    first, second = (f"{module}.{ADAPTER}.{matrix}" for matrix in ("a", "b" if kind == "weight" else kind))
    return first, second


def without_adapters(config: Config) -> Config:
    """Returns the config of the same weights with their adapters merged."""
    plain = configs.Model()
    names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    return configs.replace(config, **{name: getattr(plain, name) for name in names})


def product_of(weight: Parameter, names: tuple[Parameter, Parameter], factors: Sequence[np.ndarray]) -> np.ndarray:
    """Returns A B of an adapter, with dimensions in the order of its weight: one layer's slice, float64."""
    letters: dict[str, str] = {}
    terms = [
        "".join(letters.setdefault(axis, string.ascii_letters[len(letters)]) for axis in parameter.axes)
        for parameter in (*names, weight)
    ]
    # The rank is the only dimension in both factors and not in the weight, so einsum contracts it.
    return np.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", *(factor.astype(np.float64) for factor in factors))


class MtjaxSink:
    """Writes a converted folder, layer by layer."""

    def __init__(self, folder: Path, origin: Origin, final: Path) -> None:
        """Starts to write to `folder`, which will be renamed to `final`."""
        self._folder, self._origin, self._final = folder, origin, final
        self._checkpoint = folder / CONVERTED
        self._stores: dict[str, ts.TensorStore] = {}
        self._fingerprints: dict[str, int] = {}

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray, prefix: str = PREFIX) -> None:
        """Writes one layer's slice, with the vocabulary padded; `prefix` is another one for the optimizer's state."""
        rows = sizes.padded_vocab_size(self._origin.config.model)
        array = np.ascontiguousarray(with_vocab(array, parameter, rows), np.float32)
        # Parameters are written one after the other, so one open array is enough.
        name = f"{prefix}.{parameter.name}"
        if name not in self._stores:
            # Only the current one is open.
            self._stores = {name: self._create(name, parameter.stacked_shape, chunk_shape(parameter))}
        store = self._stores[name]
        (store if layer is None else store[layer]).write(array).result()
        # Fingerprints add up over slices, modulo 2^32.
        number = fingerprint_of_slice(array, (layer or 0) * array.size)
        self._fingerprints[name] = (self._fingerprints.get(name, 0) + number) % 2**32

    def close(self) -> None:
        """Writes the metadata, the config and the tokenizer."""
        tables = configs.to_dict(self._origin.config)
        config = {"model": tables["model"]}
        if self._origin.config.finetuning.labels:
            config["finetuning"] = {"labels": tables["finetuning"]["labels"]}
        metadata: dict[str, Any] = {
            "version": 1,
            # No step of a run: training that begins from these weights counts its own.
            "step": 0,
            "consumed_samples": 0,
            "config": config,
            "fingerprints": self._fingerprints,
            "origin": {
                "dtype": self._origin.dtype,
                "hugging_face": dict(self._origin.hugging_face),
                "is_run": self._origin.is_run,
            },
        }
        metadata["checksum"] = metadata_checksum(metadata)
        # A folder without it is not a checkpoint.
        path = self._checkpoint / "page" / "metadata"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(metadata))
        settings: dict[str, Any] = dict(config) | continued_training(self._origin.config.model)
        tokenizer = tokenizer_of(carry_tokenizer(self._origin, self._folder), self._final.resolve())
        if tokenizer:
            settings["data"] = {"tokenizer": tokenizer}
        (self._folder / "config.toml").write_text(tomli_w.dumps(settings))

    def _create(self, name: str, shape: tuple[int, ...], chunks: tuple[int, ...], dtype: Any = np.float32) -> Any:
        """Creates an array, in Orbax's format (zarr, compressed with zstd)."""
        path = self._checkpoint.resolve() / "state" / name
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {"compressor": {"id": "zstd", "level": 1}},  # as Orbax does
        }
        layout = ts.ChunkLayout(chunk_shape=chunks)
        return ts.open(spec, create=True, dtype=ts.dtype(dtype), shape=shape, chunk_layout=layout).result()


def continued_training(model: Model) -> dict[str, dict[str, Any]]:
    """Returns the settings with which `config.toml` continues the training of converted weights.

    mtjax's defaults are those of pretraining from random weights: 300,000 steps of 512 samples in one microbatch.
    """
    # A small power of two divides the samples of most data parallel degrees, also of a smaller global batch.
    size = next(size for size in (4, 2, 1) if size == 1 or size * model.sequence_length <= TOKENS_OF_MICROBATCH)
    return {
        "optimizer": {"learning_rate": 2e-5, "min_learning_rate": 2e-6, "warmup_steps": 50},
        "training": {
            "steps": 1000,
            "global_batch_size": CONTINUED_BATCH,
            "microbatch_size": size,
            "recompute": "selective",
        },
    }


def describe_continued_training(model: Model) -> str:
    """Describes the settings of `continued_training` in a line."""
    tables = continued_training(model)
    optimizer, training = tables["optimizer"], tables["training"]
    return (
        f"config.toml continues training for {training['steps']:,} steps of {training['global_batch_size']} samples, "
        f"{training['microbatch_size']} at a time, at a learning rate of {optimizer['learning_rate']:g} after "
        f"{optimizer['warmup_steps']} steps of warmup: edit it for your data"
    )


def chunk_shape(parameter: Parameter) -> tuple[int, ...]:
    """Returns the shape of chunks: one layer or less, at most LARGEST_CHUNK bytes; splits sharded dimensions first."""
    shape = list(parameter.shape)
    while 4 * prod(shape) > LARGEST_CHUNK:
        sharded = [i for i, axis in enumerate(parameter.axes) if axis in SPLIT and shape[i] > 8]
        at = sharded[0] if sharded else shape.index(max(shape))
        # Halves, so that chunks of a dimension that a power of two shards end where shards do.
        shape[at] = -(-shape[at] // 2)
    return tuple(shape) if parameter.num_layers is None else (1, *shape)
