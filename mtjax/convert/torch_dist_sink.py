"""A checkpoint in the format torch_dist that Megatron-LM loads, of any tensor, pipeline and expert parallel degree."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config.place import MEGATRON_TRACKER
from mtjax.config.sizes import dense_layers
from mtjax.convert.hugging_face import narrowed
from mtjax.convert.megatron import Split, written_names
from mtjax.convert.megatron_arguments import VOCAB_MULTIPLE, arguments_of, ignored_rope
from mtjax.convert.megatron_experts import BIAS, expert_arguments
from mtjax.convert.megatron_files import EXTRA_STATE
from mtjax.convert.megatron_formats import BACKEND, BACKEND_FILE, RELEASE, iteration_folder
from mtjax.convert.megatron_tables import HYBRID, LOCAL, TRANSFORMER_ENGINE, table_of
from mtjax.convert.parameters import Parameter
from mtjax.convert.stream import Origin, carry_tokenizer, unpadded_vocab_size
from mtjax.convert.table import VOCAB, Tensor, name_of, with_vocab
from mtjax.convert.torch_dist import COMMON_FILE, EXPERTS_NORM, LAYERS, MLP_NORM, VERSION
from mtjax.convert.torch_dist_writer import DistributedWriter, write_archive
from mtjax.errors import UserError
from mtjax.runtime.processes.notes import say_notes

_LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)\.")
_LINEAR = re.compile(r"(.*\.(?:linear_(?:qkv|proj|fc1|fc2)|in_proj|out_proj))\.weight(?:\.z)?")
_NORM = re.compile(r"(.*\.(?:[qk]_layernorm|pre_mlp_layernorm|final_(?:layer)?norm))\.weight")


class TorchDistSink:
    """A folder in the format torch_dist; each slice is written at once, as one or more chunks."""

    def __init__(
        self,
        folder: Path,
        origin: Origin,
        parameters: Mapping[str, Parameter],
        impl: str | None,
        dtype: str | None,
        iteration: int | None = None,
    ) -> None:
        """Creates the folder.

        Args:
          folder: to write to, which exists.
          origin: of the weights.
          parameters: of the model.
          impl: Megatron's `--transformer-impl`; Transformer Engine when None.
          dtype: type of the numbers; that of the origin when None.
          iteration: of a run; None for weights that do not come from a run.

        Raises:
          UserError: Megatron-Core has no such model.
        """
        model = origin.config.model
        self._folder, self._origin, self._dtype = folder, origin, dtype or origin.dtype
        self._names = written_names(model, Split(transformer_impl=impl))
        if self._names.is_legacy:
            raise UserError(
                "--ckpt-format torch_dist is Megatron-Core's, and "
                + ("the model is a BERT" if model.family == "bert" else "--transformer-impl is legacy")
                + ": use --ckpt-format torch"
            )
        if model.family == "retro":
            raise UserError("a retro is written in the format torch only: remove --ckpt-format torch_dist")
        # Padded for one tensor-parallel rank: Megatron pads or cuts the table when it loads with other degrees.
        self._rows = -(-unpadded_vocab_size(model) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self._arguments = arguments_of(model, self._names, 1, 1, self._dtype, self._rows)
        self._arguments |= expert_arguments(model, 1, 1, False)
        keys = HYBRID if model.layer_pattern else TRANSFORMER_ENGINE
        self._selection = table_of(model, keys, VERSION, is_distributed=True).select(parameters)
        if note := ignored_rope(model, is_legacy=False):
            say_notes([note])
        # Megatron stacks layers over the model only if all are alike (non_homogeneous_layers).
        self._is_stacked = not dense_layers(model) and not model.layer_pattern
        self._content: dict[str, Any] = {
            "singleton_local_shards": False,
            "non_homogeneous_layers": not self._is_stacked,
        }
        self._word = RELEASE if iteration is None else str(iteration)
        self._checkpoint = folder / iteration_folder(self._word)
        self._writer = DistributedWriter(self._checkpoint)
        self._common: dict[str, Any] = {"iteration": iteration or 0}

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes one layer's slice of a parameter.

        Raises:
          UserError: a number is too large for float16.
        """
        self._write(parameter, layer, array, "", self._dtype)

    def write_state(self, kind: str, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes one layer's slice of the optimizer's state: param, exp_avg or exp_avg_sq."""
        self._write(parameter, layer, array, f"optimizer.state.{kind}.", "float32")

    def _write(self, parameter: Parameter, layer: int | None, array: np.ndarray, prefix: str, dtype: str) -> None:
        sizes = parameter.sizes | {VOCAB: self._rows}
        array = with_vocab(array, parameter, self._rows)
        for tensor in self._selection.tensors_of(parameter, layer):
            name = name_of(tensor, layer)
            if prefix and name.endswith(BIAS):  # not trained by Adam
                continue
            numbers = tensor.extract(array, parameter)
            # Routers' biases remain float32.
            numbers = numbers if name.endswith(BIAS) else narrowed(numbers, dtype, name)
            shape = tensor.shape(sizes)
            key, index, above = self._key(name)
            ones = (1,) * len(index)
            for start, rows in _boxes(tensor, numbers, shape, sizes):
                offsets = (*index, start, *(0 for _ in shape[1:]))
                self._writer.chunk(f"{prefix}{key}", (*above, *shape), offsets, rows.reshape(*ones, *rows.shape))

    def add(self, arguments: Mapping[str, Any], common: Mapping[str, Any], content: Mapping[str, Any]) -> None:
        """Adds to Megatron's arguments, to the common state, and to the description of the content."""
        self._arguments |= arguments
        self._common |= common
        self._content |= content

    def close(self) -> None:
        """Writes the objects, the common state, the list of the chunks, the tracker file and the tokenizer."""
        for module in self._modules_with_state():
            key, index, above = self._key(f"{module}.")
            part, of = (".".join(map(str, numbers)) for numbers in ((index, above) if index else ((0,), (1,))))
            # The key of Megatron's sharded objects: NAME/shard_INDEX_COUNT.
            self._writer.object(f"{key}{EXTRA_STATE}/shard_{part}_{of}", [None])
        self._writer.close()
        folder = self._checkpoint
        common = {
            "args": argparse.Namespace(**self._arguments),
            "checkpoint_version": VERSION,
            "content_metadata": self._content,
            **self._common,
        }
        with (folder / COMMON_FILE).open("wb") as file:
            write_archive(file, common, root="common")
        backends = {f"{kind}_backend": name for kind, name in (("sharded", BACKEND), ("common", "torch"))}
        versions = {f"{kind}_backend_version": 1 for kind in ("sharded", "common")}
        (folder / BACKEND_FILE).write_text(json.dumps(backends | versions))
        (self._folder / MEGATRON_TRACKER).write_text(self._word)
        carry_tokenizer(self._origin, self._folder)

    def _modules_with_state(self) -> Iterator[str]:
        """Yields the modules whose `_extra_state`, here an empty one, Megatron requires in a checkpoint."""
        if self._names is HYBRID:
            yield "output_layer"
        for name in self._selection.shapes(self._rows):
            if match := _LINEAR.fullmatch(name):
                yield match[1]
            if self._names is not LOCAL:  # in which attention and separate norms have one too
                if match := _NORM.fullmatch(name):
                    yield match[1]
                if name.endswith(".linear_qkv.weight"):
                    yield name.replace("linear_qkv.weight", "core_attention")

    def _key(self, name: str) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Returns the key of a tensor, the tensor's index in the first dimensions, and the sizes of these."""
        model, index, above = self._origin.config.model, (), ()
        if self._is_stacked and (match := _LAYER.match(name)):
            index, above, name = (int(match[1]),), (model.num_layers,), name.replace(match[0], LAYERS, 1)
        if match := _EXPERT.search(name):
            index, above = (*index, int(match[1])), (*above, model.num_experts)
            name = name.replace(match[0], ".mlp.experts.experts.")
        if self._names is not LOCAL:
            return name, index, above
        return name.replace(EXPERTS_NORM, MLP_NORM), index, above


def _boxes(
    tensor: Tensor, numbers: np.ndarray, shape: tuple[int, ...], sizes: Mapping[str, int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields boxes of a tensor's numbers, and the row at which each begins in the tensor that it is a part of."""
    if tensor.slots is None:
        yield 0, numbers
        return
    # The rows of one kind of heads are not contiguous in the tensor: a chunk for each group.
    width = int(np.prod([sizes[axis] for axis in tensor.dims[0][1:]]))
    group, count = tensor.slots.of * width, tensor.slots.count * width
    for i in range(shape[0] // group):
        yield i * group + tensor.slots.first * width, numbers[i * count : (i + 1) * count]
