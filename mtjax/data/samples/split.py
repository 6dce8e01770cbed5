"""Training, validation and test shares of a corpus, by position, as Megatron's `--split` cuts them."""

import re
from typing import Literal

from mtjax.errors import UserError

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


def parse_split(text: str) -> tuple[float, float, float]:
    """Parses shares such as `969,30,1`, normalized to a sum of 1.

    Raises:
      UserError: not a number, more than three, or all of them 0.
    """
    # As Megatron's `parse_and_normalize_split`: spaces, commas and slashes separate.
    numbers = re.findall(r"[.0-9]+", text)
    try:
        weights = [float(number) for number in numbers]
    except ValueError as e:
        raise UserError(f"split {text!r} has something that is not a number: {e}") from e
    if not 0 < len(weights) <= 3 or sum(weights) <= 0:
        raise UserError(f"split {text!r} should be up to three numbers, train,valid,test, not all 0, like 969,30,1")
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    return weights[0] / total, weights[1] / total, weights[2] / total


def split_bounds(text: str, count: int) -> dict[Split, tuple[int, int] | None]:
    """Returns the first and one past the last of `count` items for each split; None where the share is 0."""
    shares = parse_split(text)
    bounds: dict[Split, tuple[int, int] | None] = {}
    # Sums of floats, rounded as Megatron does: exact arithmetic could move a border by a document.
    total = 0.0
    for name, share in zip(SPLITS, shares, strict=True):
        begin = round(total * count)
        total += share
        bounds[name] = (begin, round(total * count)) if share > 0 else None
    return bounds
