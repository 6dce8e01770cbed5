"""What a run has to remember of its data, so that it can be resumed with samples that it has not read yet.

Megatron's order of samples depends on how many samples are requested: an index for 640 samples does not begin with the
index for 320. A run therefore saves the numbers it has requested. A longer run keeps its first index and gets further
passes over the text appended to it.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mtjax.data.samples.sample import Dataset, Sample


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a run reads its samples, as far as the settings do not determine it.

    Attributes:
      begins: samples that the run had consumed when this order began; 0 unless the order was changed in the middle.
      totals: samples that the run requested, counted from its beginning, ascending. The first number determines
        the first index, and each later one the passes that were appended for it.
    """

    begins: int
    totals: tuple[int, ...]

    def extended(self, total: int) -> "SampleOrder":
        """Returns the same order for a run of `total` samples; a shorter run leaves the order unchanged."""
        return self if total <= self.totals[-1] else SampleOrder(self.begins, (*self.totals, total))

    @property
    def counts(self) -> tuple[int, ...]:
        """`totals`, counted from where this order began."""
        return tuple(total - self.begins for total in self.totals)


@dataclass(frozen=True)
class TrainingText:
    """One source of training samples, as it was when the run read it.

    Attributes:
      name: what messages call it.
      content: digest of its tokens and, where it is computed from text files, of these.
      documents: how many of its documents are training data.
      first: the first of them.
      weight: its share in a blend; None when none is given.
    """

    name: str
    content: str
    documents: int
    first: int = 0
    weight: float | None = None

    def is_same(self, other: "TrainingText") -> bool:
        """Returns whether both have the same samples; the name, say a path, may differ."""
        ours, theirs = asdict(self), asdict(other)
        # All but the name: the weight and the range of documents decide the samples, too.
        return ours | {"name": ""} == theirs | {"name": ""}


@dataclass(frozen=True)
class NeighbourFile:
    """The neighbours of one split's samples, as they were when the run read them.

    Attributes:
      split: train or valid.
      samples: how many samples have neighbours.
      content: digest of the checksums of these samples and of their neighbours.
    """

    split: str
    samples: int
    content: str


@dataclass(frozen=True)
class DataPosition:
    """The order of a run's samples, the texts they are built from, and the neighbours that a Retro reads with them."""

    order: SampleOrder
    texts: tuple[TrainingText, ...] = ()
    neighbours: tuple[NeighbourFile, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DataPosition":
        """Builds an order from the output of `to_dict`."""
        order = SampleOrder(values["order"]["begins"], tuple(values["order"]["totals"]))
        # Runs of before they were recorded have no neighbours here.
        neighbours = tuple(NeighbourFile(**file) for file in values.get("neighbours", ()))
        return cls(order, tuple(TrainingText(**text) for text in values["texts"]), neighbours)


@dataclass(frozen=True)
class Shifted:
    """Samples whose numbers begin at `begins`: those of an order that began in the middle of a run."""

    dataset: Dataset
    begins: int

    def __len__(self) -> int:
        return self.begins + len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        if index < self.begins:
            # Samples before it are of another order, which only the run that read them has.
            raise IndexError(f"sample {index}, and this order begins with sample {self.begins}")
        return self.dataset[index - self.begins]


class Concatenated:
    """Datasets one after the other."""

    def __init__(self, parts: list[Dataset]) -> None:
        self.parts = parts
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def part_of(self, index: int) -> tuple[Dataset, int]:
        """Returns the dataset of a sample, and the sample's number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        # right: the first sample of a part has the number at which the one before it ends.
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part], index - (int(self._ends[part - 1]) if part else 0)

    def __getitem__(self, index: int) -> Sample:
        part, number = self.part_of(index)
        return part[number]


def shifted(dataset: Dataset, order: SampleOrder) -> Dataset:
    """Returns a dataset whose first sample is the first one of `order`."""
    return Shifted(dataset, order.begins) if order.begins else dataset


def digest_of_lengths(lengths: np.ndarray) -> str:
    """Returns a digest of the lengths of all rows in tokens, in their order."""
    # int64: a digest must not depend on the type in which lengths came.
    return hashlib.blake2b(np.ascontiguousarray(lengths, np.int64).data, digest_size=16).hexdigest()
