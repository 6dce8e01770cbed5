"""Reads a task's rows from a folder, from one file that is split, or from separate training and validation files."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.data.samples.split import split_bounds
from mtjax.errors import UserError
from mtjax.finetune.rows import Examples
from mtjax.finetune.tasks.task import DEV, HasFiles, HeldOut


@dataclass(frozen=True)
class TaskRows:
    """Examples of a task for training and validation."""

    train: list[Any]
    held_out: list[tuple[HeldOut, list[Any]]]
    notes: list[str]
    """Notes on rows that were skipped."""


def read_task(config: Config, task: HasFiles) -> TaskRows:
    """Reads the rows in `data`, or in `train_data` and `valid_data`.

    Raises:
      UserError: files are missing or are not in the task's format.
    """
    data = config.data
    if data.train_data or data.valid_data:
        if data.data or not (data.train_data and data.valid_data):
            raise UserError("give either --data, or --train-data and --valid-data")
        files = [task.examples(Path(name).expanduser(), config) for name in (data.train_data, data.valid_data)]
        return _rows(files[0], [(DEV, files[1])])
    if not data.data:
        raise UserError(f"--data is missing: name the folder of {task.name}'s files, or one file")
    folder = Path(data.data).expanduser()
    if not folder.is_dir():
        return _split(task.examples(folder, config), data.split)
    train = task.examples(_file(folder, task.train, task.endings), config)
    # MNLI's second set may be missing, its first may not.
    sets = [(s, _find(folder, s.stems, task.endings)) for s in task.held_out]
    if not any(path for s, path in sets if s.is_needed):  # a folder with generic names such as dev.tsv
        stems = tuple(dict.fromkeys((*task.held_out[0].stems, *DEV.stems)))
        sets = [(DEV, _file(folder, stems, task.endings))]
    return _rows(train, [(s, task.examples(path, config)) for s, path in sets if path])


def _rows(train: Examples, held_out: list[tuple[HeldOut, Examples]]) -> TaskRows:
    notes = [note for e in (train, *(e for _, e in held_out)) for note in e.notes]
    return TaskRows(train.rows, [(s, e.rows) for s, e in held_out], notes)


def _split(examples: Examples, split: str) -> TaskRows:
    """Splits the rows of one file, in a fixed random order, by the first two shares of `split`.

    Raises:
      UserError: one of the two is empty.
    """
    # The same split for all seeds: their results are compared on the same rows.
    order = np.random.default_rng(0).permutation(len(examples.rows))
    bounds = split_bounds(split, len(order))
    shares = [[examples.rows[i] for i in order[slice(*(bounds[name] or (0, 0)))]] for name in ("train", "valid")]
    if not all(shares):
        which = "training" if not shares[0] else "validation"
        raise UserError(f"--split {split} assigns none of the {len(order)} rows of {examples.path} to {which}")
    return TaskRows(shares[0], [(DEV, shares[1])], examples.notes)


def _find(folder: Path, stems: tuple[str, ...], endings: tuple[str, ...]) -> Path | None:
    paths = ((folder / f"{stem}{ending}", bool(ending)) for stem in stems for ending in endings)
    return next((path for path, is_file in paths if (path.is_file() if is_file else path.is_dir())), None)


def _file(folder: Path, stems: tuple[str, ...], endings: tuple[str, ...]) -> Path:
    path = _find(folder, stems, endings)
    if path is None:
        first, *other_endings = endings
        names = " or ".join(f"{stem}{first}" for stem in stems)
        same = f" (or with {other_endings[0]})" if other_endings else ""
        raise UserError(f"{folder} contains no {names}{same}: is it the folder of another task?")
    return path
