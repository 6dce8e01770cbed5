"""What a sample and a dataset of samples are, whatever the family of models."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

Sample = dict[str, np.ndarray]
Bounds = tuple[int, int]


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Sample: ...


def stack(samples: Sequence[Sample]) -> Sample:
    """Stacks samples into one batch: each array gets a leading axis."""
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
