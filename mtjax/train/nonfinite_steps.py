"""Steps with a loss or gradients that are not finite: which tensor was first, and when such steps end a run.

The devices find out before a step changes anything (`first_bad`), and all of them skip it. The host checks when it logs
(`BadSteps`), every step since the last check, so that it names the first one exactly.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.config import Training
from mtjax.sharding.axes import shard_like_rows
from mtjax.sharding.placement import min_over_shards
from mtjax.theory.families.decoder import DENSE, STACK
from mtjax.theory.layout import LAYERS

Tree = Any

Numbers = Callable[[str], Sequence[int]]

GOOD = -1
"""What `first_bad` says when everything is finite."""
MOST_WAITING = 1000
"""Steps after which the host looks even where nothing is logged: until then their numbers stay on the devices."""


@dataclass(frozen=True)
class Tensor:
    """A parameter, or one layer of a stacked one."""

    name: str
    """Dotted."""
    layer: int | None = None
    """Its number, counted from 0."""

    def __str__(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"


def tensors(records: Tree, numbers_of: Numbers = lambda _: ()) -> list[Tensor]:
    """The tensors of a model in the order in which the backward pass meets them; `first_bad` counts so.

    Layers come from the last to the first, then parameters outside of them. A cotangent that overflows in a layer
    spoils the gradients of the layers before it, so the first in this order is nearest to the origin.

    Args:
      records: of every parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...
    """
    in_tree_order = _in_tree_order(records, numbers_of)
    return [in_tree_order[i] for i in _backwards(in_tree_order)]


def first_bad(scalar: Array, values: Tree, records: Tree, numbers_of: Numbers = lambda _: ()) -> Array:
    """The place in `tensors` of the first that is not finite, an int32 that is the same on every device.

    A tensor counts as finite when a quarter of the sum of squares of each device's part is.

    Args:
      scalar: has to be finite too. When only this is not, the answer is the number of tensors.
      values: gradients or parameters, wherever they live.
      records: of every parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...

    Returns:
      `GOOD` when everything is finite.
    """
    in_tree_order = _in_tree_order(records, numbers_of)
    leaves = jax.tree.leaves(values)
    stacked = [record.is_stacked for record in jax.tree.leaves(records)]
    counts = [a.shape[0] if is_stack else 1 for a, is_stack in zip(leaves, stacked, strict=True)]
    places = np.split(np.argsort(_backwards(in_tree_order)).astype(np.int32), np.cumsum(counts)[:-1])
    # A device that has only some layers of an array needs only their places.
    spread = [shard_like_rows(p, a) if is_stack else p for p, a, is_stack in zip(places, leaves, stacked, strict=True)]

    def first_of(parts: tuple[list[Array], list[Array]]) -> Array:
        firsts = []
        for a, place, is_stack in zip(*parts, stacked, strict=True):
            # Of each layer, or of the one array. Halved, for XLA on CPUs would share the norm's squares, and so write
            # them all out.
            squares = jnp.square(a / 2).sum(axis=tuple(range(is_stack, a.ndim)))
            firsts.append(jnp.where(jnp.isfinite(squares), len(in_tree_order), place))
        return jnp.concatenate(firsts).min()

    first = min_over_shards(first_of, (leaves, spread))
    return jnp.where((first == len(in_tree_order)) & jnp.isfinite(scalar), GOOD, first).astype(jnp.int32)


def _in_tree_order(records: Tree, numbers_of: Numbers) -> list[Tensor]:
    named: list[Tensor] = []
    for record in jax.tree.leaves(records):
        layers: Sequence[int | None] = [None]
        if record.is_stacked:  # on stages there may be places without a layer
            numbers, rows = numbers_of(record.name), range(record.shape[0])
            layers = numbers if len(numbers) == len(rows) else rows
        named += [Tensor(record.name, layer) for layer in layers]
    return named


def _backwards(in_tree_order: Sequence[Tensor]) -> list[int]:
    """Places in `in_tree_order` in the order of `tensors`; a decoder's stack comes before an encoder's."""

    def key(place: int) -> tuple[bool, str, int, int]:
        tensor = in_tree_order[place]
        if tensor.layer is None:
            return True, "", 0, place
        stack = tensor.name.partition(f".{LAYERS}.")[0]
        return False, "" if stack in (STACK, DENSE) else stack, -tensor.layer, place

    return sorted(range(len(in_tree_order)), key=key)


@dataclass(frozen=True)
class SkippedStep:
    """A step that changed nothing."""

    step: int
    samples: range
    """Of its global batch, counted over the run."""
    loss: float
    tensor: Tensor | None
    """The first whose gradient was not finite; None when the loss, or the norm of all gradients, alone was not."""

    def __str__(self) -> str:
        if self.tensor is not None:
            gradient = f" and the first gradient that is not finite is that of {self.tensor}"
        else:
            gradient = ", with finite gradients" + (" of a norm that is not" if math.isfinite(self.loss) else "")
        return f"its loss is {self.loss:g}{gradient} (samples {self.samples[0]} to {self.samples[-1]})"


class NonfiniteSteps:
    """Follows the steps of a run, and knows when too many in a row were skipped.

    Args:
      training: says how many are too many, and how float16 is scaled.
      named: the model's `tensors`.
    """

    def __init__(self, training: Training, named: Sequence[Tensor]) -> None:
        self.training, self.tensors = training, named
        self.in_a_row: list[SkippedStep] = []
        """The last steps, as far as they were skipped."""
        self._waiting: list[tuple[int, range, dict[str, Any]]] = []

    def add(self, step: int, samples: range, results: Mapping[str, Any]) -> None:
        """Notes a step's results, which may still be being computed; does not wait for them."""
        kept = {name: results[name] for name in ("loss", "first_bad", "loss_scale") if name in results}
        self._waiting.append((step, samples, kept))

    @property
    def is_full(self) -> bool:
        """Whether so many steps are waiting that it is time to look."""
        return len(self._waiting) >= MOST_WAITING

    @property
    def are_too_many(self) -> bool:
        """Whether so many steps in a row were skipped that the run must end."""
        return len(self.in_a_row) >= self.training.max_nonfinite_steps

    def check(self) -> list[SkippedStep]:
        """Looks at the steps since the last time, up to the one at which they are too many; returns those skipped.

        float16 overflows are not reported while the loss scale can still shrink; that is how the scale is found.
        """
        new = []
        waiting, self._waiting = self._waiting, []
        fetched = jax.device_get([results for _, _, results in waiting])
        for (step, samples, _), results in zip(waiting, fetched, strict=True):
            place, loss = int(results["first_bad"]), float(results["loss"])
            if place == GOOD:
                self.in_a_row = []
            elif not self._is_scaling(loss, results.get("loss_scale")):
                new.append(SkippedStep(step, samples, loss, self.tensors[place] if place < len(self.tensors) else None))
                self.in_a_row.append(new[-1])
                if self.are_too_many:
                    break
        return new

    def _is_scaling(self, loss: float, scale: Any) -> bool:
        """Whether an overflow only means that a dynamic loss scale is too large."""
        if scale is None or self.training.loss_scale is not None:
            return False
        return math.isfinite(loss) and float(scale) > self.training.min_loss_scale
