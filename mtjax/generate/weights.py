"""Weights of any kind, on a mesh: of a run, a checkpoint, Hugging Face's folders and Megatron's checkpoints."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from mtjax.config import Config, Parallel
from mtjax.convert.saved_model import Hints, SavedModel, vocab_multiple_for, without_training
from mtjax.data.tokens.tokenizer import Tokenizer
from mtjax.errors import parse_json_object
from mtjax.models.placed import Placed
from mtjax.sharding.mesh import attach_devices
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


def load_model(
    source: str, mesh: str = "1x1", dtype: str | None = None, tokenizer: str | None = None, processes: int = 1
) -> LoadedModel:
    """The weights that `DIR` or `KIND:DIR` names, placed on a mesh of this machine's devices, or of all processes'.

    Args:
      source: a folder of `mtjax train` or `mtjax convert`, or a checkpoint; hf:DIR and megatron:DIR for others'.
      mesh: DATAxMODEL.
      dtype: of matrices and activations; bfloat16 on GPUs and float32 on CPUs when None.
      tokenizer: how `--tokenizer` names one; the weights' own when None.
      processes: that share the mesh.

    Raises:
      UserError: there are no such weights, they have no tokenizer, or don't fit the mesh.
    """
    shape = parse_mesh(mesh)
    devices = attach_devices(shape, processes)
    saved = SavedModel.open(source, Hints(vocab_multiple_for(shape)))
    dtype = dtype or ("float32" if devices.devices.flat[0].platform == "cpu" else "bfloat16")
    batch = {"global_batch_size": shape.size, "microbatch_size": None}
    placed = Placed(without_training(saved.config, Parallel(mesh=mesh), compute_dtype=dtype, **batch), devices)
    _, read_by = saved.tokenizer(tokenizer)
    files = saved.source.origin.files
    return LoadedModel(placed, saved.parameters(placed), read_by, stop_ids_of(saved, read_by), files)


def stop_ids_of(saved: SavedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: those that came with Hugging Face's weights, else the tokenizer's end of a document."""
    origin = saved.source.origin
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
    return parse_json_object(path.read_bytes(), path) if path.is_file() else {}


def config_in_words(config: Config, parameters: Tree) -> str:
    """What was loaded, for people."""
    model, count = config.model, sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return (
        f"{model.family}, {count / 1e6:,.1f}M parameters, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size}, {config.training.compute_dtype}"
    )
