"""Which files a task's rows are in: a folder, one file that is shared out, or one for training and one beside it."""

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
    """Examples of a task."""

    train: list[Any]
    held_out: list[tuple[HeldOut, list[Any]]]
    notes: list[str]
    """Which rows were left out."""


def read_task(config: Config, task: HasFiles) -> TaskRows:
    """The rows that `data`, or `train_data` and `valid_data`, name.

    Raises:
      UserError: files are missing or are not the task's.
    """
    named = config.data
    if named.train_data or named.valid_data:
        if named.data or not (named.train_data and named.valid_data):
            raise UserError("give either --data, or --train-data and --valid-data")
        files = [task.examples(Path(name).expanduser(), config) for name in (named.train_data, named.valid_data)]
        return _rows(files[0], [(DEV, files[1])])
    if not named.data:
        raise UserError(f"--data is missing: the folder of {task.name}'s files, or one of rows")
    place = Path(named.data).expanduser()
    if not place.is_dir():
        return _shared_out(task.examples(place, config), named.split)
    train = task.examples(_file(place, task.train, task.endings), config)
    sets = [(s, _find(place, s.stems, task.endings)) for s in task.held_out]
    if not any(path for s, path in sets if s.is_needed):  # a folder of the task's rows in the plain way
        stems = tuple(dict.fromkeys((*task.held_out[0].stems, *DEV.stems)))
        sets = [(DEV, _file(place, stems, task.endings))]
    return _rows(train, [(s, task.examples(path, config)) for s, path in sets if path])


def _rows(train: Examples, held_out: list[tuple[HeldOut, Examples]]) -> TaskRows:
    notes = [note for e in (train, *(e for _, e in held_out)) for note in e.notes]
    return TaskRows(train.rows, [(s, e.rows) for s, e in held_out], notes)


def _shared_out(examples: Examples, split: str) -> TaskRows:
    """One file's rows, in an order that is always the same, by the first two shares of `split`.

    Raises:
      UserError: one share is empty.
    """
    order = np.random.default_rng(0).permutation(len(examples.rows))
    bounds = split_bounds(split, len(order))
    shares = [[examples.rows[i] for i in order[slice(*(bounds[name] or (0, 0)))]] for name in ("train", "valid")]
    if not all(shares):
        which = "training" if not shares[0] else "validation"
        raise UserError(f"split {split} leaves none of the {len(order)} rows of {examples.path} for {which}")
    return TaskRows(shares[0], [(DEV, shares[1])], examples.notes)


def _find(folder: Path, stems: tuple[str, ...], endings: tuple[str, ...]) -> Path | None:
    paths = ((folder / f"{stem}{ending}", bool(ending)) for stem in stems for ending in endings)
    return next((path for path, is_file in paths if (path.is_file() if is_file else path.is_dir())), None)


def _file(folder: Path, stems: tuple[str, ...], endings: tuple[str, ...]) -> Path:
    path = _find(folder, stems, endings)
    if path is None:
        first, *others = endings
        names = " or ".join(f"{stem}{first}" for stem in stems)
        same = f", nor the same with {others[0]}" if others else ""
        raise UserError(f"{folder} has no {names}{same}: is it another task's folder?")
    return path
