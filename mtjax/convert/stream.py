"""Streams weights from a source to a sink, one layer of one parameter at a time."""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mtjax.config import Config, Model, from_dict, replace, validate
from mtjax.config.place import MEGATRON_TRACKER
from mtjax.convert.finite import NotFinite
from mtjax.convert.parameters import Parameter
from mtjax.data.progress import BytesProgress
from mtjax.data.tokens.end_file import TOKENIZER_JSON
from mtjax.data.tokens.folder import GENERATION_CONFIG, tokenizer_files, tokenizer_of, tokenizer_of_run
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError, naming
from mtjax.runtime.processes.notes import say_notes


@dataclass(frozen=True)
class Origin:
    """Metadata of weights: their config, dtype and tokenizer."""

    config: Config
    """The config of their model; for a run, all of its config."""
    dtype: str
    """The dtype that represents every weight exactly, such as "bfloat16"."""
    files: Path
    """Folder with the tokenizer's files, if it has any."""
    hugging_face: Mapping[str, Any] = field(default_factory=dict)
    """The `config.json` of the original weights."""
    notes: tuple[str, ...] = ()
    """Notes that are printed for the user."""
    fresh: frozenset[str] = frozenset()
    """Parameters that the files don't have, and that are initialized randomly."""
    is_run: bool = False
    """Whether the tokenizer's files are in a run's folder (`tokenizer_of_run`)."""
    not_finite: NotFinite = field(default_factory=NotFinite)
    """NaN and infinities in the tensors that have been read so far."""
    generation: Path | None = None
    """A generation_config.json for `files` without one: that of the model below adapters."""

    @property
    def generation_config(self) -> Path:
        """Path of the generation_config.json, which may not exist."""
        in_source = self.files / GENERATION_CONFIG
        return self.generation if self.generation and not in_source.is_file() else in_source

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer next to the weights, as `--tokenizer` names it; None if there is none."""
        find = tokenizer_of_run if self.is_run else tokenizer_of
        return find(tokenizer_files(self.files), self.files)


class WeightSource(Protocol):
    """Weights in any format."""

    origin: Origin
    parameters: Mapping[str, Parameter]

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """Yields the parameter layer by layer, shaped like `parameter.shape` but without padding of the vocabulary."""
        ...


class Sink(Protocol):
    """Writer of weights in any format."""

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Writes an array that `WeightSource.slices` yields; `layer` is None if the parameter is not stacked."""
        ...

    def close(self) -> None:
        """Writes everything except the weights."""
        ...


def convert(source: WeightSource, sink: Sink, task: str) -> int:
    """Copies every parameter; returns the number of weights."""
    parameters = list(source.parameters.values())
    # In bytes of float32, whatever is read and written: only the share of the work is shown.
    total = sum(p.nbytes * (p.num_layers or 1) for p in parameters)
    done = numbers = 0
    with BytesProgress(task, total) as progress:
        for parameter in parameters:
            for layer, array in zip(parameter.layers, source.slices(parameter), strict=True):
                sink.write(parameter, layer, array)
                numbers += array.size
                done += parameter.nbytes
                progress.update(done, done)
    say_notes(source.origin.not_finite.notes)
    sink.close()
    return numbers


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `target` at the end, or removed if an error occurs.

    Raises:
      UserError: `target` exists already, or can't be written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: name a new folder, or remove it first")
    # Beside the target: a rename between file systems would copy.
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        with _named_as_target(target):
            partial.mkdir(parents=True)
        # The caller reads the source, too: errors of its files are not the target's.
        with _named_as_target(target, inside=partial):
            yield partial
        with _named_as_target(target):
            # An empty folder, which `rename` would not replace on all systems.
            if target.exists():
                target.rmdir()
            # Atomic: the target is either complete or does not exist.
            partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _named_as_target(target: Path, inside: Path | None = None) -> Iterator[None]:
    """Converts errors of files to a `UserError` that names the target.

    With `inside`, only those of files in this folder, and those that name no file, as of a full or failing disk.
    """
    try:
        yield
    except OSError as e:
        names = [Path(name) for name in (e.filename, e.filename2) if isinstance(name, str | Path)]
        is_full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if inside is not None and not is_full and not any(name.is_relative_to(inside) for name in names):
            # Errors of connections are not of files: that of a closed pipe ends the command without a message.
            if names or e.errno is None or isinstance(e, ConnectionError):
                raise
            raise UserError(f"the source can't be read, or {target} can't be written: {e.strerror or e}") from e
        raise UserError(f"{target} can't be written: {e.strerror or e}") from e


def carry_files(origin: Origin, target: Path) -> list[str]:
    """Copies the tokenizer's files; returns their names."""
    paths = {name: origin.files / name for name in tokenizer_files(origin.files)}
    if origin.generation_config.is_file():
        paths[GENERATION_CONFIG] = origin.generation_config
    for name, path in paths.items():
        # Chat templates with names are in a folder of their own.
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return list(paths)


def carry_tokenizer(origin: Origin, target: Path) -> list[str]:
    """Copies the tokenizer's files, and writes a tokenizer.json if it has none; returns their names.

    Raises:
      UserError: mtjax can't read the tokenizer.
    """
    names = carry_files(origin, target)
    # Without a tokenizer.json, how a tokenizer is read may depend on `config.json`, which is not copied.
    if tokenizer := tokenizer_to_write(origin):
        tokenizer.save(target)
        names.append(TOKENIZER_JSON)
    return names


def tokenizer_to_write(origin: Origin) -> Tokenizer | None:
    """Opens the tokenizer of a Hugging Face folder without a tokenizer.json; returns None for any other folder.

    Raises:
      UserError: mtjax can't read it.
    """
    name = origin.tokenizer
    return open_tokenizer(name) if name and name.startswith("hf:") else None


def check_folder(folder: Path, kind: str = "") -> None:
    """Checks that a path to read is a folder.

    Args:
      folder: the path.
      kind: kind of the weights; with "hf", the message says how to download a path that may be a name on the hub.

    Raises:
      UserError: it is not a folder.
    """
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"{folder} is not a folder")
    advice = ""
    if kind == "hf" and may_be_on_hub(folder):
        advice = ". hf: needs a folder, or OWNER/NAME on the Hugging Face hub: download the model with "
        advice += download_command(folder)
    raise UserError(f"{folder} does not exist{advice}")


def may_be_on_hub(path: Path) -> bool:
    """Returns whether a path may be the name of a model on the hub: `gpt2`, `openai-community/gpt2`."""
    return re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", str(path)) is not None


def download_command(name: Path) -> str:
    """Returns the command that downloads a model from the hub into a local folder."""
    return f"`hf download {name} --local-dir {name.name}`"


def looks_like(folder: Path) -> str:
    """Returns the end of a message, "; it looks like KIND:DIR", for a folder of another kind; "" for an unknown one."""
    signs = {
        "hf": ("config.json",),
        "peft": ("adapter_config.json",),
        "mtjax": ("weights/page", "checkpoints", "page"),
        "megatron": ("mp_rank_*", "*.distcp", MEGATRON_TRACKER),
    }
    kinds = [kind for kind, patterns in signs.items() if any(any(folder.glob(pattern)) for pattern in patterns)]
    return f"; it looks like {kinds[0]}:{folder}" if kinds else ""


@contextmanager
def understood(source: str) -> Iterator[None]:
    """Converts errors that a missing or malformed value in a model's description causes to a `UserError`.

    Args:
      source: name of the file, for the message.

    Raises:
      UserError: a value is missing, or of the wrong type.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        what = (
            f"it is missing {e.args[0]}" if isinstance(e, KeyError) and e.args else f"a value is of the wrong type: {e}"
        )
        raise UserError(f"{source} does not describe a model that mtjax can read: {what}") from e


def config_of(settings: Mapping[str, Any], source: str) -> Config:
    """Returns the config of a model; settings that equal the default derived from other settings are reset to None.

    Raises:
      UserError: a setting is missing or of the wrong type, or settings are incompatible; `source` names the file.
    """
    default = vars(Model())
    # None stands for a key that a file lacks; where mtjax's default is None, too, the setting may be absent.
    missing = [name for name, value in settings.items() if value is None and default[name] is not None]
    if missing:
        raise UserError(f"{source} is missing {', '.join(missing)}")
    given = {name: list(v) if isinstance(v, tuple) else v for name, v in settings.items() if v is not None}
    with naming(source):
        config = from_dict({"model": given}, source=source)
        # The weights have no batch, whose size limits the length of a sequence.
        validate(replace(config, global_batch_size=1))
    model = config.model
    # Default values are dropped, so that a converted config equals that of a run.
    if model.head_dim and model.head_dim * model.num_heads == model.hidden_size:
        config = replace(config, head_dim=None)
    if model.num_kv_heads == model.num_heads:
        config = replace(config, num_kv_heads=None)
    if model.num_decoder_layers == model.num_layers:
        config = replace(config, num_decoder_layers=None)
    return config


def unpadded_vocab_size(model: Model) -> int:
    """Returns the size of the vocabulary without padding."""
    assert model.vocab_size is not None  # every source sets it
    return model.vocab_size
