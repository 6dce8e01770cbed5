"""Blends: samples of several datasets, interleaved so that every prefix of the run has the requested shares.

As Megatron's `BlendedDataset`: sample i comes from the dataset that lags furthest behind its weight.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mtjax.data.cache import Cache, cached_arrays, check_room
from mtjax.data.samples.sample import Dataset, Sample
from mtjax.errors import UserError

CHUNK = 1 << 20
# Megatron's margin (`_get_size_per_split_per_dataset`): picks may exceed a dataset's share. The number decides the
# order of the samples of each dataset.
SURPLUS = 1.005


def normalize(weights: Sequence[float]) -> list[float]:
    """Divides weights so that they sum to 1.

    Raises:
      UserError: a weight is negative or not a number, or all are 0.
    """
    if any(not math.isfinite(w) or w < 0 for w in weights) or sum(weights) <= 0:
        raise UserError(f"blend weights {', '.join(map(str, weights))} should be 0 or more, and not all 0")
    # As Megatron sums, in float64 and pairwise: another order of summation would move samples of long blends.
    shares = np.array(weights, np.float64)
    return (shares / shares.sum()).tolist()


def samples_of_each(weights: Sequence[float], size: int) -> list[int]:
    """Returns the samples that each dataset of a blend of `size` must have: its share and 0.5% more."""
    return [math.ceil(math.ceil(size * w) * SURPLUS) for w in weights]


def blend_index(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which dataset each sample of a blend comes from, and which of its samples.

    At sample i, the dataset with the largest `weight x max(i, 1) - taken`, the first one on ties.

    Args:
      weights: one per dataset, summing to 1.
      size: samples in the blend.

    Returns:
      int16[size] dataset, int64[size] sample.
    """
    dataset, sample = np.empty(size, np.int16), np.empty(size, np.int64)
    counts = [0] * len(weights)
    for at in range(0, size, CHUNK):
        stop = min(at + CHUNK, size)
        dataset[at:stop] = _picks(weights, counts, at, stop)
        for d in range(len(weights)):
            chosen = np.flatnonzero(dataset[at:stop] == d)
            sample[at + chosen] = counts[d] - len(chosen) + np.arange(len(chosen))
    return dataset, sample


def _picks(weights: Sequence[float], counts: list[int], start: int, stop: int) -> list[int]:
    """Returns the datasets of samples `start` to `stop`, and updates `counts`. Order of operations as upstream."""
    picks = []
    # Megatron refuses a weight of 0; here it has no samples, not even where all others are ahead of theirs.
    numbers = [d for d in range(len(weights)) if weights[d] > 0]
    for i in range(start, stop):
        # As in helpers.cpp: sample 0 is treated as sample 1, or all lags would be 0.
        best, largest, position = -1, -math.inf, float(i or 1)
        for d in numbers:
            lag = weights[d] * position - counts[d]
            if lag > largest:
                best, largest = d, lag
        counts[best] += 1
        picks.append(best)
    return picks


class BlendedDataset:
    """Several datasets as one."""

    def __init__(
        self, datasets: Sequence[Dataset], weights: Sequence[float] | None, size: int, cache: Cache | None = None
    ) -> None:
        """Interleaves.

        Args:
          datasets: what is blended.
          weights: shares; when None, the datasets' lengths, and there are no more samples than the datasets have
            together.
          size: samples.
          cache: where the index is cached; in memory when None.

        Raises:
          UserError: weights that can't be, or a dataset with fewer samples than its share.
        """
        lengths = [len(dataset) for dataset in datasets]
        if weights is None:
            _check_lengths(lengths)
            size = min(size, sum(lengths))
        shares = normalize(lengths if weights is None else weights)
        self.datasets, self.size = list(datasets), size

        def build(_: Path | None) -> dict[str, np.ndarray]:
            # int16 and int64.
            check_room(cache, 10 * size, 10 * size, f"the order of {size:,} samples of a blend")
            dataset, sample = blend_index(shares, size)
            return {"dataset": dataset, "sample": sample}

        # hex: a decimal would round, and other shares are another order.
        index = cached_arrays(cache, "blend-index", {"weights": [w.hex() for w in shares], "size": size}, build)
        self.dataset_index, self.sample_index = index["dataset"], index["sample"]
        self._check(lengths, "put weights before the datasets" if weights is None else "give it more text")

    def _check(self, lengths: Sequence[int], remedy: str) -> None:
        for d, length in enumerate(lengths):
            # Samples of a dataset are taken in order, so the last one has the highest number.
            chosen = np.flatnonzero(self.dataset_index == d)[-1:]
            if len(chosen) and self.sample_index[chosen[0]] >= length:
                raise UserError(
                    f"dataset {d} of the blend has {length} samples; {self.sample_index[chosen[0]] + 1} are needed: "
                    f"{remedy}"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        return self.datasets[int(self.dataset_index[index])][int(self.sample_index[index])]


def _check_lengths(lengths: Sequence[int]) -> None:
    if 0 in lengths:
        raise UserError(
            f"dataset {lengths.index(0)} of the blend has too few tokens for one sample, and without weights each "
            "dataset is gone through once: put weights before the datasets, or leave this one out"
        )
