"""The run's folder that its own config.toml refers to, after the folder was moved or copied."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from mtjax.config.run import Config, replace
from mtjax.errors import UserError
from mtjax.storage import is_file, names_in, shown, url_of

CONFIG = "config.toml"
"""The file with the config in a run's folder."""
MEGATRON_TRACKER = "latest_checkpointed_iteration.txt"
"""The file that a folder with checkpoints of Megatron-LM contains."""


def holds_run(folder: Path) -> bool:
    """Returns whether a folder, on this machine or in an object store, holds a run."""
    if url := url_of(folder):
        return is_file(f"{url}/metrics.jsonl") or bool(names_in(f"{url}/checkpoints"))
    return (folder / "metrics.jsonl").exists() or (folder / "checkpoints").exists()


def with_run_folder(config: Config, file: Path, tables: Mapping[str, Any]) -> Config:
    """Returns the config with `out` set to the folder of the run that contains its file.

    The `out` in the file is the path as it was typed when the run began: a folder that was moved, copied, or is named
    from another working directory would otherwise start a new run elsewhere, or write into the original.

    Args:
      config: with the `out` of the file; no other was typed.
      file: the config file.
      tables: contents of the file.

    Raises:
      UserError: with `resume`, if a run wrote the file, its folder contains no run, and `out` is another folder.
    """
    out, folder = config.output.out, file.parent
    if file.name != CONFIG or out is None or _is_same(out, folder):
        return config
    if holds_run(folder):
        return replace(config, out=folder)
    # A file written by hand may name any folder; one written by a run contains every section.
    if config.output.resume and tables.keys() >= get_type_hints(Config).keys():
        raise UserError(
            f"{shown(file)} is in {shown(folder)}, which has no checkpoints, and was written by a run in "
            f"{shown(out)}: choose the folder to resume with --out {shown(folder)} or --out {shown(out)}"
        )
    return config


def was_copied(folder: Path, recorded: str | None) -> bool:
    """Returns whether a run's folder is a copy of one that still exists at `recorded`; a moved folder is not a copy."""
    return recorded is not None and Path(recorded) != folder.resolve() and holds_run(Path(recorded))


def _is_same(one: Path, other: Path) -> bool:
    if url_of(one) or url_of(other):
        return url_of(one) == url_of(other)
    return one.resolve() == other.resolve()
