"""Weights of any kind, on a mesh: of a run, a checkpoint, Hugging Face's folders and Megatron's checkpoints."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mtjax.config import Config, Parallel, replace
from mtjax.config.sizes import padded_vocab_size
from mtjax.convert.mtjax_folder import tokenizer_of
from mtjax.convert.parameters import Parameter
from mtjax.convert.places import KINDS, open_source, place
from mtjax.convert.stream import TOKENIZER_FILES, Origin, convert, looks_like
from mtjax.convert.table import with_vocab
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError, first_line
from mtjax.models.placed import Placed
from mtjax.sharding.mesh import attach_devices
from mtjax.sharding.records import dotted
from mtjax.theory.mesh import parse_mesh

Tree = Any


@dataclass(frozen=True)
class LoadedModel:
    """A model with everything that generating needs."""

    placed: Placed
    parameters: Tree
    tokenizer: Tokenizer
    stop_ids: frozenset[int]
    """Tokens that end a text."""
    folder: Path
    """Where the tokenizer's files are."""


def load_model(source: str, mesh: str = "1x1", dtype: str | None = None, tokenizer: str | None = None) -> LoadedModel:
    """The weights that `DIR` or `KIND:DIR` names, placed on a mesh of this machine's devices.

    Args:
      source: a folder of `mtjax train` or `mtjax convert`, or a checkpoint; hf:DIR and megatron:DIR for others'.
      mesh: DATAxMODEL.
      dtype: of matrices and activations; bfloat16 on GPUs and float32 on CPUs when None.
      tokenizer: how `--tokenizer` names one; the weights' own when None.

    Raises:
      UserError: there are no such weights, they have no tokenizer, or don't fit the mesh.
    """
    kind, folder = place(source if source.partition(":")[0] in KINDS else f"mtjax:{source}")
    other = looks_like(folder).partition("it looks like ")[2]
    if source.partition(":")[0] not in KINDS and other and not other.startswith("mtjax:"):
        raise UserError(f"{source} holds no mtjax weights: say --from {other}")
    shape = parse_mesh(mesh)
    devices = attach_devices(shape)
    opened = open_source(kind, folder)
    dtype = dtype or ("float32" if devices.devices.flat[0].platform == "cpu" else "bfloat16")
    config = with_fields(opened.origin.config, parallel=Parallel(mesh=mesh))
    config = replace(config, compute_dtype=dtype, global_batch_size=shape.size, microbatch_size=None)
    placed = Placed(replace(config, recompute="none", rampup_batch_size=None), devices)
    sink = _OnDevices(placed)
    convert(opened, sink, f"reading {folder.name}")
    read_by = tokenizer_for(opened.origin, tokenizer)
    return LoadedModel(placed, sink.parameters, read_by, stop_ids_of(opened.origin, read_by), opened.origin.files)


class _OnDevices:
    """Where `mtjax.convert` writes to: the devices of a mesh."""

    def __init__(self, placed: Placed) -> None:
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(placed.restore_target)
        self._targets = {dotted(path): leaf for path, leaf in leaves}
        self._rows = padded_vocab_size(placed.config.model)
        self._arrays: dict[str, jax.Array] = {}
        self._layers: list[np.ndarray] = []

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Takes a layer's slice; the last one sends them all."""
        self._layers.append(with_vocab(np.asarray(array, np.float32), parameter, self._rows))
        if layer is not None and layer + 1 < (parameter.num_layers or 0):
            return
        whole = self._layers[0] if layer is None else np.stack(self._layers)
        self._arrays[parameter.name] = jax.device_put(whole, self._targets[parameter.name].sharding)
        self._layers = []

    def close(self) -> None:
        """Nothing is left to do."""

    @property
    def parameters(self) -> Tree:
        """In the model's tree."""
        return jax.tree.unflatten(self._tree, [self._arrays[name] for name in self._targets])


def tokenizer_for(origin: Origin, name: str | None) -> Tokenizer:
    """The tokenizer that is named, else the one beside the weights, else the one that their run used.

    Raises:
      UserError: there is none, or it has more tokens than the model.
    """
    beside = tokenizer_of([file for file in TOKENIZER_FILES if (origin.files / file).is_file()], origin.files)
    chosen = name or beside or origin.config.data.tokenizer
    if chosen is None:
        raise UserError(f"{origin.files} has no tokenizer: name one with --tokenizer")
    tokenizer, size = open_tokenizer(chosen), origin.config.model.vocab_size
    if size is not None and tokenizer.vocab_size > size:
        raise UserError(f"the tokenizer {chosen} has {tokenizer.vocab_size} tokens, and the model {size}")
    return tokenizer


def stop_ids_of(origin: Origin, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: those that came with Hugging Face's weights, else the tokenizer's end of a document."""
    settings: list[Mapping[str, Any]] = [origin.hugging_face, read_json(origin.files / "generation_config.json")]
    ends: set[int] = set()
    for named in (entry.get("eos_token_id") for entry in settings):
        ends |= set(named) if isinstance(named, list) else {named} if isinstance(named, int) else set()
    return frozenset(ends or {tokenizer.eod})


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; an empty one where there is no file.

    Raises:
      UserError: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path} is not JSON: {first_line(e)}") from e
    if not isinstance(value, dict):
        raise UserError(f"{path} should be a JSON object")
    return value


def config_in_words(config: Config, parameters: Tree) -> str:
    """What was loaded, for people."""
    model, count = config.model, sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return (
        f"{model.family}, {count / 1e6:,.1f}M parameters, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size}, {config.training.compute_dtype}"
    )
