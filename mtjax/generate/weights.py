"""Weights of any kind, on a mesh: of a run, a checkpoint, Hugging Face's folders and Megatron's checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from mtjax.config import Config, Parallel
from mtjax.convert.saved_model import Hints, SavedModel, vocab_multiple_for, without_training
from mtjax.data.samples.t5 import t5_ids
from mtjax.data.tokens.folder import GENERATION_CONFIG
from mtjax.data.tokens.pretrained_settings import read_object
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import UserError
from mtjax.generate.first_tokens import first_tokens_of
from mtjax.models.sharded_model import ShardedModel
from mtjax.sharding.mesh import attach_devices
from mtjax.theory.mesh import check_no_context_parallel, parse_mesh

Tree = Any


@dataclass(frozen=True)
class LoadedModel:
    """A model with everything that generating needs."""

    placed: ShardedModel
    parameters: Tree
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    folder: Path
    """Where the tokenizer's files are."""
    tokenizer_name: str
    """As `--tokenizer` names it."""
    identity: str
    """Changes with the weights."""
    first_ids: list[int]
    """Tokens that stand before a text of which every token is to be predicted."""
    start_id: int = 0
    """With which a T5's texts begin."""

    def on(self, mesh: Mesh) -> "LoadedModel":
        """The same on another mesh of as many model ways."""
        placed = ShardedModel(self.placed.config, mesh)
        return replace(self, placed=placed, parameters=jax.device_put(self.parameters, placed.parameter_sharding))

    @property
    def family(self) -> str:
        """Of the model."""
        return self.placed.config.model.family

    def prompt_ids(self, text: str) -> list[int]:
        """A prompt as the model is given it.

        A T5's ends as the texts that it was trained on, a BERT's stands between [CLS] and [SEP]; in both, names of
        special tokens such as <extra_id_0> and [MASK] are these tokens.

        Raises:
          UserError: the tokenizer lacks what that takes.
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
) -> LoadedModel:
    """The weights that `DIR` or `KIND:DIR` names, placed on a mesh of this machine's devices, or of those given.

    Args:
      source: a folder of `mtjax train` or `mtjax convert`, or a checkpoint; hf:DIR and megatron:DIR for others'.
      mesh: DATAxMODEL.
      dtype: of matrices and activations; bfloat16 on GPUs and float32 on CPUs when None.
      tokenizer: how `--tokenizer` names one; the weights' own when None.
      devices: the mesh of this shape, whatever processes share it.

    Raises:
      UserError: there are no such weights, they have no tokenizer or no head of language, or don't fit the mesh.
    """
    shape = parse_mesh(mesh)
    check_no_context_parallel(shape)
    devices = devices or attach_devices(shape)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(shape)))
    if lacking := sorted(name for name in saved.source.origin.fresh if name.startswith("head.")):
        raise UserError(f"{source} is an encoder without the head that fills masks: it has no {', '.join(lacking)}")
    dtype = dtype or ("float32" if devices.devices.flat[0].platform == "cpu" else "bfloat16")
    batch = {"global_batch_size": shape.size, "microbatch_size": None}
    placed = ShardedModel(without_training(saved.config, Parallel(mesh=mesh), compute_dtype=dtype, **batch), devices)
    name, read_by = saved.tokenizer(tokenizer)
    files = saved.source.origin.files
    parameters = saved.parameters(placed)
    stops, first, start = stop_ids_of(saved, read_by), first_tokens_of(saved, read_by), start_id_of(saved, read_by)
    return LoadedModel(placed, parameters, read_by, stops, files, name, saved.identity, first, start)


def stop_ids_of(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: those that came with Hugging Face's weights, else those of the data it was trained on."""
    ends: set[int] = set()
    for named in (entry.get("eos_token_id") for entry in _settings(saved)):
        ends |= {index for index in (named if isinstance(named, list) else [named]) if type(index) is int}
    own = t5_ids(tokenizer).eos if saved.config.model.family == "t5" and not ends else tokenizer.eod
    return frozenset(ends or {own})


def start_id_of(saved: SavedModel, tokenizer: Tokenizer) -> int:
    """The token with which a T5's texts begin, likewise; 0 of other families, which have none."""
    if saved.config.model.family != "t5":
        return 0
    named = [entry.get("decoder_start_token_id") for entry in _settings(saved)]
    start = next((start for start in named if isinstance(start, int)), None)
    return t5_ids(tokenizer).bos if start is None else start


def _settings(saved: SavedModel) -> list[Mapping[str, Any]]:
    origin = saved.source.origin
    return [origin.hugging_face, read_object(origin.files / GENERATION_CONFIG)]


def special_id(tokenizer: Tokenizer, name: str) -> int:
    """The id of a special token.

    Raises:
      UserError: the vocabulary has none of that name.
    """
    index = tokenizer.special(name)
    if index is None:
        raise UserError(f"the vocabulary has no {name}, and a BERT's prompt needs it: give its own --tokenizer")
    return index


def describe_config(config: Config, parameters: Tree) -> str:
    """What was loaded, for people."""
    model, count = config.model, sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return (
        f"{model.family}, {count / 1e6:,.1f}M parameters, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size}, {config.training.compute_dtype}"
    )
