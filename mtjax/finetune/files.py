"""Which files a task's rows are in: a folder, one file that is shared out, or one for training and one beside it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mtjax.config import Config
from mtjax.data.samples.split import split_bounds
from mtjax.errors import UserError
from mtjax.finetune.rows import ENDINGS, Example, Examples, Fields, read_examples
from mtjax.finetune.tasks.task import DEV, HeldOut, Task


@dataclass(frozen=True)
class TaskRows:
    """Rows of a task."""

    train: list[Example]
    held_out: list[tuple[HeldOut, list[Example]]]
    notes: list[str]
    """Which rows were left out."""


def read_task(config: Config, task: Task) -> TaskRows:
    """The rows that `data`, or `train_data` and `valid_data`, name.

    Raises:
      UserError: files are missing or are not the task's.
    """
    named, fields = config.data, fields_of(config, task)
    if named.train_data or named.valid_data:
        if named.data or not (named.train_data and named.valid_data):
            raise UserError("give either --data, or --train-data and --valid-data")
        files = [read_examples(Path(name), fields) for name in (named.train_data, named.valid_data)]
        return _rows(files[0], [(DEV, files[1])])
    if not named.data:
        raise UserError(f"--data is missing: the folder of {task.name}'s files, or one of rows")
    place = Path(named.data).expanduser()
    if not place.is_dir():
        return _shared_out(read_examples(place, fields), named.split)
    train = read_examples(_file(place, ("train",)), fields)
    sets = [(s, _find(place, s.stems)) for s in task.held_out]
    if not any(path for s, path in sets if s.is_needed):  # a folder of the task's rows in the plain way
        sets = [(DEV, _file(place, tuple(dict.fromkeys((*task.held_out[0].stems, *DEV.stems)))))]
    return _rows(train, [(s, read_examples(path, fields)) for s, path in sets if path])


def fields_of(config: Config, task: Task) -> Fields:
    """The names of a task's fields: the user's, or the task's own.

    Raises:
      UserError: the task's own can't be changed.
    """
    options = config.finetuning
    if task.labels is not None and (options.text_fields or options.label_field or options.labels):
        if options.labels == task.labels and not (options.text_fields or options.label_field):
            return Fields(task.texts, task.label)  # as a run has noted them
        raise UserError(f"the fields and labels of {task.name} are known: take --task classify to name others")
    texts = (tuple(options.text_fields.split(",")),) if options.text_fields else task.texts
    if len(texts[0]) > 2:
        raise UserError(f"--text-fields {options.text_fields} names {len(texts[0])} fields, and may name one or two")
    return Fields(texts, (options.label_field,) if options.label_field else task.label)


def _rows(train: Examples, held_out: list[tuple[HeldOut, Examples]]) -> TaskRows:
    notes = [e.note for e in (train, *(e for _, e in held_out)) if e.note]
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
    return TaskRows(shares[0], [(DEV, shares[1])], [examples.note] if examples.note else [])


def _find(folder: Path, stems: tuple[str, ...]) -> Path | None:
    paths = (folder / f"{stem}{ending}" for stem in stems for ending in ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _file(folder: Path, stems: tuple[str, ...]) -> Path:
    path = _find(folder, stems)
    if path is None:
        names = " or ".join(f"{stem}.tsv" for stem in stems)
        raise UserError(f"{folder} has no {names}, nor the same with .jsonl: is it another task's folder?")
    return path
