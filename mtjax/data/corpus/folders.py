"""Folders of corpora: Parquet files, what `datasets` writes with `save_to_disk`, and its cache."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from mtjax.data.corpus.packed import without_suffixes
from mtjax.errors import UserError

TABLES = (".parquet", ".arrow")
TEXTS = (".jsonl", ".ndjson", ".csv", ".tsv")
STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` writes: of a dataset, and of several splits."""
SPLIT = re.compile(r"(?:^|[-_./])(train|validation|valid|dev|test)(?:-\d{5}-of-\d{5})?\.(?:parquet|arrow)$")
"""A file's name by which a folder has several splits: `squad-train.arrow`, `test-00000-of-00001.parquet`."""


def files_in(folder: str, names: Sequence[str], read: Callable[[str], bytes]) -> list[str]:
    """Returns the files of a folder that hold its rows, in order.

    Args:
      folder: as the user named it.
      names: of all files below it, relative to it.
      read: reads one of them.

    Raises:
      UserError: it has none, or those of several splits; says which to name.
    """
    # Hidden files, and those that programs put beside data, such as Spark's _SUCCESS.
    visible = [name for name in names if not any(part[0] in "._" for part in PurePosixPath(name).parts)]
    if SPLITS in visible:
        splits = [str(split) for split in _object(folder, SPLITS, read).get("splits") or []]
        if len(splits) == 1:
            below = [name.removeprefix(f"{splits[0]}/") for name in visible if name.startswith(f"{splits[0]}/")]
            files = files_in(f"{folder}/{splits[0]}", below, lambda name: read(f"{splits[0]}/{name}"))
            return [f"{splits[0]}/{name}" for name in files]
        raise UserError(
            f"{folder} has several splits: name one of {', '.join(f'{folder}/{split}' for split in splits)}"
        )
    # Before files are looked for: the record says which belong to the dataset, and in which order.
    if STATE in visible:
        listed = _object(folder, STATE, read).get("_data_files") or []
        files = [str(entry["filename"]) for entry in listed if isinstance(entry, dict) and "filename" in entry]
        if missing := next((name for name in files if name not in visible), None):
            raise UserError(f"{folder} is incomplete: {missing}, which its {STATE} names, does not exist")
        return files
    # cache-*.arrow are results of `map` and `filter`, tmp* of a run that was killed.
    final = [name for name in visible if not PurePosixPath(name).name.startswith(("cache-", "tmp"))]
    tables = [name for name in final if name.endswith(TABLES)]
    if not tables:
        raise UserError(f"{folder} is a directory; name the files in it, say '{folder}/*.jsonl'")
    if text := next((name for name in final if without_suffixes(name).endswith(TEXTS)), None):
        raise UserError(f"{folder} has both tables and text ({text}): name those to read, say '{folder}/**/*.parquet'")
    _refuse_several(folder, tables)
    return sorted(tables)


def _refuse_several(folder: str, tables: Sequence[str]) -> None:
    """Refuses a folder whose files are of several datasets or splits, of which one may be the test set."""
    kinds = {name.rpartition(".")[2] for name in tables}
    if len(kinds) > 1:
        raise UserError(f"{folder} has both Parquet and Arrow files: name those to read, say '{folder}/**/*.parquet'")
    splits = {match[1] if (match := SPLIT.search(name)) else None for name in tables}
    if len(splits) > 1:
        found = ", ".join(sorted(split for split in splits if split))
        raise UserError(f"{folder} has several splits ({found}): name the files of one, say '{folder}/{_glob(tables)}'")
    parents = {str(PurePosixPath(name).parent) for name in tables}
    if len(parents) > 1 and kinds == {"arrow"}:
        folders = ", ".join(f"{folder}/{parent}" for parent in sorted(parents))
        raise UserError(f"{folder} has several datasets: name one of {folders}")


def _glob(tables: Sequence[str]) -> str:
    """Returns a pattern of the files of the split of the first file, or of its training split."""
    first = next((name for name in sorted(tables) if (m := SPLIT.search(name)) and m[1] == "train"), sorted(tables)[0])
    return re.sub(r"-\d{5}-of-\d{5}", "-*", first)


def _object(folder: str, name: str, read: Callable[[str], bytes]) -> dict[str, Any]:
    try:
        value = json.loads(read(name))
    except ValueError as e:
        raise UserError(f"{folder}/{name} is not JSON: {e}") from e
    return value if isinstance(value, dict) else {}
