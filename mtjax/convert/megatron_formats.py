"""Which of Megatron-LM's checkpoint formats a folder is in, by what is in it."""

import json
from pathlib import Path

from mtjax.config.place import MEGATRON_TRACKER
from mtjax.convert.stream import check_folder, looks_like
from mtjax.convert.torch_dist_files import METADATA_FILE, DistributedCheckpoint
from mtjax.errors import UserError

RELEASE = "release"
"""What Megatron's tracker file calls weights that are not an iteration of a run."""
BACKEND_FILE = "metadata.json"
"""Written last: it names the format of a distributed checkpoint."""
BACKEND = "torch_dist"
_SAVE_AGAIN = "save it again with --ckpt-format torch_dist"


def checkpoint_folder(folder: Path) -> Path:
    """Returns the folder with the files: itself, or the one that Megatron's tracker file names.

    Raises:
      UserError: there is none.
    """
    check_folder(folder)
    # `folder` may be that of one iteration.
    if has_checkpoint(folder):
        return folder
    tracker = folder / MEGATRON_TRACKER
    if not tracker.is_file():
        raise UserError(
            f"{folder} is not a checkpoint of Megatron-LM: it has none of mp_rank_*, {METADATA_FILE} and "
            f"{MEGATRON_TRACKER}{looks_like(folder)}"
        )
    word = tracker.read_text().strip()
    checkpoint = folder / iteration_folder(word)
    if not has_checkpoint(checkpoint):
        raise UserError(f"{tracker} names {word!r}, and {checkpoint} holds neither mp_rank_* nor {METADATA_FILE}")
    return checkpoint


def iteration_folder(word: str) -> str:
    """Returns the name of the folder that Megatron's tracker file refers to."""
    # A damaged tracker gives iter_0000000, which then does not exist.
    return word if word == RELEASE else f"iter_{int(word) if word.isdigit() else 0:07}"


def has_checkpoint(folder: Path) -> bool:
    """Returns whether a folder holds the files of a checkpoint in any of Megatron's formats."""
    # Any of these: an unfinished save is then refused by what it lacks, not as something unknown.
    signs = ("mp_rank_*", METADATA_FILE, BACKEND_FILE, "*.distcp")
    return any(any(folder.glob(sign)) for sign in signs)


def is_torch_dist(folder: Path) -> bool:
    """Returns whether a checkpoint's folder is in the format torch_dist; False where it is in the format torch.

    Raises:
      UserError: it is in another format, or its save did not finish: says which.
    """
    if any(folder.glob("mp_rank_*")):
        return False
    # torchtitan's checkpoints and unfinished ones have .metadata as well.
    if not (folder / BACKEND_FILE).is_file():
        raise UserError(_without_backend(folder))
    backend = sharded_backend(folder)
    if backend != BACKEND:
        raise UserError(f"{folder} is in Megatron's format {backend}, which mtjax does not read: {_SAVE_AGAIN}")
    return True


def sharded_backend(folder: Path) -> str:
    """Returns what `metadata.json` calls the format of the tensors.

    Raises:
      UserError: it does not say.
    """
    path = folder / BACKEND_FILE
    try:
        return str(json.loads(path.read_text())["sharded_backend"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is corrupted: it does not name the format of a checkpoint") from e


def _without_backend(folder: Path) -> str:
    """Returns why a folder without `metadata.json` is not read, by the names of its tensors."""
    keys = DistributedCheckpoint(folder).keys
    if any(key.startswith(("decoder.", "embedding.")) for key in keys):
        return (
            f"{folder} lacks {BACKEND_FILE}, which Megatron writes last: the save did not finish, or the copy is not "
            "complete; use another iteration"
        )
    if any(key.endswith("tok_embeddings.weight") for key in keys):
        return f"{folder} is a checkpoint of torchtitan: use torchtitan:{folder}"
    example = f", with tensors such as {keys[0]}" if keys else ""
    return (
        f"{folder} is in a format of torch.distributed.checkpoint that mtjax does not read, such as Megatron's "
        f"fsdp_dtensor or torch_dcp{example}: {_SAVE_AGAIN}"
    )
