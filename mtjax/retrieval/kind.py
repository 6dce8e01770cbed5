"""The kind of an index, as a record of a search names it."""

import re
from dataclasses import dataclass

EXACT = "exact"
SAMPLE = 1 << 20


@dataclass(frozen=True)
class IndexKind:
    """An index, with all settings that its answers depend on.

    Attributes:
      factory: exact, or the factory string of an index of faiss.
      sample: vectors on which an index of faiss is trained, at most.
      nprobe: cells of an IVF that a query visits; faiss' default when None.
    """

    factory: str = EXACT
    sample: int = SAMPLE
    nprobe: int | None = None

    def text(self) -> str:
        """Returns the name of the kind in a record."""
        if self.factory == EXACT:
            return EXACT
        return f"{self.factory}, sample {self.sample}, nprobe {self.nprobe}"

    @classmethod
    def of(cls, text: str) -> "IndexKind":
        """Returns the kind with this `text`."""
        # From the back: a factory string has commas itself.
        found = re.fullmatch(r"(.+), sample (\d+), nprobe (\d+|None)", text)
        if found is None:
            return cls(text)
        return cls(found[1], int(found[2]), None if found[3] == "None" else int(found[3]))
