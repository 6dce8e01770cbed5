"""Models on the Hugging Face hub, named `owner/name` or `owner/name@revision`, downloaded into the hub's cache."""

import contextlib
import fcntl
import os
import re
import sys
import time
from functools import cache
from importlib import import_module
from pathlib import Path

from mtjax.errors import UserError, first_line

ID = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "vocab.bpe")
"""Patterns of weights, settings, vocabularies and chat templates."""
IGNORED = (*(f"*/*{kind}" for kind in (".json", ".txt", ".model", ".safetensors")), "consolidated*.safetensors")
"""Copies of a model in other formats, in folders such as `onnx` and `original`."""


def local_folder(path: Path) -> Path:
    """Returns the folder of a downloaded model for an id, `owner/name[@revision]`, and any other path unchanged.

    A path that exists is not an id.

    Raises:
      UserError: the model can't be downloaded.
    """
    match = ID.fullmatch(str(path))
    return path if match is None or path.exists() else _downloaded(match["name"], match["revision"])


@cache
def _downloaded(name: str, revision: str | None) -> Path:
    """Downloads a model once per cache: other processes, such as those of the same run, wait and use its folder.

    Raises:
      UserError: it can't be downloaded.
    """
    # Before the lock is taken: a download that ends after this is as new as one that would begin now.
    asked = time.time()
    # The command is for machines that can't reach the hub, such as nodes of a cluster.
    version = f" --revision {revision}" if revision else ""
    command = f"`hf download {name}{version} --local-dir {name.rpartition('/')[2]}`"
    advice = f"run {command} where the hub can be reached, and name that folder instead"
    try:
        hub, constants = import_module("huggingface_hub"), import_module("huggingface_hub.constants")
    except ImportError as e:
        raise UserError(
            f"{name} does not exist here, and downloading it needs the library huggingface_hub: `pip install "
            f"huggingface_hub`, or {advice}"
        ) from e
    lock = Path(constants.HF_HUB_CACHE) / f".mtjax.{name.replace('/', '--')}.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a+") as file:
            # On a file system without locks, huggingface_hub's own still keep two processes from the same file.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            when, wanted, folder = (*file.read().split("\t"), "", "", "")[:3]
            # Not for older entries: the revision may be a branch, which has moved since.
            if wanted == str(revision) and float(when) >= asked and Path(folder).is_dir():
                return Path(folder)  # completed by another process while this one waited
            if not constants.HF_HUB_OFFLINE:
                text = f"{name} does not exist here: downloading it from the Hugging Face hub"
                print(text, file=sys.stderr, flush=True)
            folder = hub.snapshot_download(
                name, revision=revision, allow_patterns=list(FILES), ignore_patterns=list(IGNORED)
            )
            file.truncate(0)
            file.write(f"{time.time()}\t{revision}\t{folder}")
    except Exception as e:  # the library's errors are those of its HTTP client, too
        is_offline = type(e).__name__ == "LocalEntryNotFoundError" and constants.HF_HUB_OFFLINE
        setting = "HF_HUB_OFFLINE" if os.environ.get("HF_HUB_OFFLINE") else "TRANSFORMERS_OFFLINE"
        why = f"{setting} is set, and the hub's cache does not have it" if is_offline else first_line(e).rstrip(".")
        raise UserError(
            f"{name}{f'@{revision}' if revision else ''} does not exist here, and can't be downloaded from the Hugging "
            f"Face hub ({why}): {advice}"
        ) from e
    print(f"{name} is in {folder}", file=sys.stderr, flush=True)
    # Pickled weights are not in FILES, so that they are not downloaded first and refused afterwards.
    if not any(Path(folder).glob("*.safetensors")):
        raise UserError(
            f"{name} has no safetensors files on the hub: save it with transformers' model.save_pretrained(DIR), which "
            "writes them, and name that folder"
        )
    return Path(folder)
