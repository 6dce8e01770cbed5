"""Steps that were skipped, because their loss or gradients were not finite, and when they end a run.

The host checks when it logs, for every step since the last check, so it names the first one exactly.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mtjax.config import Training
from mtjax.train.optimizer import (
    ALL_FINITE,
    CheckedTensor,
    LayerNumbersOf,
    backwards,
    norm_and_first_bad,
    tensors_in_tree_order,
)
from mtjax.train.step import TrainStep

Tree = Any

MOST_WAITING = 1000
"""Steps after which the host checks even if nothing is logged: until then the results stay on the devices."""


@dataclass(frozen=True)
class SkippedStep:
    """A step that was skipped."""

    step: int
    samples: range
    """Indices of its global batch, counted over the run."""
    loss: float
    tensor: CheckedTensor | None
    """The first tensor whose gradient is not finite; None if only the loss or the global norm is not."""

    def __str__(self) -> str:
        if self.tensor is not None:
            gradient = f" and the first gradient that is not finite is that of {self.tensor}"
        else:
            gradient = ", with finite gradients" + (" of a norm that is not" if math.isfinite(self.loss) else "")
        return f"its loss is {self.loss:g}{gradient} (samples {self.samples[0]} to {self.samples[-1]})"


class NonfiniteSteps:
    """Tracks the skipped steps of a run, and detects when there are too many in a row.

    Args:
      training: limits the skipped steps in a row, and configures the loss scale.
      tensors: the model's `tensors`.
    """

    def __init__(self, training: Training, tensors: Sequence[CheckedTensor]) -> None:
        self.training, self.tensors = training, tensors
        self.in_a_row: list[SkippedStep] = []
        """The last steps, as far as they were skipped."""
        self._waiting: list[tuple[int, range, dict[str, Any]]] = []

    def add(self, step: int, samples: range, results: Mapping[str, Any]) -> None:
        """Queues a step's results, which may still be being computed; does not wait for them."""
        # No other results, such as the load of experts: what is queued stays on the devices.
        checked = {name: results[name] for name in ("loss", "first_bad", "loss_scale") if name in results}
        self._waiting.append((step, samples, checked))

    @property
    def is_full(self) -> bool:
        """Whether so many steps are queued that they should be checked."""
        return len(self._waiting) >= MOST_WAITING

    @property
    def are_too_many(self) -> bool:
        """Whether so many steps in a row were skipped that the run must end."""
        return len(self.in_a_row) >= self.training.max_nonfinite_steps

    def check(self) -> list[SkippedStep]:
        """Checks the steps since the last check, until there are too many; returns those that were skipped."""
        new = []
        waiting, self._waiting = self._waiting, []
        # One transfer for all steps.
        fetched = jax.device_get([results for _, _, results in waiting])
        for (step, samples, _), results in zip(waiting, fetched, strict=True):
            index, loss = int(results["first_bad"]), float(results["loss"])
            if index == ALL_FINITE:
                self.in_a_row = []
            # Overflows of float16 are not failures while the dynamic loss scale can shrink: that is how it is found.
            elif not self._is_scaling(loss, results.get("loss_scale")):
                new.append(SkippedStep(step, samples, loss, self.tensors[index] if index < len(self.tensors) else None))
                self.in_a_row.append(new[-1])
                # Later steps do not matter: the run ends here.
                if self.are_too_many:
                    break
        return new

    def _is_scaling(self, loss: float, scale: Any) -> bool:
        """Returns whether an overflow only means that the dynamic loss scale is too large."""
        if scale is None or self.training.loss_scale is not None:
            return False
        return math.isfinite(loss) and float(scale) > self.training.min_loss_scale


def tensors(records: Tree, numbers_of: LayerNumbersOf = lambda _: ()) -> list[CheckedTensor]:
    """Lists the tensors of a model in the order of the backward pass; `first_bad` is an index into this list.

    Layers come from the last to the first, then the parameters outside of layers.

    Args:
      records: `ParamSpec` of every trained parameter.
      numbers_of: the numbers of the layers that an array stacks, by its name; () for 0, 1, 2 ...
    """
    in_tree_order = tensors_in_tree_order(records, numbers_of)
    # A cotangent that overflows in a layer makes the gradients of all layers before it nonfinite: the first one in the
    # order of the backward pass is nearest to the cause.
    return [in_tree_order[i] for i in backwards(in_tree_order)]


def tensors_of(program: TrainStep) -> list[CheckedTensor]:
    """Lists the tensors that a step's `first_bad` indexes."""
    return tensors(program.trainable_records, program.layer_numbers)


def first_bad(scalar: Array, values: Tree, records: Tree, numbers_of: LayerNumbersOf = lambda _: ()) -> Array:
    """Returns the index of the first tensor that is not finite; see `norm_and_first_bad`. The norm may overflow."""
    return norm_and_first_bad(scalar, values, records, numbers_of, norm_may_overflow=True)[1]


def bad_parameter(program: TrainStep, parameters: Tree) -> CheckedTensor | None:
    """Returns a trained parameter that is not finite; None if all are finite."""

    def find(parameters: Tree) -> Array:  # finite values become 0, as squares may overflow
        bad = jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), 0.0, a), program.optimized(parameters))
        return first_bad(jnp.zeros(()), bad, program.trainable_records, program.layer_numbers)

    index = int(program.on_mesh(jax.jit(find), parameters))
    return None if index == ALL_FINITE else tensors_of(program)[index]
