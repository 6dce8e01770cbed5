"""Blends: samples of several datasets, interleaved so that every prefix of the run holds the asked-for shares.

As Megatron's `BlendedDataset`: sample i comes from the dataset that lags furthest behind its weight.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtjax.data.cache import cached_folder
from mtjax.data.samples.gpt import Dataset, Sample
from mtjax.errors import UserError

CHUNK = 1 << 20
SURPLUS = 1.005


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1.

    Raises:
      UserError: a weight is negative or no number, or all are 0.
    """
    if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise UserError(f"blend weights {', '.join(map(str, weights))} should be 0 or more, and not all 0")
    total = sum(weights)
    return [w / total for w in weights]


def samples_of_each(weights: Sequence[float], size: int) -> list[int]:
    """Samples that each dataset of a blend of `size` is asked for: its share and 0.5% more."""
    return [math.ceil(math.ceil(size * w) * SURPLUS) for w in weights]


def blend_index(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset each sample of a blend comes from, and which of its samples.

    At sample i, the dataset with the largest `weight x max(i, 1) - taken`, the first one on ties.

    Args:
      weights: one per dataset, summing to 1.
      size: samples in the blend.
      limits: samples that each dataset has; one that is used up is passed over. No limits when None.

    Returns:
      int16[size] dataset, int64[size] sample.
    """
    dataset, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    counts = [0] * len(weights)
    for at in range(0, size, CHUNK):
        stop = min(at + CHUNK, size)
        picks = _picks(weights, counts, at, stop, limits)
        dataset[at:stop] = picks
        for d in range(len(weights)):
            chosen = np.flatnonzero(dataset[at:stop] == d)
            sample[at + chosen] = counts[d] - len(chosen) + np.arange(len(chosen))
    return dataset, sample


def _picks(
    weights: Sequence[float], counts: list[int], start: int, stop: int, limits: Sequence[int] | None
) -> list[int]:
    """The datasets of samples `start` to `stop`; `counts` is brought up to date. Order of operations as upstream."""
    picks, limits = [], limits or [stop] * len(weights)
    numbers = [d for d in range(len(weights)) if weights[d] > 0]
    for i in range(start, stop):
        best, largest, position = -1, -math.inf, float(i or 1)
        for d in numbers:
            lag = weights[d] * position - counts[d]
            if lag > largest and counts[d] < limits[d]:
                best, largest = d, lag
        counts[best] += 1
        picks.append(best)
    return picks


class BlendedDataset:
    """Several datasets as one of `size` samples."""

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float] | None, size: int | None, cache: Path | None
    ) -> None:
        """Interleaves.

        Args:
          datasets: what is blended.
          weights: shares; in proportion to the datasets' lengths, each used up exactly, when None.
          size: samples; all there are when None.
          cache: folder of prepared data; the index stays in memory when None.

        Raises:
          UserError: weights that can't be, or a dataset with fewer samples than its share.
        """
        lengths = [len(dataset) for dataset in datasets]
        size = sum(lengths) if size is None else size
        shares = normalise(lengths if weights is None else weights)
        limits = lengths if weights is None else None
        if weights is None and size > sum(lengths):
            raise UserError(f"the blend is asked for {size} samples, and its datasets have {sum(lengths)}")
        self.datasets, self.size = list(datasets), size

        def build(folder: Path) -> None:
            dataset, sample = blend_index(shares, size, limits)
            np.save(folder / "dataset.npy", dataset)
            np.save(folder / "sample.npy", sample)

        if cache is None:
            self.dataset_index, self.sample_index = blend_index(shares, size, limits)
        else:
            parts = {"weights": [w.hex() for w in shares], "size": size, "limits": limits}
            folder = cached_folder(cache, "blend-index", parts, build)
            self.dataset_index = np.load(folder / "dataset.npy", mmap_mode="r")
            self.sample_index = np.load(folder / "sample.npy", mmap_mode="r")
        self._check(lengths)

    def _check(self, lengths: Sequence[int]) -> None:
        for d, length in enumerate(lengths):
            chosen = np.flatnonzero(self.dataset_index == d)[-1:]
            if len(chosen) and self.sample_index[chosen[0]] >= length:
                raise UserError(
                    f"dataset {d} of the blend has {length} samples; {self.sample_index[chosen[0]] + 1} are needed"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        return self.datasets[int(self.dataset_index[index])][int(self.sample_index[index])]
