"""Adapters of peft on modules that share their weights, such as the blocks of Zamba2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mtjax.convert.peft import TENSORS
from mtjax.errors import UserError

if TYPE_CHECKING:
    from mtjax.convert.peft_source import Adapters


def join_copies(adapters: "Adapters", shared: Mapping[str, str]) -> None:
    """Leaves out what changes modules that share their weights with others, of which mtjax has one copy.

    Args:
      adapters: of a folder.
      shared: as `Family.shared`.

    Raises:
      UserError: it is not the same change.
    """
    adapters.joined = tuple(f"{copy}." for copy in shared)
    for copy, first in shared.items():
        changed = (*adapters.modules, *adapters.full)
        ends = {name.removeprefix(own) for own in (copy, first) for name in changed if name.startswith(f"{own}.")}
        for end in sorted(ends):
            pair = zip(_change(adapters, first + end), _change(adapters, copy + end), strict=True)
            if not all(np.all(one == other) for one, other in pair):
                raise UserError(
                    f"{adapters.path.parent / TENSORS} changes {first + end} and {copy + end}, which share their "
                    "weights, in different ways, and mtjax has one copy of them: train the same adapter for both"
                )
            adapters.modules.pop(copy + end, None)
            adapters.full.pop(copy + end, None)


def _change(adapters: "Adapters", name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns what is added to a matrix, or replaces a tensor, and DoRA's magnitudes; zeros for neither."""
    none = np.zeros((), np.float32)
    if name in adapters.full:
        return adapters.read(adapters.full[name]), none
    if name not in adapters.modules:
        return none, none
    names = adapters.modules[name].names
    down, up = adapters.read(names["down"]), adapters.read(names["up"])
    magnitude = adapters.read(names["magnitude"]) if "magnitude" in names else none
    return adapters.scale(name, len(down)) * (up @ down), magnitude
