"""A model in one of the formats, on disk: opened by what `--from` says, and read onto any mesh."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtjax.config import Config, Model, Parallel, replace
from mtjax.config.sizes import padded_vocab_size
from mtjax.convert import hugging_face, megatron
from mtjax.convert.hugging_face import HuggingFaceSource
from mtjax.convert.megatron import MegatronSource
from mtjax.convert.mtjax_folder import MtjaxSource, without_adapters
from mtjax.convert.stream import Source, download_command, looks_like, may_be_on_hub
from mtjax.convert.table import with_vocab
from mtjax.convert.weights_path import parse_weights
from mtjax.data.progress import ProgressLine
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.param_specs import dotted
from mtjax.theory.layout import TENSOR
from mtjax.theory.mesh import MeshShape, parse_mesh
from mtjax.theory.plan import Plan
from mtjax.theory.stages import PADDING, LayerOrder, order_of
from mtjax.train.checkpoints.weights import check_same_weights, find_weights, restore_weights
from mtjax.train.folder.tokenizer import check_weights, readable_tokenizer

Tree = Any


@dataclass(frozen=True)
class Hints:
    """What a folder may not say itself."""

    vocab_multiple: int | None = None
    """Pad the vocabulary to a multiple of this; 1024 when None."""
    vocab_size: int | None = None
    """Tokens of the vocabulary in a megatron folder, which may only know the padded number."""
    config: str | None = None
    """A config that describes the model in a megatron folder."""


NO_HINTS = Hints()


def vocab_multiple_for(shape: MeshShape) -> int:
    """A vocabulary padded to a multiple of this divides over the mesh."""
    return math.lcm(128, shape.degree(TENSOR.rules.vocab))


def without_training(saved: Config, parallel: Parallel, **settings: Any) -> Config:
    """The config of weights as tools run their model: on another mesh, without what only training has.

    Args:
      saved: of the run, or of converted weights.
      parallel: the mesh, and how processes find each other.
      settings: others that change, such as the type of products and the size of a batch.
    """
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "recompute": "none", "rampup_batch_size": None}
    plain |= {"unroll_layers": False, "reset_position_ids": False, "reset_attention_mask": False}
    return replace(dataclasses.replace(saved, parallel=parallel), **(plain | settings))


def for_rows(saved: Config, parallel: Parallel, rows: int, **settings: Any) -> Config:
    """`without_training`, for so many rows that each data rank reads at once; on stages cut into microbatches.

    Raises:
      UserError: there are fewer rows than stages.
    """
    plan = Plan.of(saved, parse_mesh(parallel.mesh))
    stages = plan.stages
    if rows < stages:
        raise UserError(f"--rows {rows} is below the {stages} stages, which work on different rows: take more")
    largest = rows // (2 * stages) if stages > 1 else rows  # two turns a stage, or more
    return without_training(
        saved,
        parallel,
        global_batch_size=rows * plan.data_degree,
        microbatch_size=next(size for size in range(max(largest, 1), 0, -1) if rows % size == 0),
        **settings,
    )


def model_of(text: str, option: str, hints: Hints = NO_HINTS) -> Model:
    """The model of the weights that an option names, by what they say of it: no device is touched, no weight is read.

    Raises:
      UserError: there are no such weights.
    """
    kind, folder = parse_named(text, option)
    if kind == "hf":
        return hugging_face.describe(folder, hints.vocab_multiple)[-1].model
    if kind == "megatron":
        return megatron.describe(folder, hints.vocab_size, hints.vocab_multiple, hints.config)[-1].model
    return without_adapters(find_weights(folder).config).model


def parse_named(text: str, option: str = "--from") -> tuple[str, Path]:
    """The kind and the folder of the weights that an option names.

    Raises:
      UserError: there is no such kind, or the folder has weights of another.
    """
    kind, folder = parse_weights(text)
    said = looks_like(folder).partition("it looks like ")[2]
    if text != f"{kind}:{folder}" and said and not said.startswith(f"{kind}:"):
        raise UserError(f"{text} holds no mtjax weights: say {option} {said}")
    if kind == "mtjax" and not folder.exists() and may_be_on_hub(folder):
        hub = f"download it with {download_command(folder)}, then use {option} hf:{folder.name}"
        raise UserError(
            f"{text} holds no mtjax weights: it does not exist; if it is a model of the Hugging Face hub, {hub}"
        )
    return kind, folder


def open_source(kind: str, folder: Path, hints: Hints = NO_HINTS) -> Source:
    """Weights of any kind, to be read slice by slice.

    Raises:
      UserError: they are not of this kind, or can't be read.
    """
    if kind == "hf":
        return HuggingFaceSource(folder, hints.vocab_multiple)
    if kind == "megatron":
        return MegatronSource(folder, hints.vocab_size, hints.vocab_multiple, hints.config)
    return MtjaxSource(folder)


@dataclass(frozen=True)
class SavedModel:
    """Weights, and what came with them."""

    folder: Path
    source: Source

    @classmethod
    def open(cls, text: str, hints: Hints = NO_HINTS, option: str = "--from") -> "SavedModel":
        """What an option names.

        Raises:
          UserError: there are no such weights.
        """
        kind, folder = parse_named(text, option)
        return cls(folder, open_source(kind, folder, hints))

    @property
    def config(self) -> Config:
        """Its model is theirs; of a run, the rest too."""
        return self.source.origin.config

    def tokenizer(self, named: str | None = None) -> tuple[str, Tokenizer]:
        """The tokenizer that is named, else the one beside the weights, else their run's; and its name.

        Raises:
          UserError: there is none, it has more tokens than the model, or the one that is named differs from that which
            came with the weights.
        """
        origin = self.source.origin
        own = origin.tokenizer
        name = named or own or origin.config.data.tokenizer
        if name is None:
            raise UserError(f"{self.folder} came without a tokenizer: name one with --tokenizer KIND:PATH")
        tokenizer, size = open_tokenizer(name), origin.config.model.vocab_size
        if named and own and (theirs := readable_tokenizer(own)):
            check_weights(own, theirs, named, tokenizer)
        if size is not None and tokenizer.vocab_size > size:
            raise UserError(
                f"the tokenizer {name} has {tokenizer.vocab_size} tokens, and the model {size}: it is another model's"
            )
        return name, tokenizer

    @property
    def identity(self) -> str:
        """Changes with the weights: ours by the fingerprints of all arrays, others by name, size and time of files."""
        if isinstance(self.source, MtjaxSource):
            facts: list[Any] = sorted(self.source.weights.page["fingerprints"].items())
        else:
            # Other files of Hugging Face's folders are none of the weights, such as an output that grows there.
            own = ("config.json", "*.safetensors") if isinstance(self.source, HuggingFaceSource) else ("**/*",)
            paths = sorted({path for pattern in own for path in self.folder.glob(pattern)})
            stats = {path: path.stat() for path in paths if path.is_file()}
            facts = [(str(p.relative_to(self.folder)), s.st_size, s.st_mtime_ns) for p, s in stats.items()]
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    def parameters(self, placed: ShardedModel) -> Tree:
        """The weights on a mesh, as `placed` keeps them: our own by each device's part, others parameter by parameter.

        Raises:
          UserError: they are damaged, can't be read, or are of another model.
        """
        target, orders = placed.restore_target, placed.layer_orders
        if isinstance(self.source, MtjaxSource) and not self.source.adapters:
            check_same_weights(self.source.weights, target, placed.config, orders)
            return restore_weights(self.source.weights, target, orders)
        leaves, structure = jax.tree_util.tree_flatten_with_path(target)
        arrays = self.read({dotted(path): leaf for path, leaf in leaves}, placed)
        return jax.tree_util.tree_unflatten(structure, list(arrays.values()))

    def read(self, targets: Mapping[str, jax.ShapeDtypeStruct], placed: ShardedModel) -> dict[str, jax.Array]:
        """Some of the parameters by their names here, each placed as its target says; of positions the first ones.

        Raises:
          UserError: they are damaged, or can't be read.
        """
        rows, done, arrays = padded_vocab_size(placed.config.model), 0, {}
        total = sum(leaf.size * leaf.dtype.itemsize for leaf in targets.values())
        with ProgressLine("reading weights", total) as progress:
            for name, leaf in targets.items():
                array = _stacked(self.source, name, rows, order_of(name, placed.layer_orders)).astype(leaf.dtype)
                array = array[: leaf.shape[0]] if name == POSITIONS else array
                arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, array.__getitem__)
                done += arrays[name].nbytes
                progress.update(done, done)
        return arrays


POSITIONS = "positions"
"""The table of learned positions."""


def _stacked(source: Source, name: str, rows: int, order: LayerOrder | None) -> np.ndarray:
    """A parameter with its layers in their order and its vocabulary padded."""
    parameter = source.parameters[name]
    layers = [with_vocab(np.asarray(array), parameter, rows) for array in source.slices(parameter)]
    if parameter.num_layers is None:
        return layers[0]
    if order is not None:
        layers = [np.zeros_like(layers[0]) if number == PADDING else layers[number] for number in order.flat]
    return np.stack(layers)
