"""Checks that the processes of a run have the same settings and read the same text.

Each reads its own command line and its own files, perhaps on another machine. With other settings their programs would
differ, and wait for each other forever or train different replicas; with another text, a part of each batch would come
from another corpus, and no number would show it.
"""

import json
from collections.abc import Iterator
from typing import Any

import jax

from mtjax import __version__
from mtjax import config as configs
from mtjax.config import Config
from mtjax.data import DataPosition
from mtjax.errors import UserError, shortened
from mtjax.runtime.processes.coordination import all_gather_text, num_processes

OWN = frozenset(
    (
        # Of a process, or of its machine.
        *("coordinator", "process_id", "peer_timeout", "step_timeout", "cache_dir", "num_workers", "loader_timeout"),
        "evaluate",  # has paths in its values; the tasks are compared
    )
)
"""Settings that may differ between the processes of a run."""
PATHS = frozenset(
    (
        *("data", "train_data", "valid_data", "test_data", "neighbours", "tokenizer", "init_from", "teacher"),
        *("chat_template", "local_checkpoints"),
    )
)
"""Settings that may differ where the files are the same, but that all processes have or none. The training text and the
neighbours are compared by content (`check_same_text`)."""


def check_same_settings(config: Config) -> None:
    """Checks that all processes have the same settings, and the same versions of mtjax and jax.

    Raises:
      UserError: a process has a value that differs from process 0's; names the first such setting.
    """
    given = {name: value for table in configs.to_dict(config).values() for name, value in table.items()}
    settings = {name: value for name, value in given.items() if name not in OWN | PATHS}
    settings |= {name: "a path" for name in PATHS if given.get(name) is not None}
    settings["evaluate"] = [entry.partition("=")[0] for entry in config.output.evaluate or ()]
    versions = {"mtjax": __version__, "jax": jax.__version__}
    for process, theirs, ours in _others("the settings of the run", {**versions, **settings}):
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        raise UserError(
            f"process {process} has {name} {_shown(theirs.get(name))}, and process 0 has {_shown(ours.get(name))}: "
            "start all processes with the same options, and the same versions of mtjax and jax"
        )


def check_same_text(position: DataPosition) -> None:
    """Checks that all processes read the same samples in the same order.

    Raises:
      UserError: the training text of a process differs from that of process 0, by its content.
    """
    for process, theirs, ours in _others("the training text", position.to_dict()):
        if len(theirs["texts"]) != len(ours["texts"]):
            counts = [f"{len(found['texts'])} training texts" for found in (theirs, ours)]
            raise UserError(f"process {process} has {counts[0]}, and process 0 has {counts[1]}: {_REMEDY}")
        for text, known in zip(theirs["texts"], ours["texts"], strict=True):
            if {**text, "name": ""} != {**known, "name": ""}:
                raise UserError(
                    f"process {process} has another training text than process 0: {_described(text)}, and "
                    f"{_described(known)}: {_REMEDY}"
                )
        if theirs["order"] != ours["order"] or theirs["neighbours"] != ours["neighbours"]:
            what = "order of samples" if theirs["order"] != ours["order"] else "neighbours"
            raise UserError(f"process {process} has another {what} than process 0: {_REMEDY}")


_REMEDY = "give all machines the same files"


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


def _described(text: dict[str, Any]) -> str:
    weight = "" if text["weight"] is None else f"{text['weight']:g} "
    return f"{weight}{shortened(text['name'])} ({text['documents']:,} documents from number {text['first']:,})"


def _shown(value: object) -> str:
    return "no value" if value is None else shortened(json.dumps(value, ensure_ascii=False))
