"""What a folder holds, by its content: the kind of weights for `--from`, the format, and the iteration."""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mtjax.config.place import MEGATRON_TRACKER
from mtjax.convert.megatron_formats import (
    BACKEND_FILE,
    checkpoint_folder,
    has_checkpoint,
    sharded_backend,
)
from mtjax.convert.stream import check_folder
from mtjax.convert.torch_dist_files import METADATA_FILE, DistributedCheckpoint
from mtjax.convert.torchtitan import is_torchtitan
from mtjax.convert.weights_path import ADAPTER_CONFIG, ADAPTERS, KINDS, parse_weights_path
from mtjax.errors import UserError

PAGE = Path("page") / "metadata"
"""Of every checkpoint and every converted folder of mtjax."""
ORBAX = "_METADATA"
_ITEMS = ("", "items", "default", "state", "params")
"""Where Orbax's list of arrays is in a checkpoint's folder."""


@dataclass(frozen=True)
class Recognized:
    """Weights in a folder."""

    folder: Path
    """As it was named."""
    files: Path
    """The folder with the files, such as that of the newest iteration."""
    kind: str | None
    """What `--from` calls them; None for a format that is not read."""
    what: str
    """A description."""
    iteration: int | None = None

    def __str__(self) -> str:
        at = "" if self.iteration is None else f", iteration {self.iteration}"
        below = "" if self.files == self.folder else f" (in {self.files.name})"
        return f"{self.folder} is {self.what}{at}{below}"


def source_of(text: str) -> tuple[str, Path]:
    """Returns the kind and the folder of a source; the content decides for a folder that is named without a kind.

    Raises:
      UserError: there is no such folder, or its content is not read.
    """
    folder = Path(text).expanduser()
    # A text with a kind is KIND:DIR, whatever is in DIR.
    if text.partition(":")[0] in KINDS or not folder.is_dir():
        return parse_weights_path(text)
    found = recognized(folder)
    if found.kind is None:
        raise UserError(f"{found}, which mtjax does not read")
    print(f"{found}: --from {found.kind}:{text}")
    return found.kind, folder


def named_folder(text: str) -> Path:
    """Returns the folder that is named with or without a kind."""
    kind, colon, folder = text.partition(":")
    return Path(folder if colon and kind in KINDS else text).expanduser()


def recognized(folder: Path) -> Recognized:
    """Looks at the files in a folder.

    Raises:
      UserError: there is no such folder, or its content is not known.
    """
    check_folder(folder)
    # In this order: a run of mtjax has checkpoints of Orbax, and a folder of peft may have a config.json.
    for look in (_mtjax, _megatron, _torchtitan_steps, _peft, _hugging_face, _orbax):
        if found := look(folder):
            return found
    raise UserError(
        f"{folder} holds no weights of a known format: Hugging Face, Megatron-LM, torchtitan, or Orbax of mtjax or "
        "MaxText"
    )


def _mtjax(folder: Path) -> Recognized | None:
    if (folder / "weights" / PAGE).is_file():
        return Recognized(folder, folder / "weights", "mtjax", "a folder that mtjax convert wrote")
    # A run's folder, or its folder of checkpoints.
    runs = (folder / "checkpoints", folder)
    if newest := _newest(path for above in runs for path in above.glob("*") if (path / PAGE).is_file()):
        return Recognized(folder, newest, "mtjax", "a run of mtjax", int(newest.name))
    if (folder / PAGE).is_file():
        step = int(folder.name) if folder.name.isdigit() else None
        return Recognized(folder, folder, "mtjax", "a checkpoint of mtjax", step)
    return None


def _newest(paths: Iterable[Path]) -> Path | None:
    steps = [path for path in paths if path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name), default=None)


def _megatron(folder: Path) -> Recognized | None:
    if not has_checkpoint(folder) and not (folder / MEGATRON_TRACKER).is_file():
        return None
    files = checkpoint_folder(folder)
    number = re.fullmatch(r"iter_(\d+)|step-(\d+)", files.name)
    iteration = int(number[1] or number[2]) if number else None
    if any(files.glob("mp_rank_*")):
        what = "a checkpoint of Megatron-LM in the format torch, a file for each rank"
        return Recognized(folder, files, "megatron", what, iteration)
    if (files / BACKEND_FILE).is_file():
        backend = sharded_backend(files)
        kind = "megatron" if backend == "torch_dist" else None
        return Recognized(folder, files, kind, f"a checkpoint of Megatron-LM in the format {backend}", iteration)
    keys = DistributedCheckpoint(files).keys
    if is_torchtitan(keys):
        return Recognized(folder, files, "torchtitan", "a checkpoint of torchtitan", iteration)
    if any(key.startswith(("decoder.", "embedding.")) for key in keys):
        what = f"a checkpoint of Megatron-LM without {BACKEND_FILE}, whose save did not finish"
        return Recognized(folder, files, None, what, iteration)
    example = f", with arrays such as {keys[0]}" if keys else ""
    what = f"a checkpoint of torch.distributed.checkpoint of another program{example}"
    return Recognized(folder, files, None, what, iteration)


def _torchtitan_steps(folder: Path) -> Recognized | None:
    steps = [path.parent for path in folder.glob(f"step-*/{METADATA_FILE}")]
    numbered = {int(path.name[5:]): path for path in steps if path.name[5:].isdigit()}
    if not numbered:
        return None
    newest = numbered[max(numbered)]
    # torchtitan and unknown programs write the same files: keys of the tensors tell them apart.
    found = _megatron(newest)
    assert found is not None  # it has .metadata
    return Recognized(folder, newest, found.kind, found.what, max(numbered))


def _peft(folder: Path) -> Recognized | None:
    if not (folder / ADAPTER_CONFIG).is_file() or any(folder.glob("model*.safetensors")):
        return None
    return Recognized(folder, folder, ADAPTERS, "a folder of peft, with adapters of a model of Hugging Face")


def _hugging_face(folder: Path) -> Recognized | None:
    if not (folder / "config.json").is_file():
        return None
    is_read = any(folder.glob("*.safetensors"))
    others = [*folder.glob("pytorch_model*.bin")]
    if not is_read and not others:
        return None
    try:
        config = json.loads((folder / "config.json").read_text())
        model_type = config["model_type"] if isinstance(config, dict) else None
    except (ValueError, KeyError, OSError):
        model_type = None
    what = f"a model of Hugging Face, model_type {model_type}" if model_type else "a folder of Hugging Face"
    what += "" if is_read else f", in {others[0].name} and not in safetensors"
    return Recognized(folder, folder, "hf" if is_read else None, what)


def _orbax(folder: Path) -> Recognized | None:
    def item(path: Path) -> Path | None:
        return next((path / name for name in _ITEMS if (path / name / ORBAX).is_file()), None)

    files, iteration = item(folder), int(folder.name) if folder.name.isdigit() else None
    if files is None:
        steps = [path for above in (folder / "checkpoints", folder) for path in above.glob("*") if item(path)]
        newest = _newest(steps)
        if newest is None:
            return None
        files, iteration = item(newest), int(newest.name)
    assert files is not None
    # As text: its JSON has tuples of keys as strings, and only a few words are looked for.
    text = (files / ORBAX).read_text(errors="replace")
    # MaxText's trees of parameters are Flax's: `params` of the train state, `params` of the module, `decoder`.
    is_maxtext = re.search(r"'params', '(params', ')?(decoder|token_embedder)'", text) is not None
    what = f"a checkpoint of Orbax, of {'MaxText' if is_maxtext else 'another program'}"
    return Recognized(folder, files, None, what, iteration)
