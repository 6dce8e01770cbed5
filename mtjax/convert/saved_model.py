"""Saved weights of any format: opened by an option such as `--from`, and read onto any mesh."""

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mtjax.config import Config, Model, Parallel, Training, replace
from mtjax.config.float8 import FLOAT8_SETTINGS
from mtjax.config.sizes import padded_vocab_size
from mtjax.config.storage import Storage
from mtjax.convert import hugging_face, megatron
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.megatron import MegatronSource
from mtjax.convert.mtjax_folder import MtjaxSource, without_adapters
from mtjax.convert.peft_source import PeftSource, describe_adapted
from mtjax.convert.stream import WeightSource, download_command, looks_like, may_be_on_hub
from mtjax.convert.table import with_vocab
from mtjax.convert.torchtitan import TorchtitanSource
from mtjax.convert.weights_path import ADAPTERS, parse_weights
from mtjax.data.progress import BytesProgress
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError
from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import MeshShape, parse_mesh
from mtjax.layout.plan import Plan
from mtjax.layout.stages import PADDING, LayerOrder, order_of
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.checkpoints.weights import check_same_weights, find_weights, restore_weights
from mtjax.runtime.processes.coordination import check_same
from mtjax.runtime.processes.notes import say_notes
from mtjax.sharding.param_specs import dotted
from mtjax.train.folder.tokenizer import check_weights, readable_tokenizer

Tree = Any


@dataclass(frozen=True)
class Hints:
    """Information that a folder may not contain."""

    vocab_multiple: int | None = None
    """Pad the vocabulary to a multiple of this; 1024 if None."""
    vocab_size: int | None = None
    """Size of the vocabulary of a megatron folder, which may contain only the padded size."""
    config: str | None = None
    """A config that describes the model in a megatron folder."""


NO_HINTS = Hints()


def vocab_multiple_for(mesh_shape: MeshShape) -> int:
    """Returns a multiple to which a vocabulary is padded so that the mesh divides it."""
    # 128 as Megatron's --make-vocab-size-divisible-by.
    return math.lcm(128, mesh_shape.degree(TENSOR.rules.vocab))


def without_training(saved: Config, parallel: Parallel, **settings: Any) -> Config:
    """Returns the config with which inference runs saved weights: another mesh, no dropout, no recompute, and no layers
    of multi-token prediction.

    Args:
      saved: config of the run, or of converted weights.
      parallel: the mesh, and how processes find each other.
      settings: other settings to replace, such as compute_dtype and global_batch_size.
    """
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recompute": "none", "rampup_batch_size": None}
    plain |= {"fp8": "none"} | {name: getattr(Training(), name) for name in FLOAT8_SETTINGS}
    plain |= {"unroll_layers": False, "reset_position_ids": False, "reset_attention_mask": False}
    plain |= {"mtp_num_layers": 0, "mtp_loss_scaling_factor": Model().mtp_loss_scaling_factor}
    return replace(dataclasses.replace(saved, parallel=parallel), **(plain | settings))


def for_rows(saved: Config, parallel: Parallel, rows: int, **settings: Any) -> Config:
    """Returns `without_training` with a batch of `rows` rows per data-parallel rank, in microbatches with stages.

    Raises:
      UserError: there are fewer rows than pipeline stages.
    """
    plan = Plan.of(saved, parse_mesh(parallel.mesh))
    stages = plan.stages
    if rows < stages:
        raise UserError(
            f"--rows {rows} is below the {stages} pipeline stages, each of which needs a microbatch: raise --rows to "
            f"{stages} or more"
        )
    # The largest microbatch that divides the rows.
    largest = rows // (2 * stages) if stages > 1 else rows  # at least two microbatches per stage
    return without_training(
        saved,
        parallel,
        global_batch_size=rows * plan.data_degree,
        microbatch_size=next(size for size in range(max(largest, 1), 0, -1) if rows % size == 0),
        **settings,
    )


def model_of(text: str, option: str, hints: Hints = NO_HINTS) -> Model:
    """Returns the model of the weights that an option names, without using a device or reading weights.

    Raises:
      UserError: there are no such weights.
    """
    kind, folder = parse_named(text, option)
    if kind == "hf":
        return hugging_face.describe(folder, hints.vocab_multiple).config.model
    if kind == ADAPTERS:
        return describe_adapted(folder, hints.vocab_multiple)[1].config.model
    if kind == "megatron":
        return megatron.describe(folder, hints.vocab_size, hints.vocab_multiple, hints.config)[-1].model
    if kind == "torchtitan":
        return TorchtitanSource(folder, hints.vocab_multiple, hints.config).origin.config.model
    return without_adapters(find_weights(folder).config).model


def parse_named(text: str, option: str = "--from") -> tuple[str, Path]:
    """Parses the kind and the folder of the weights that an option names.

    Raises:
      UserError: the kind is unknown, or the folder has weights of another kind.
    """
    kind, folder = parse_weights(text)
    suggestion = looks_like(folder).partition("it looks like ")[2]
    if text != f"{kind}:{folder}" and suggestion and not suggestion.startswith(f"{kind}:"):
        raise UserError(f"{text} contains no mtjax weights: use {option} {suggestion}")
    if kind == "mtjax" and not folder.exists() and may_be_on_hub(folder):
        is_id = len(folder.parts) > 1  # other names can't be told from a folder's, and are not downloaded
        hub = (
            f"use {option} hf:{folder}"
            if is_id
            else f"download it with {download_command(folder)}, then use {option} hf:{folder}"
        )
        raise UserError(
            f"{text} contains no mtjax weights: it does not exist; if it is a model on the Hugging Face hub, {hub}"
        )
    return kind, folder


def open_source(kind: str, folder: Path, hints: Hints = NO_HINTS) -> WeightSource:
    """Opens weights of any kind, to be read slice by slice.

    Raises:
      UserError: they are not of this kind, or can't be read.
    """
    if kind == "hf":
        return HuggingFaceSource(folder, hints.vocab_multiple)
    if kind == ADAPTERS:
        return PeftSource(folder, hints.vocab_multiple)
    if kind == "megatron":
        return MegatronSource(folder, hints.vocab_size, hints.vocab_multiple, hints.config)
    if kind == "torchtitan":
        return TorchtitanSource(folder, hints.vocab_multiple, hints.config)
    return MtjaxSource(folder)


@dataclass(frozen=True)
class SavedModel:
    """Saved weights with their config and tokenizer."""

    folder: Path
    source: WeightSource

    @classmethod
    def open(cls, text: str, hints: Hints = NO_HINTS, option: str = "--from") -> "SavedModel":
        """Opens the weights that an option names, and prints notes on them.

        Raises:
          UserError: there are no such weights.
        """
        kind, folder = parse_named(text, option)
        source = open_source(kind, folder, hints)
        if isinstance(source, HuggingFaceSource):  # notes of other kinds are for `mtjax convert`
            say_notes(source.origin.notes)
        return cls(folder, source)

    @property
    def config(self) -> Config:
        """The config of their model; for a run, all of its config."""
        return self.source.origin.config

    def tokenizer(self, named: str | None = None) -> tuple[str, Tokenizer]:
        """Opens the named tokenizer, else the one next to the weights, else the one in the run's config.

        Returns:
          Its name, and the tokenizer.

        Raises:
          UserError: there is none, it has more tokens than the model, or the named one differs from the one that came
            with the weights.
        """
        origin = self.source.origin
        saved = origin.tokenizer
        name = named or saved or origin.config.data.tokenizer
        if name is None:
            raise UserError(f"{self.folder} has no tokenizer: add --tokenizer KIND:PATH")
        tokenizer, size = open_tokenizer(name), origin.config.model.vocab_size
        if named and saved and (saved_tokenizer := readable_tokenizer(saved)):
            check_weights(saved, saved_tokenizer, named, tokenizer)
        if size is not None and tokenizer.vocab_size > size:
            raise UserError(
                f"the tokenizer {name} has {tokenizer.vocab_size} tokens, more than the model's vocabulary of {size}: "
                "use the model's tokenizer"
            )
        return name, tokenizer

    @property
    def identity(self) -> str:
        """A digest that changes with the weights: of the arrays' fingerprints, or of files' names, sizes and times."""
        if isinstance(self.source, MtjaxSource):
            facts: list[Any] = sorted(self.source.weights.metadata["fingerprints"].items())
        else:
            stats = [(name, path.stat()) for name, path in self._files()]
            # Not the content, whose digest (`content`) takes minutes for large weights.
            facts = [(name, s.st_size, s.st_mtime_ns) for name, s in stats]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def content(self) -> str:
        """A digest of the weights' content: of the arrays' fingerprints, or of the files, wherever they are."""
        if isinstance(self.source, MtjaxSource):
            return self.identity
        hashed = hashlib.sha256()
        for name, path in self._files():
            hashed.update(name.encode())
            with path.open("rb") as file:
                hashed.update(hashlib.file_digest(file, "sha256").digest())
        return hashed.hexdigest()

    def _files(self) -> list[tuple[str, Path]]:
        """Returns the files with the weights, and their names within the folder."""
        # A Hugging Face folder may contain unrelated files that change, such as the output of this command.
        if isinstance(self.source, HuggingFaceSource):
            return [(path.name, path) for path in self.source.weight_files if path.is_file()]
        return [(str(p.relative_to(self.folder)), p) for p in sorted(self.folder.glob("**/*")) if p.is_file()]

    def quantized(self, storage: Storage) -> "list[SavedModel]":
        """Returns scales, and perhaps zero points, with which the matrices were quantized, each as a model.

        Raises:
          UserError: they were quantized in another way than `storage` says.
        """
        if storage.weights_dtype is None or not isinstance(self.source, HuggingFaceSource):
            return []
        return [dataclasses.replace(self, source=each) for each in self.source.quantized(storage)]

    def parameters(self, sharded_model: ShardedModel, without: Collection[str] = ()) -> Tree:
        """Reads the weights onto a mesh with the shardings of `sharded_model`.

        Args:
          sharded_model: their model.
          without: modules that foreign weights may lack, and that are not used: they are zeros.

        Raises:
          UserError: they are corrupted, can't be read, or belong to another model.
        """
        target, orders = sharded_model.restore_target, sharded_model.layer_orders
        if isinstance(self.source, MtjaxSource) and not self.source.adapters:
            # Each device reads only its shards; other formats are read parameter by parameter.
            # Layers of multi-token prediction may be left out: their parameters are not read.
            wanted = replace(sharded_model.config, mtp_num_layers=self.config.model.mtp_num_layers)
            check_same_weights(self.source.weights, target, wanted, orders)
            return restore_weights(self.source.weights, target, orders)
        leaves, structure = jax.tree_util.tree_flatten_with_path(target)
        named = {dotted(path): leaf for path, leaf in leaves}
        left_out = {name for name in named if name.partition(".")[0] in without}
        arrays = self.read({name: leaf for name, leaf in named.items() if name not in left_out}, sharded_model)
        arrays |= {
            name: jnp.zeros(named[name].shape, named[name].dtype, device=named[name].sharding) for name in left_out
        }
        return jax.tree_util.tree_unflatten(structure, [arrays[name] for name in named])

    def read(self, targets: Mapping[str, jax.ShapeDtypeStruct], sharded_model: ShardedModel) -> dict[str, jax.Array]:
        """Reads parameters by name, each with the sharding and dtype of its target; learned positions may be truncated.

        Raises:
          UserError: they are corrupted, can't be read, or differ between processes.
        """
        rows, done, arrays = padded_vocab_size(sharded_model.config.model), 0, {}
        hashed = hashlib.sha256()
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in targets.values())
        with BytesProgress("reading weights", total) as progress:
            for name, leaf in targets.items():
                # One parameter at a time on the host, in full: sources are read layer by layer, and devices need shards
                # of all layers.
                array = _stacked(self.source, name, rows, order_of(name, sharded_model.layer_orders)).astype(leaf.dtype)
                # A model may be run with a shorter sequence than it was trained with.
                array = array[: leaf.shape[0]] if name == POSITIONS else array
                hashed.update(array.reshape(-1)[:: max(1, array.size // SAMPLED)].tobytes())
                arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, array.__getitem__)
                done += arrays[name].nbytes
                progress.update(done, done)
        # Before any is used: each process takes its shards from its own files, perhaps on another machine.
        check_same("weights", hashed.hexdigest(), self.folder)
        say_notes(self.source.origin.not_finite.notes)
        return arrays


SAMPLED = 4096
"""Elements of each parameter, at least, that processes compare: other weights differ nearly everywhere."""
POSITIONS = "positions"
"""Name of the parameter of learned position embeddings."""


def _stacked(source: WeightSource, name: str, rows: int, order: LayerOrder | None) -> np.ndarray:
    """Returns a parameter with its layers stacked in `order` and its vocabulary padded to `rows`."""
    parameter = source.parameters[name]
    layers = [with_vocab(np.asarray(array), parameter, rows) for array in source.slices(parameter)]
    if parameter.num_layers is None:
        return layers[0]
    if order is not None:
        # Uneven pipeline stages are padded with layers of zeros.
        layers = [np.zeros_like(layers[0]) if number == PADDING else layers[number] for number in order.flat]
    return np.stack(layers)
