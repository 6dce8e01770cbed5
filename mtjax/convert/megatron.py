"""Megatron-LM checkpoints of GPT, Llama and BERT as a source and as a sink."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mtjax import config as configs
from mtjax.config import Config, Model
from mtjax.config.place import MEGATRON_TRACKER
from mtjax.convert.hugging_face import narrowed
from mtjax.convert.megatron_arguments import VOCAB_MULTIPLE, arguments_of, ignored_rope, model_settings
from mtjax.convert.megatron_experts import BIAS, expert_arguments, number_of, with_number
from mtjax.convert.megatron_files import FILES, MegatronCheckpoint
from mtjax.convert.megatron_formats import RELEASE, checkpoint_folder, is_torch_dist
from mtjax.convert.megatron_tables import (
    HYBRID,
    LEGACY,
    LEGACY_RMS,
    TRANSFORMER_ENGINE,
    WRITTEN,
    MegatronNames,
    names_in,
    table_of,
)
from mtjax.convert.named import NamedWeights, local_shapes
from mtjax.convert.parameters import Parameter, parameters_of
from mtjax.convert.safetensors_files import DTYPES
from mtjax.convert.stream import Origin, carry_tokenizer, config_of, understood, unpadded_vocab_size
from mtjax.convert.table import VOCAB, name_of, with_vocab
from mtjax.convert.torch_dist import TorchDistCheckpoint
from mtjax.data.cache import reserve
from mtjax.errors import UserError, require
from mtjax.runtime.processes.notes import say_notes

Checkpoint = MegatronCheckpoint | TorchDistCheckpoint


def describe(
    folder: Path, vocab_size: int | None, vocab_multiple: int | None, model_config: str | None
) -> tuple[Checkpoint, MegatronNames, int, Config]:
    """Returns a checkpoint, the names of its tensors, its padded vocabulary size, and the config of its model.

    Raises:
      UserError: it is not such a checkpoint, or mtjax does not support the model.
    """
    folder = checkpoint_folder(folder)
    files = TorchDistCheckpoint(folder) if is_torch_dist(folder) else MegatronCheckpoint(folder)
    names = names_in(files.shapes, str(files.folder))
    # The embedding is sharded over the vocabulary: its padded size is the sum over ranks.
    rows = files.ranks * files.shapes[names.words][0] if names.words in files.shapes else None
    if model_config is None:
        with understood(str(files.folder)):
            settings = model_settings(files.arguments, frozenset(files.shapes), str(files.folder))
    else:
        # The config alone: a checkpoint may have no arguments. All names and shapes are compared later.
        settings = dict(vars(configs.load(model_config).model))
    # Order of precedence: --vocab-size, the config, the saved argument, the padded size.
    known = vocab_size or settings.get("vocab_size") or files.arguments.get("vocab_size")
    rows = (
        rows or files.arguments.get("padded_vocab_size") or known or 1
    )  # without an embedding: reported as missing later
    settings["vocab_size"] = known or rows
    if vocab_multiple:
        settings["vocab_multiple"] = vocab_multiple
    if settings["vocab_size"] > rows:
        raise UserError(
            f"vocab_size {settings['vocab_size']} is above the {rows} rows of the embedding in {files.folder}"
        )
    return files, names, rows, config_of(settings, str(files.folder))


class MegatronSource:
    """A checkpoint that Megatron-LM wrote, with any tensor, pipeline and expert parallel degrees."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int | None = None,
        vocab_multiple: int | None = None,
        model_config: str | None = None,
    ) -> None:
        """Opens every file and checks every tensor's name and shape against the saved arguments.

        Args:
          folder: the folder with the tracker file, with `mp_rank_*`, or with `.metadata`.
          vocab_size: size of the vocabulary without padding, which checkpoints may not contain.
          vocab_multiple: mtjax's vocabulary is padded to a multiple of this.
          model_config: a config that describes the model, for a checkpoint without arguments.

        Raises:
          UserError: it is not such a checkpoint, mtjax does not support the model, or tensors are missing, unexpected
            or of another shape (lists all of them).
        """
        files, names, rows, config = describe(folder, vocab_size, vocab_multiple, model_config)
        self.parameters: Mapping[str, Parameter] = parameters_of(config)
        is_distributed = isinstance(files, TorchDistCheckpoint)
        rows_of_model = table_of(config.model, names, files.version, is_distributed=is_distributed)
        selection = rows_of_model.select(self.parameters)
        self.files, self.rows, self.selection = files, rows, selection
        self._weights = NamedWeights(selection, files, config, rows, str(files.folder))
        notes = self._notes(files, config, rows)
        # A config says what the model is; arguments say what Megatron-LM was started with.
        if model_config is None and (note := ignored_rope(config.model, is_legacy=names.is_legacy)):
            notes += (note,)
        self.origin = Origin(
            config, files.dtype, folder, notes=notes, fresh=self._weights.fresh, not_finite=self._weights.not_finite
        )

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, in the files' dtype."""
        return self._weights.slices(parameter)

    def _notes(self, files: Checkpoint, config: Config, rows: int) -> tuple[str, ...]:
        fresh = self._weights.fresh_modules
        notes = [files.summary]
        notes += [f"not in {files.folder}, and therefore randomly initialized: {', '.join(fresh)}"] if fresh else []
        if config.model.vocab_size == rows:
            notes.append(f"vocabulary: {rows} tokens, the padded size; if it has fewer, give --vocab-size")
        return tuple(notes)


@dataclass(frozen=True)
class Split:
    """Parallel degrees and format of a checkpoint that is written."""

    tensor: int = 1
    pipeline: int = 1
    version: float = 3.0
    transformer_impl: str | None = None
    """The implementation by which the tensors are named; None for the default of the current Megatron-LM."""
    expert: int = 1
    """Expert-parallel ranks; parameters other than those of experts are replicated on each."""
    grouped_experts: bool = False
    """Whether the experts of a rank are one module, Megatron's TEGroupedMLP."""


class MegatronSink:
    """Writes a checkpoint that Megatron-LM loads: one file per tensor-parallel rank, stage and expert-parallel rank.

    torch writes a checkpoint in one call, so a rank's tensors are first collected in a memory-mapped file.
    """

    def __init__(
        self, folder: Path, origin: Origin, parameters: Mapping[str, Parameter], split: Split, dtype: str | None
    ) -> None:
        """Creates the memory-mapped files at their full size.

        Raises:
          UserError: Megatron does not support the model, or the degrees do not divide it.
        """
        model = origin.config.model
        self._folder, self._origin, self._split = folder, origin, split
        self._dtype = dtype or origin.dtype
        # Megatron pads the vocabulary to this multiple, so that every rank has the same number of rows.
        multiple = VOCAB_MULTIPLE * split.tensor
        self._rows = -(-unpadded_vocab_size(model) // multiple) * multiple
        self._names = written_names(model, split)
        self._arguments = arguments_of(model, self._names, split.tensor, split.pipeline, self._dtype, self._rows)
        self._arguments |= expert_arguments(model, split.tensor, split.expert, split.grouped_experts)
        check_split(model, split, self._names)
        rows = table_of(model, self._names, split.version, is_grouped=split.grouped_experts)
        self._selection = rows.select(parameters)
        if note := ignored_rope(model, is_legacy=self._names.is_legacy):
            say_notes([note])
        require("torch", "megatron")  # after what can't be converted at all, and before any file
        # With tied embeddings, the last stage has a copy of the embedding to compute logits.
        self._copies = {self._names.words: (self._names.head_copy,)} if model.tie_embeddings else {}
        # Every rank's tensors have the same shapes, for degrees divide all sharded dimensions.
        stages = self._staged(local_shapes(self._selection, self._rows, split.tensor))
        self._collected = {
            (rank, stage, expert): self._collect(f"{rank}-{stage}-{expert}", self._of_rank(shapes, expert))
            for rank in range(split.tensor)
            for stage, shapes in enumerate(stages)
            for expert in range(split.expert)
        }

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes every rank's shard of one layer's slice of a parameter.

        Raises:
          UserError: a value overflows float16.
        """
        # Megatron's padding may be larger or smaller than mtjax's.
        if VOCAB in parameter.axes:
            array = with_vocab(array, parameter, self._rows)
        ranks = self._split.tensor
        for tensor in self._selection.tensors_of(parameter, layer):
            name = name_of(tensor, layer)
            for rank in range(ranks):
                shard = tensor.extract(array, parameter, (rank, ranks))
                if not name.endswith(BIAS):  # routers' biases remain float32
                    shard = narrowed(shard, self._dtype, name)
                files = [tensors for ranks_of, tensors in self._collected.items() if ranks_of[0] == rank]
                # Also to the copy of the embedding, in the files of all expert-parallel ranks that have the tensor.
                for written_name in (name, *self._copies.get(name, ())):
                    for tensors in files:
                        if written_name in tensors:
                            view = tensor.view(tensors[written_name], parameter)
                            view[...] = shard.reshape(view.shape)

    def close(self) -> None:
        """Writes the checkpoint, its tracker file and the tokenizer."""
        torch = require("torch", "megatron")
        for (rank, stage, expert), tensors in self._collected.items():
            suffix = f"_{stage:03}" if self._split.pipeline > 1 else ""
            suffix += f"_{expert:03}" if self._split.expert > 1 else ""
            path = self._folder / RELEASE / f"mp_rank_{rank:02}{suffix}" / FILES[0]
            path.parent.mkdir(parents=True)
            content = {
                "args": argparse.Namespace(**self._arguments),
                "checkpoint_version": self._split.version,
                "iteration": 0,
                "model": self._as_saved(tensors),
            }
            torch.save(content, path)
        # The views keep the memory-mapped files open.
        self._collected.clear()
        for path in self._folder.glob(".collected-*"):
            path.unlink()
        # "release": Megatron then takes the weights alone and begins at iteration 0.
        (self._folder / MEGATRON_TRACKER).write_text(RELEASE)
        carry_tokenizer(self._origin, self._folder)

    def _as_saved(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the state dict of a stage: nested dicts for the legacy code, flat names for Megatron-Core."""
        local = {self._local(name): _as_torch(array) for name, array in tensors.items()}
        return nested(local) if self._names.is_legacy else local

    def _staged(self, shapes: Mapping[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
        """Assigns tensors to pipeline stages: the embeddings to the first, the heads to the last."""
        last = self._split.pipeline - 1
        stages: list[dict[str, tuple[int, ...]]] = [{} for _ in range(last + 1)]
        for name, shape in shapes.items():
            stages[self._stage(name)][name] = shape
        # With one stage, the embedding itself computes the logits. Otherwise the last stage has a copy of it, which
        # Megatron loads from that stage's file.
        if last and self._origin.config.model.tie_embeddings:
            stages[last][self._names.head_copy] = shapes[self._names.words]
        return stages

    def _stage(self, name: str) -> int:
        layer = _layer(name)
        if layer is not None:
            # Layers are divided equally over stages (check_split).
            return layer // (self._origin.config.model.num_layers // self._split.pipeline)
        return 0 if name.startswith(f"{self._names.embedding}.") else self._split.pipeline - 1

    def _local(self, name: str) -> str:
        """Renumbers the layer from the stage's first layer, and the expert from the rank's first expert."""
        layer, layers_per_stage = _layer(name), self._origin.config.model.num_layers // self._split.pipeline
        if (expert := number_of(name)) is not None:
            name = with_number(name, expert % self._experts)
        return name if layer is None else name.replace(f".layers.{layer}.", f".layers.{layer % layers_per_stage}.")

    @property
    def _experts(self) -> int:
        """Number of experts on one rank."""
        return self._origin.config.model.num_experts // self._split.expert

    def _of_rank(self, shapes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, ...]]:
        """Selects the tensors of a stage that an expert-parallel rank has."""
        is_here = lambda expert: expert is None or expert // self._experts == rank  # noqa: E731
        return {name: shape for name, shape in shapes.items() if is_here(number_of(name))}

    def _collect(self, file: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """Returns an array for each tensor, views of a memory-mapped file."""
        dtype = DTYPES[self._dtype]
        path = self._folder / f".collected-{file}"
        size = sum(map(prod, shapes.values()))
        buffer = np.memmap(path, dtype, "w+", shape=(size,))
        # Allocates the file now: a full disk is an error here, not a SIGBUS when a page is written.
        reserve(path)
        views, start = {}, 0
        for name, shape in shapes.items():
            views[name] = buffer[start : start + prod(shape)].reshape(shape)
            start += prod(shape)
            if name.endswith(BIAS):  # float32, whatever the dtype of the file
                views[name] = np.empty(shape, np.float32)
        return views


def check_split(model: Model, split: Split, names: MegatronNames) -> None:
    """Checks that the degrees divide the model, and that it has experts if options need them.

    Raises:
      UserError: they do not, or it has none.
    """
    if model.family == "retro" and split.pipeline > 1:
        raise UserError(f"--pipeline {split.pipeline} does not support a retro, which has no stages: remove it")
    if model.num_layers % split.pipeline:
        raise UserError(f"--pipeline {split.pipeline} does not divide the model's {model.num_layers} layers")
    if split.grouped_experts and not model.num_experts:
        raise UserError("the model has no experts: remove --grouped-experts")
    check_experts(model, split.expert)
    if split.grouped_experts and names.transformer_impl != TRANSFORMER_ENGINE.transformer_impl:
        raise UserError(
            f"--grouped-experts requires --transformer-impl transformer_engine, but it is {names.transformer_impl}: "
            "remove --grouped-experts"
        )


def check_experts(model: Model, ranks: int) -> None:
    """Checks that expert-parallel ranks divide the experts of a model.

    Raises:
      UserError: they do not, or it has none.
    """
    if ranks > 1 and not model.num_experts:
        raise UserError("the model has no experts: remove --expert")
    if model.num_experts % ranks:
        raise UserError(f"--expert {ranks} does not divide the model's {model.num_experts} experts")


def written_names(model: Model, split: Split) -> MegatronNames:
    """Returns the names of tensors in the implementation that a model is written for.

    Raises:
      UserError: the implementation does not have this version of the format.
    """
    is_old = model.family == "bert" or split.version != Split.version
    names = WRITTEN[split.transformer_impl or (LEGACY if is_old else TRANSFORMER_ENGINE).transformer_impl]
    if names is not LEGACY and split.version != Split.version:
        raise UserError(
            f"--checkpoint-version {split.version:g} requires --transformer-impl legacy, but it is "
            f"{split.transformer_impl}: remove --checkpoint-version, or use --transformer-impl legacy"
        )
    if model.layer_pattern and names is TRANSFORMER_ENGINE:
        return HYBRID
    return LEGACY_RMS if names is LEGACY and model.norm == "rmsnorm" else names


def _layer(name: str) -> int | None:
    """Returns the layer number in a tensor's name, if any."""
    _, separator, after = name.partition(".layers.")
    return int(after.partition(".")[0]) if separator else None


def _as_torch(array: np.ndarray) -> Any:
    """Returns a torch tensor that shares the array's memory; numpy has no bfloat16 that torch accepts."""
    torch = require("torch", "megatron")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.asarray(array).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.asarray(array))


def nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Nests dotted names as Megatron does: by module down to the encoder, the pooler, each embedding and each head."""
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        depth = 1 if words[0] != "language_model" else 3 if words[1] == "embedding" else 2
        inner = tree
        for word in words[:depth]:
            inner = inner.setdefault(word, {})
        inner[".".join(words[depth:])] = tensor
    return tree
