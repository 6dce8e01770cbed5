"""Trees of parameters from dotted names."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def nested(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The tree whose leaves have these dotted names."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *parents, leaf = name.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[leaf] = array
    return tree
