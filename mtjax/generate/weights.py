"""Loads weights onto a mesh: of a run, a checkpoint, a Hugging Face folder or a Megatron-LM checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mtjax.config import Config, Parallel
from mtjax.config.storage import PLAIN, Storage, check_snapshots
from mtjax.convert.saved_model import Hints, SavedModel, vocab_multiple_for, without_training
from mtjax.data.tokens.pretrained_settings import ids_in, read_object
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.families.t5.samples import t5_ids
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.layout.mesh import MeshShape, check_generation_mesh, parse_mesh
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.devices import attach_devices
from mtjax.waiting import waiting

Tree = Any


@dataclass(frozen=True)
class LoadedModel:
    """A model with everything that generation needs."""

    sharded_model: ShardedModel
    parameters: Tree
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    folder: Path
    """Folder of the tokenizer's files."""
    tokenizer_name: str
    """The tokenizer's name in the form of `--tokenizer`."""
    identity: str
    """Digest of the weights."""
    first_ids: list[int]
    """Tokens to put before a text so that all of its tokens can be scored; see `first_tokens`."""
    start_id: int = 0
    """The first token of a T5's decoder."""
    grids: tuple[Tree, ...] = ()
    """Scales, and perhaps zero points, with which the weights were quantized, as trees like the parameters."""

    def on(self, mesh: Mesh) -> "LoadedModel":
        """Copies the model to another mesh with the same tensor parallel degree."""
        sharded_model = ShardedModel(self.sharded_model.config, mesh)
        parameters, *grids = (
            jax.device_put(tree, sharded_model.parameter_sharding) for tree in (self.parameters, *self.grids)
        )
        return replace(self, sharded_model=sharded_model, parameters=parameters, grids=tuple(grids))

    @property
    def family(self) -> str:
        """The model family."""
        return self.sharded_model.config.model.family

    def prompt_ids(self, text: str) -> list[int]:
        """Encodes a prompt in the form that the model was trained on.

        A T5's prompt ends with EOS, a BERT's is between [CLS] and [SEP]; in both, names of special tokens in the text,
        such as <extra_id_0> and [MASK], are encoded as these tokens.

        Raises:
          UserError: the tokenizer lacks one of the special tokens.
        """
        if self.family == "t5":
            return [*self.tokenizer.encode_marked(text), t5_ids(self.tokenizer).eos]
        if self.family == "bert":
            begin, end = (special_id(self.tokenizer, name) for name in ("[CLS]", "[SEP]"))
            return [begin, *self.tokenizer.encode_marked(text), end]
        return self.tokenizer.encode_prompt(text)


def load_model(
    source: str,
    mesh: str = "1x1",
    dtype: str | None = None,
    tokenizer: str | None = None,
    devices: Mesh | None = None,
    storage: Storage = PLAIN,
    *,
    neighbours: bool = False,
    state_snapshots: int | None = None,
) -> LoadedModel:
    """Loads the weights that `DIR` or `KIND:DIR` names onto a mesh.

    Args:
      source: a folder of `mtjax train` or `mtjax convert`, a checkpoint, hf:DIR, megatron:DIR or peft:DIR.
      mesh: DATAxMODEL.
      dtype: dtype of matrices and activations; if None, bfloat16 on GPUs and float32 on CPUs.
      tokenizer: a tokenizer in the form of `--tokenizer`; if None, the one that comes with the weights.
      devices: a mesh of this shape; if None, it is built from this machine's devices.
      storage: how matrices will be stored: if they were quantized so before, `LoadedModel.grids` has how.
      neighbours: whether the caller gives a Retro its neighbours.
      state_snapshots: maximum number of snapshots of recurrent states, if it is given: the model must have such states.

    Raises:
      UserError: the weights are missing, have no tokenizer or no language model head, or are not compatible with the
        mesh.
    """
    mesh_shape = parse_mesh(mesh)
    check_generation_mesh(mesh_shape)
    with waiting(f"loading the weights {source}"):
        # Before the weights are looked at, which uses a device: their number is fixed from then on.
        devices = devices or attach_devices(mesh_shape)
        saved = SavedModel.open(source, Hints(vocab_multiple_for(mesh_shape)))
        if saved.config.model.family == "retro" and not neighbours:
            raise UserError(
                f"{source} is a retro, which reads neighbours that a prompt does not have: write its decoder as a gpt "
                "with mtjax convert --without-encoder, and take that"
            )
        check_snapshots(saved.config.model, state_snapshots)
        return _load(saved, source, mesh_shape, mesh, dtype, tokenizer, devices, storage)


def _load(
    saved: SavedModel,
    source: str,
    mesh_shape: MeshShape,
    mesh: str,
    dtype: str | None,
    tokenizer: str | None,
    devices: Mesh,
    storage: Storage,
) -> LoadedModel:
    """See `load_model`."""
    if missing := sorted(name for name in saved.source.origin.fresh if name.startswith("head.")):
        raise UserError(f"{source} is an encoder without the masked language model head: it lacks {', '.join(missing)}")
    dtype = dtype or ("float32" if devices.devices.flat[0].platform == "cpu" else "bfloat16")
    # The config must be valid for this mesh although nothing is trained: one sample per device.
    batch = {"global_batch_size": mesh_shape.size, "microbatch_size": None}
    sharded_model = ShardedModel(
        without_training(saved.config, Parallel(mesh=mesh), compute_dtype=dtype, **batch), devices
    )
    name, loaded_tokenizer = saved.tokenizer(tokenizer)
    files = saved.source.origin.files
    # Checked before the parameters are read, which may take minutes.
    quantized = saved.quantized(storage)
    parameters = saved.parameters(sharded_model)
    grids = tuple(each.parameters(sharded_model) for each in quantized)
    stops, first, start = (
        stop_ids_of(saved, loaded_tokenizer),
        first_tokens_of(saved, loaded_tokenizer),
        start_id_of(saved, loaded_tokenizer),
    )
    return LoadedModel(
        sharded_model, parameters, loaded_tokenizer, stops, files, name, saved.identity, first, start, grids
    )


def stop_ids_of(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the stop tokens: `eos_token_id` of generation_config.json, as in transformers, or, if that has none, of
    config.json.

    Without either, it is the end-of-document token of training.

    Raises:
      UserError: one is not a token id.
    """
    named = (ids_in(entry, "eos_token_id", source) for source, entry in _settings(saved))
    ends = next((ids for ids in named if ids), [])
    # A T5's targets end with EOS, which need not be the token that ends documents.
    default = t5_ids(tokenizer).eos if saved.config.model.family == "t5" and not ends else tokenizer.eod
    return frozenset(ends or {default})


def start_id_of(saved: SavedModel, tokenizer: Tokenizer) -> int:
    """Returns the first token of a T5's decoder, from the same sources; 0 for families without an encoder.

    Raises:
      UserError: it is not a token id.
    """
    if saved.config.model.family != "t5":
        return 0
    named = (ids_in(entry, "decoder_start_token_id", source) for source, entry in _settings(saved))
    return next((ids[0] for ids in named if ids), t5_ids(tokenizer).bos)


def _settings(saved: SavedModel) -> list[tuple[object, Mapping[str, Any]]]:
    """Returns what Hugging Face's files say of generation, with their names; the first wins."""
    origin = saved.source.origin
    of_weights = origin.generation_config
    return [(of_weights, read_object(of_weights)), (f"the metadata of the weights {saved.folder}", origin.hugging_face)]


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """Returns the id of a special token.

    Raises:
      UserError: the vocabulary has no special token of that name.
    """
    index = tokenizer.special(name)
    if index is None:
        raise UserError(
            f"the vocabulary has no {name}, which a bert's prompt needs: pass the model's tokenizer with --tokenizer"
        )
    return index


def describe_config(config: Config, parameters: Tree) -> str:
    """Describes a loaded model in one line."""
    model, count = config.model, sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return (
        f"{model.family}, {count / 1e6:,.1f}M parameters, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size}, {config.training.compute_dtype}"
    )
