"""The order in which offloaded arrays of a layer cross to the device and back."""

from collections.abc import Sequence


def exchange_pairs(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Pairs arrays of about equal size: one is read while the other is written, as a link carries both at once.

    Args:
      sizes: of the arrays.

    Returns:
      Indices into `sizes`, the larger of a pair first; the smallest of an odd number of arrays is alone.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    return [tuple(order[i : i + 2]) for i in range(0, len(order), 2)]


def exposed_elements(sizes: Sequence[int], layers: int) -> int:
    """Returns how many elements cross one after the other in a loop over layers; others cross beside them.

    In a layer, the smaller array of a pair is written while the larger one is read, and read for the next layer while
    the larger one is written. Its first read is alone.

    Args:
      sizes: elements of each array of one layer.
      layers: of the loop.
    """
    pairs = exchange_pairs(sizes)
    return sum(2 * layers * sizes[large] + sum(sizes[i] for i in small) for large, *small in pairs)
