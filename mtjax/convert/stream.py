"""How every conversion runs: slice by slice from a source to a sink, one layer of one parameter at a time."""

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
from mtjax.convert.parameters import Parameter
from mtjax.data.progress import ProgressLine
from mtjax.data.tokens.end_file import TOKENIZER_JSON
from mtjax.data.tokens.folder import tokenizer_files, tokenizer_of, tokenizer_of_run
from mtjax.data.tokens.tokenizer import Tokenizer, open_tokenizer
from mtjax.errors import UserError


@dataclass(frozen=True)
class Origin:
    """What is known about the weights besides their numbers."""

    config: Config
    """Its model is theirs; of a run, the rest too."""
    dtype: str
    """Type that holds every number exactly, say "bfloat16"."""
    files: Path
    """Folder with the tokenizer's files, if there are any."""
    hugging_face: Mapping[str, Any] = field(default_factory=dict)
    """The `config.json` that they came with."""
    notes: tuple[str, ...] = ()
    """What the user should know."""
    fresh: frozenset[str] = frozenset()
    """Parameters that the files don't have, and that were begun afresh."""
    is_run: bool = False
    """Whether the tokenizer's files are those of a run (`tokenizer_of_run`)."""

    @property
    def tokenizer(self) -> str | None:
        """How `--tokenizer` names the tokenizer beside the weights; None where there is none."""
        find = tokenizer_of_run if self.is_run else tokenizer_of
        return find(tokenizer_files(self.files), self.files)


class Source(Protocol):
    """Weights in any format."""

    origin: Origin
    parameters: Mapping[str, Parameter]

    def slices(self, parameter: Parameter) -> Iterator[np.ndarray]:
        """The parameter layer by layer, shaped like `parameter.shape` but without padding of the vocabulary."""
        ...


class Sink(Protocol):
    """Where weights go."""

    def write(self, parameter: Parameter, layer: int | None, array: np.ndarray) -> None:
        """Takes what `Source.slices` gives."""
        ...

    def close(self) -> None:
        """Writes everything besides the weights."""
        ...


def convert(source: Source, sink: Sink, task: str) -> int:
    """Copies every parameter; returns how many numbers they are."""
    parameters = list(source.parameters.values())
    total = sum(p.nbytes * (p.num_layers or 1) for p in parameters)
    done = numbers = 0
    with ProgressLine(task, total) as progress:
        for parameter in parameters:
            for layer, array in zip(parameter.layers, source.slices(parameter), strict=True):
                sink.write(parameter, layer, array)
                numbers += array.size
                done += parameter.nbytes
                progress.update(done, done)
    sink.close()
    return numbers


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `target` in the end, or vanishes when something goes wrong.

    Raises:
      UserError: `target` exists already.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: name a new folder, or remove it first")
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    try:
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except OSError as e:
        raise UserError(f"{target} can't be written: {e.strerror or e}") from e
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def carry_files(source: Path, target: Path) -> list[str]:
    """Copies the tokenizer's files; returns their names."""
    names = tokenizer_files(source)
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)
    return names


def carry_tokenizer(origin: Origin, target: Path) -> list[str]:
    """Copies the tokenizer's files, and writes its tokenizer.json where it has none; returns their names.

    Of a Hugging Face folder without that file, `config.json` may decide how its tokenizer is read, and is not copied.

    Raises:
      UserError: mtjax can't read the tokenizer.
    """
    names = carry_files(origin.files, target)
    if tokenizer := tokenizer_to_write(origin):
        tokenizer.save(target)
        names.append(TOKENIZER_JSON)
    return names


def tokenizer_to_write(origin: Origin) -> Tokenizer | None:
    """Opens the tokenizer of a Hugging Face folder without a tokenizer.json; returns None for other folders.

    Raises:
      UserError: mtjax can't read it.
    """
    name = origin.tokenizer
    return open_tokenizer(name) if name and name.startswith("hf:") else None


def check_folder(folder: Path, kind: str = "") -> None:
    """Checks that a path to read is a folder.

    Args:
      folder: the path.
      kind: of the weights; that of Hugging Face's may have been meant as a name on the hub.

    Raises:
      UserError: it is not.
    """
    if folder.is_dir():
        return
    if folder.exists():
        raise UserError(f"{folder} is not a folder")
    advice = ""
    if kind == "hf" and may_be_on_hub(folder):
        advice = f". hf: takes a local folder. Download it with {download_command(folder)}"
    raise UserError(f"{folder} does not exist{advice}")


def may_be_on_hub(path: Path) -> bool:
    """Whether a path is written as the hub's names are: `gpt2`, `openai-community/gpt2`."""
    return re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", str(path)) is not None


def download_command(name: Path) -> str:
    """Returns the command that downloads a model of the hub into a local folder."""
    return f"`hf download {name} --local-dir {name.name}`"


def looks_like(folder: Path) -> str:
    """What to say instead when a folder is of another kind, beginning with a semicolon; nothing when it is of none."""
    signs = {
        "hf": ("config.json",),
        "mtjax": ("weights/page", "checkpoints", "page"),
        "megatron": ("mp_rank_*", "*.distcp", "latest_checkpointed_iteration.txt"),
    }
    kinds = [kind for kind, patterns in signs.items() if any(any(folder.glob(pattern)) for pattern in patterns)]
    return f"; it looks like {kinds[0]}:{folder}" if kinds else ""


@contextmanager
def understood(source: str) -> Iterator[None]:
    """A context in which a file's description of its model is read, about which nothing is certain.

    Raises:
      UserError: instead of the errors that missing values, or values of the wrong type, cause.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        what = (
            f"it is missing {e.args[0]}" if isinstance(e, KeyError) and e.args else f"a value is of the wrong type: {e}"
        )
        raise UserError(f"{source} does not describe a model that mtjax can read: {what}") from e


def config_of(settings: Mapping[str, Any], source: str) -> Config:
    """The config of a model with these settings; what follows from others is left to follow.

    Raises:
      UserError: a setting is of the wrong type or has no value, or they don't fit each other; `source` names the file.
    """
    default = vars(Model())
    missing = [name for name, value in settings.items() if value is None and default[name] is not None]
    if missing:
        raise UserError(f"{source} is missing {', '.join(missing)}")
    config = from_dict({"model": {name: v for name, v in settings.items() if v is not None}}, source=source)
    validate(config)
    model = config.model
    if model.head_dim and model.head_dim * model.num_heads == model.hidden_size:
        config = replace(config, head_dim=None)
    if model.num_kv_heads == model.num_heads:
        config = replace(config, num_kv_heads=None)
    if model.num_decoder_layers == model.num_layers:
        config = replace(config, num_decoder_layers=None)
    return config


def rows_of(model: Model) -> int:
    """Rows of the vocabulary that stand for tokens."""
    assert model.vocab_size is not None  # every source knows it
    return model.vocab_size
