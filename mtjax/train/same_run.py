"""Checks that the processes of a run have the same settings, and have read the same texts.

Each reads its own command line and its own files, perhaps on another machine. With other settings their programs would
differ, and wait for each other forever or train different replicas; with another text, a part of each batch would come
from another corpus, and no number would show it. Tokenizers and weights are compared where they are read.
"""

import json
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from mtjax import __version__
from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import DataPosition, TrainingText
from mtjax.errors import UserError, shortened
from mtjax.runtime.devices import has_gpu
from mtjax.runtime.processes.coordination import SAME_FILES, all_gather_text, num_processes
from mtjax.storage import shown, url_of

OWN = frozenset(
    (
        # Of a process, or of its machine. How many processes there are, they agree on when they connect.
        *("coordinator", "num_processes", "process_id", "peer_timeout", "step_timeout"),
        *("cache_dir", "num_workers", "loader_timeout"),
    )
)
"""Settings that may differ between the processes of a run."""
PATHS = frozenset(
    (
        *("data", "train_data", "valid_data", "test_data", "neighbours", "tokenizer", "init_from", "teacher"),
        *("chat_template", "local_checkpoints"),
    )
)
"""Settings that may differ where the files are the same, but that all processes have or none. What is read from them is
compared."""
OUT, EVALUATE = "out", "evaluate"


def check_same_settings(config: Config, default: Path | None = None, *, what: str = "the settings of the run") -> None:
    """Checks that all processes have the same settings, the same versions of mtjax and jax, and GPUs or none.

    Args:
      config: of the run.
      default: the folder of the run without --out, or how it begins; None if it has none.
      what: what is compared, for messages.

    Raises:
      UserError: a process has a value that differs from process 0's; names the first such setting.
    """
    settings = {name: value for table in configs.to_dict(config).values() for name, value in table.items()}
    facts = {
        "versions": {"mtjax": __version__, "jax": jax.__version__, "jaxlib": version("jaxlib")},
        "devices": "GPUs" if has_gpu() else "CPUs",
        "settings": settings,
        "folder": _described_folder(config.output.out or default),
    }
    for process, theirs, ours in _others(what, facts):
        if found := _difference(theirs, ours):
            their, our, remedy = found
            raise UserError(f"process {process} has {their}, and process 0 has {our}: {remedy}")


def _difference(theirs: dict[str, Any], ours: dict[str, Any]) -> tuple[str, str, str] | None:
    """Returns the first value that must be the same, as two processes have it, and what to do."""
    for name, our in ours["versions"].items():
        if (their := theirs["versions"].get(name)) != our:
            return f"{name} {their}", f"{name} {our}", "install the same versions on all machines"
    if theirs["devices"] != ours["devices"]:
        return theirs["devices"], ours["devices"], "start all processes with GPUs, or all without"
    for name in {**ours["settings"], **theirs["settings"]}:
        their, our = (found["settings"].get(name) for found in (theirs, ours))
        if not _may_differ(name, their, our):
            return _typed(name, their), _typed(name, our), "start all processes with the same options"
    if ours["folder"] and not _is_same_folder(theirs["folder"], ours["folder"]):
        return _shown_folder(theirs), _shown_folder(ours), "name the same folder with --out"
    return None


def _may_differ(name: str, their: Any, our: Any) -> bool:
    if name in OWN:
        return True
    if name in PATHS or name == OUT:  # folders are compared by themselves
        return (their is None) == (our is None)
    if name == EVALUATE:
        their, our = ([entry.partition("=")[0] for entry in entries or ()] for entries in (their, our))
    return json.dumps(their) == json.dumps(our)


def _typed(name: str, value: Any) -> str:
    """Describes a setting as it is typed: `--steps 4`, `--no-resume`, `no --keep-every`."""
    option = name.replace("_", "-")
    if value is None:
        return f"no --{option}"
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    words = value if isinstance(value, list) else [value]
    return shortened(" ".join((f"--{option}", *(shlex.quote(str(word)) for word in words))), 120)


def _shown_folder(facts: dict[str, Any]) -> str:
    """Describes the folder of a run with the option as it is typed, if it is, and what that refers to."""
    folder = facts["folder"] or dict.fromkeys(("typed", "resolved"), "none")
    named = f"--out {folder['typed']}" if facts["settings"].get(OUT) else f"no --out and the folder {folder['typed']}"
    return named if folder["typed"] == folder["resolved"] else f"{named} ({folder['resolved']})"


def _described_folder(folder: Path | None) -> dict[str, str] | None:
    """Describes the folder of a run by its spelling here and by what that refers to on this machine."""
    if folder is None:
        return None
    if url := url_of(folder):
        return dict.fromkeys(("typed", "absolute", "resolved"), url) | {"host": ""}
    path = shown(folder)
    # Not `Path.resolve`, which raises an error for links in a circle.
    described = {"typed": path, "absolute": str(folder.absolute()), "resolved": os.path.realpath(path)}
    return described | {"host": socket.gethostname()}


def _is_same_folder(theirs: Mapping[str, str] | None, ours: Mapping[str, str]) -> bool:
    if theirs is None:
        return False
    # One machine has one meaning of a path. On another, a shared folder may be mounted elsewhere or behind a link.
    names = ("resolved",) if theirs["host"] == ours["host"] else ("typed", "absolute", "resolved")
    return any(theirs[name] == ours[name] for name in names)


def check_same_text(position: DataPosition, read: Mapping[str, Sequence[TrainingText]]) -> None:
    """Checks that all processes have read the same texts, and read the same samples in the same order.

    Args:
      position: the order of samples.
      read: the texts or rows of this process, by what they are.

    Raises:
      UserError: a text of a process differs from that of process 0, by its content.
    """
    facts = {"read": {what: [vars(text) for text in texts] for what, texts in read.items()}, **position.to_dict()}
    for process, theirs, ours in _others("the training text", facts):
        for what, known in ours["read"].items():
            _check_texts(what, process, theirs["read"].get(what, []), known)
        _check_texts("training text", process, theirs["texts"], ours["texts"])
        for name, what, describe in (
            ("neighbours", "other neighbours", _described_neighbours),
            ("order", "another order", _described_order),
        ):
            if theirs[name] != ours[name]:
                raise UserError(
                    f"process {process} has {what} of samples than process 0: {describe(theirs[name])}, and "
                    f"{describe(ours[name])}: {SAME_FILES}"
                )


def _check_texts(what: str, process: int, theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]]) -> None:
    """Raises an error for the first of a process's texts that is not that of process 0."""
    if len(theirs) != len(ours):
        raise UserError(
            f"process {process} has {len(theirs)} files of {what}, and process 0 has {len(ours)}: {SAME_FILES}"
        )
    for their, our in zip(theirs, ours, strict=True):
        if not TrainingText(**their).is_same(TrainingText(**our)):
            raise UserError(
                f"process {process} has other {what} than process 0: {_described(what, their)}, and "
                f"{_described(what, our)}: {SAME_FILES}"
            )


def _others(name: str, values: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
    """Yields the processes whose values differ from those of process 0, with both."""
    if num_processes() == 1:
        return
    texts = all_gather_text(name, json.dumps(values, default=str))
    first = json.loads(texts[0])
    for process, text in enumerate(texts):
        # Read, so that dictionaries compare without their order.
        if (found := json.loads(text)) != first:
            yield process, found, first


def _described(what: str, text: dict[str, Any]) -> str:
    weight = "" if text["weight"] is None else f"{text['weight']:g} "
    unit = "rows" if what.endswith("rows") else "documents"
    begin = f" from number {text['first']:,}" if text["first"] else ""
    return f"{weight}{shortened(text['name'])} ({text['documents']:,} {unit}{begin}, digest {text['content'][:8]})"


def _described_order(order: dict[str, Any]) -> str:
    return f"{order['totals'][-1]:,} samples, begun after {order['begins']:,}"


def _described_neighbours(files: Sequence[dict[str, Any]]) -> str:
    described = (f"{file['split']} with {file['samples']:,} samples, digest {file['content'][:8]}" for file in files)
    return ", ".join(described) or "none"
