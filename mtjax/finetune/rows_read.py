"""Describes the rows that a process has read, so that the processes of a finetuning can compare them."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mtjax.config import Config
from mtjax.data import TrainingText


def rows_read(config: Config, train: Sequence[Any], *held_out: Sequence[Any]) -> dict[str, tuple[TrainingText, ...]]:
    """Describes rows by number and content, by what they are for.

    The digest of a data position is of their lengths alone, as it was when the first runs were saved.

    Args:
      config: names their files.
      train: dataclasses with the training rows.
      held_out: those with each set of validation rows.
    """
    data = config.data
    texts = [
        TrainingText(name or data.data or "", _digest(rows), len(rows))
        for name, rows in ((data.train_data, train), *((data.valid_data, rows) for rows in held_out))
    ]
    return {"training rows": (texts[0],), "validation rows": tuple(texts[1:])}


def _digest(rows: Sequence[Any]) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for row in rows:
        for part in _parts(row):
            hashed.update(len(part).to_bytes(8, "little") + part)
    return hashed.hexdigest()


def _parts(row: Any) -> Iterator[bytes]:
    # All fields: a row's `repr` may leave some out, as that of a long array leaves out elements.
    for value in vars(row).values():
        if isinstance(value, np.ndarray):
            yield value.tobytes()
        else:
            yield repr(value).encode("utf-8", "surrogatepass")
