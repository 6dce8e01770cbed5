"""Adapters of peft on modules that share their weights, such as the blocks of Zamba2."""

from collections.abc import Mapping

import numpy as np

from mtjax.convert.peft_adapters import Adapters
from mtjax.convert.peft_config import TENSORS
from mtjax.errors import UserError


def join_copies(adapters: Adapters, shared: Mapping[str, str]) -> None:
    """Leaves out what changes modules that share their weights with others, of which mtjax has one copy.

    Args:
      adapters: of a folder.
      shared: as `ModelType.shared`.

    Raises:
      UserError: it is not the same change.
    """
    adapters.joined = tuple(f"{copy}." for copy in shared)
    for copy, first in shared.items():
        changed = (*adapters.modules, *adapters.full)
        ends = {
            name.removeprefix(module) for module in (copy, first) for name in changed if name.startswith(f"{module}.")
        }
        for end in sorted(ends):
            one, other = _change(adapters, first + end), _change(adapters, copy + end)
            if one.keys() != other.keys() or not all(np.array_equal(one[part], other[part]) for part in one):
                raise UserError(
                    f"{adapters.path.parent / TENSORS} changes {first + end} and {copy + end}, which share their "
                    "weights, in different ways, and mtjax has one copy of them: train the same adapter for both"
                )
            adapters.modules.pop(copy + end, None)
            adapters.full.pop(copy + end, None)


def _change(adapters: Adapters, name: str) -> dict[str, np.ndarray]:
    """Returns what replaces a tensor, or is added to a matrix, and DoRA's magnitudes; nothing if it stays as it is."""
    if name in adapters.full:
        return {"replacement": adapters.read(adapters.full[name])}
    if name not in adapters.modules:
        return {}
    names = adapters.modules[name].names
    down, up = adapters.read(names["down"]), adapters.read(names["up"])
    update = {"update": adapters.scale(name, len(down)) * (up @ down)}
    if "magnitude" in names:
        return update | {"magnitude": adapters.read(names["magnitude"])}
    # An adapter that was never trained has B = 0, and changes nothing.
    return update if update["update"].any() else {}
