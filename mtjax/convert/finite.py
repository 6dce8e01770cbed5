"""NaN and infinities in weights that are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

_EXPONENTS: Mapping[np.dtype, tuple[type[np.unsignedinteger], int]] = {
    np.dtype(np.float32): (np.uint32, 0x7F80_0000),
    np.dtype(np.float16): (np.uint16, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7F80),
}
"""dtypes -> unsigned integers of their size, and the bits of the exponent, which are all 1 in NaN and infinities."""
_BLOCK = 2**18
"""Numbers that are checked at a time, which fit in a processor's cache."""


def count_not_finite(array: np.ndarray) -> int:
    """Returns how many numbers of an array are NaN or infinite; 0 for types that have neither."""
    # float8_e4m3fn has NaN, too, but such tensors are unpacked before they come here.
    if array.dtype not in _EXPONENTS:
        return 0
    # By their bits: some ten times as fast as np.isfinite for 16-bit types.
    kind, bits = _EXPONENTS[array.dtype]
    exponent, numbers, count = kind(bits), np.ascontiguousarray(array).reshape(-1).view(kind), 0
    for start in range(0, numbers.size, _BLOCK):
        block = numbers[start : start + _BLOCK] & exponent
        # Almost no block has one: the maximum alone is cheaper than a comparison of all.
        if block.max() == exponent:
            count += int(np.count_nonzero(block == exponent))
    return count


def are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Returns whether two arrays have the same numbers, NaN in the same places included."""
    # The second comparison copies and compares twice, and is needed only where the first fails.
    return np.array_equal(one, other) or np.array_equal(one, other, equal_nan=True)


@dataclass
class NotFinite:
    """NaN and infinities in the tensors of a source that have been read."""

    source: str = ""
    """The folder of the tensors."""
    tensors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Names -> how many of their numbers are NaN or infinite, and how many they have."""

    def add(self, name: str, shards: Sequence[np.ndarray]) -> None:
        """Counts in the shards of a tensor, which may have been read before."""
        if count := sum(count_not_finite(shard) for shard in shards):
            self.tensors[name] = count, sum(shard.size for shard in shards)

    @property
    def notes(self) -> list[str]:
        """A note for the user on what has been found; none if nothing has."""
        if not self.tensors:
            return []
        name, (count, size) = next(iter(self.tensors.items()))
        more = len(self.tensors) - 1
        others = f", and so are some of {more} other tensor{'' if more == 1 else 's'}" if more else ""
        verb = "is" if count == 1 else "are"
        return [f"{self.source}: {count:,} of {size:,} numbers of {name} {verb} NaN or infinite{others}"]
