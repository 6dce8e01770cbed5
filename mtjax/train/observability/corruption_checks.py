"""Detection of silent data corruption: a device that computes or stores wrong values without an error.

Replicas, such as parameters on data parallel ranks, must be bitwise equal, and so must two computations of a step from
the same state and batch. Each device computes fingerprints of its own shards; only these numbers are communicated.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mtjax.errors import UserError
from mtjax.models.sharded_model import GlobalBatch
from mtjax.runtime.checkpoints.checkpoint import hash_of, names_of, state_arrays
from mtjax.runtime.train_state import State
from mtjax.sharding.replicas import holders, map_shards
from mtjax.train.step import TrainStep

ADVICE = "a device, its memory or a link is faulty, or an operation is not deterministic; this state was not saved: \
remove the machine, and resume from the last checkpoint with --resume"
NAMED = 3
"""Maximum number of differences that an error lists."""


class CorruptionChecks:
    """Checks every `check_replicas`-th step of a run, and its state before each save; does nothing if it is 0."""

    def __init__(self, program: TrainStep) -> None:
        self._program, self._every = program, program.config.training.check_replicas
        self._devices = list(program.mesh.devices.flat)

    def is_due(self, step: int) -> bool:
        """Returns whether `check_step` checks a step."""
        return self._every > 0 and step % self._every == 0

    def check_step(self, step: int, state: State, batch: GlobalBatch) -> None:
        """Computes a step twice, and compares gradients, parameters and optimizer state.

        Raises:
          UserError: the two computations, or replicas, differ.
        """
        if not self.is_due(step):
            return
        # First: a step from states that differ would blame its own computation.
        self.check_state(step, state)
        # Fetched one after the other, so that both do not need memory at the same time.
        first, second = (np.asarray(self._rows_of_step(state, batch)) for _ in range(2))
        differing = [(device, self._names_of_step[n]) for device, n in np.argwhere(first != second)]
        if differing:
            self._end(step, differing, "two computations of the step differ on {}")
        self._compare(step, self._names_of_step, first, self._replicas_of_step)

    def check_state(self, step: int, state: State) -> None:
        """Compares the replicas of a state.

        Raises:
          UserError: replicas differ.
        """
        if self._every:
            tree = state_arrays(state)
            rows = np.asarray(self._program.on_mesh(_rows, tree))
            self._compare(step, names_of(tree), rows, [holders(a) for a in jax.tree.leaves(tree)])

    def _rows_of_step(self, state: State, batch: GlobalBatch) -> Array:
        return self._program.on_mesh(self._compiled, state, batch)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(
            # With the options of the step, as other ones may choose other kernels, with other roundings.
            lambda *of: _fingerprints(self._step_results(*of)),
            compiler_options=self._program.xla.options or None,
        )

    def _step_results(self, state: State, batch: GlobalBatch) -> dict[str, Any]:
        """Computes all results of a step."""
        # Inside the program whose fingerprints they are: only these leave it, so few of the arrays are ever stored.
        loss, parts, gradients = self._program.gradients(*self._program.gradient_inputs(state, batch))
        following, _ = self._program.apply_gradients(state, batch, loss, parts, gradients)
        return {"gradients": gradients, **state_arrays(following)}

    @cached_property
    def _abstract(self) -> dict[str, Any]:
        program = self._program
        return program.on_mesh(
            jax.eval_shape, self._step_results, program.abstract_state, program.abstract_step_batch()
        )

    @cached_property
    def _names_of_step(self) -> list[str]:
        return names_of(self._abstract)

    @cached_property
    def _replicas_of_step(self) -> list[list[list[int]]]:
        return [holders(_on(self._program.mesh, a)) for a in jax.tree.leaves(self._abstract)]

    def _compare(self, step: int, names: Sequence[str], rows: np.ndarray, parts: list[list[list[int]]]) -> None:
        differing, is_tie = [], False
        for name, replicas, numbers in zip(names, parts, rows.T, strict=True):
            for devices in replicas:
                counts = Counter(numbers[devices].tolist()).most_common(2)
                if len(counts) == 1:
                    continue
                # Majority vote: the devices with another value than most replicas are the faulty ones.
                (most, holding), (_, next_most) = counts
                is_tie |= holding == next_most  # as with two replicas: it is unknown which one is wrong
                differing += [(device, name) for device in devices if holding == next_most or numbers[device] != most]
        if differing:
            outvoted = "replicas differ from the majority on {}"
            self._end(step, differing, "replicas differ between {}" if is_tie else outvoted)

    def _end(self, step: int, differing: list[tuple[int, str]], what: str) -> None:
        named = [f"{self._device(device)}: {name}" for device, name in differing[:NAMED]]
        more = f" and {len(differing) - NAMED} more" if differing[NAMED:] else ""
        raise UserError(f"at step {step} {what.format('; '.join(named))}{more}; {ADVICE}")

    def _device(self, index: int) -> str:
        device = self._devices[index]
        return f"process {device.process_index}, device {device.id}"


def _on(mesh: Any, abstract: Any) -> Any:
    """Replaces the mesh of a traced program's abstract array by one of real devices."""
    sharding = jax.sharding.NamedSharding(mesh, abstract.sharding.spec)
    return jax.ShapeDtypeStruct(abstract.shape, abstract.dtype, sharding=sharding)


def _fingerprints(tree: Any) -> Array:
    return map_shards(lambda parts: jnp.stack([hash_of(a) for a in jax.tree.leaves(parts)]), tree)


_rows = jax.jit(_fingerprints)
