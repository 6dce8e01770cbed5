"""What a pipeline stage computes in half a tick: a chunk of layers, and at the ends the embedding or the head."""

import functools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtjax.layout.rules import STAGE
from mtjax.layout.timetable import Half, Timetable
from mtjax.sharding.axes import varying_like
from mtjax.sharding.gradients import AddsInBackward, LossSums, with_accumulators
from mtjax.sharding.param_comm import differentiable_shards, with_shards
from mtjax.sharding.pipeline.model import PipelineModel
from mtjax.sharding.pipeline.order import Order
from mtjax.sharding.pipeline.residuals import Linearize
from mtjax.sharding.pipeline.stage_transfer import send, unpacked
from mtjax.sharding.rank_values import cond_by_stage
from mtjax.sharding.zero import materialize_outside_stacks

Tree = Any


class TickWork(NamedTuple):
    """The work of this rank in half a tick: `Work`, traced, and the arrays of its microbatch."""

    batch: Tree
    """The microbatch, arrays [samples, ...]."""
    microbatch: Array
    """Its index."""
    chunk: Array
    slot: Array
    """The last one, which nothing reads, where the work does not count."""
    counts: Array
    """Whether this stage has work in this half; an idle stage computes the same, and its results are dropped."""
    zero: Array | int
    """A 0 (`Order.zero`) that depends on everything before this half."""


class StageWork:
    """The model on one stage: a rank's parameters and microbatches, and the parts that its ticks run."""

    def __init__(
        self, model: PipelineModel, records: Tree, wrapped: Tree, microbatches: Tree, table: Timetable, order: Order
    ) -> None:
        """Binds a rank's parameters and microbatches to a timetable; traced inside the manual region."""
        self.model, self.records, self.wrapped, self.table, self.order = model, records, wrapped, table, order
        self.microbatches, self.stage = microbatches, lax.axis_index(STAGE)
        # The first tick waits for the parameters: gathers of ZeRO before it are collectives, too.
        self.start_zero = order.zero(wrapped, microbatches)
        self.sections = len(model.sections)
        # Chunks of a section on each stage; the timetable counts those of all sections.
        self.chunks = table.chunks // self.sections
        self.shards = differentiable_shards(wrapped)
        first = jax.tree.map(lambda a: a[0], microbatches)
        # Zeros: what a stage computes with before its first boundary arrives.
        self.boundary = jax.tree.map(jnp.zeros_like, model.boundary(self._parameters(self.shards), first))

    # --- parts of the model

    def _chunk_input(self, section: int, boundary: Tree, work: TickWork) -> Tree:
        """Returns the input of a chunk: `embed`'s result for a section's first chunk, else the received boundary."""
        embed = lambda boundary: self.model.embed(  # noqa: E731
            section, self._parameters(self.shards), boundary, work.batch
        )
        return cond_by_stage(self._is_first_chunk(section, work), embed, lambda boundary: boundary, boundary)

    def _run_chunk(
        self, section: int, shards: Tree, start: Tree, work: TickWork, accumulators: Tree = None
    ) -> tuple[Tree, LossSums]:
        """Runs a chunk's layers: the boundary after them, and the losses of their routers."""
        # The timetable numbers the chunks of all sections, the model those of each.
        chunk = work.chunk - section * self.chunks
        return self.model.forward_layers(
            section, self._parameters(shards, accumulators, section), start, work.batch, self.stage, chunk
        )

    def _head_losses(self, boundary: Tree, work: TickWork, shards: Tree = None) -> LossSums:
        parameters = self._parameters(self.shards if shards is None else shards)
        return self.model.head_losses(parameters, boundary, work.batch)

    def _linearize(self, accumulators: Tree, work: TickWork, shards: Tree) -> Linearize:
        """Returns `jax.vjp` of chunks with these parameters; gradients of stacks come out added to `accumulators`."""
        chunk = self._run_chunk
        return lambda section, start: jax.vjp(
            lambda shards, start: chunk(section, shards, start, work, accumulators), shards, start
        )

    def _parameters(self, shards: Tree, accumulators: Tree = None, section: int = 0) -> Tree:
        """Returns parameters for the model.

        Args:
          shards: the arrays to differentiate by.
          accumulators: to which the gradients of the section's layers are added in place; None for none.
          section: its index.
        """
        wrapped = with_shards(self.wrapped, shards)
        if accumulators is not None:
            wrapped = with_accumulators(self.records, wrapped, accumulators, self._is_of_section(section))
        return materialize_outside_stacks(self.records, wrapped)

    def _is_of_section(self, section: int) -> AddsInBackward:
        """Returns a predicate: whether a parameter is one of a section's layers."""
        names = tuple(f"{name}." for name in self.model.sections[section])
        return lambda record: record.is_stacked and record.name.startswith(names)

    def _add_outside_stacks(self, accumulators: Tree, gradients: Tree) -> Tree:
        """Adds the gradients of parameters outside the stacks to their accumulators."""
        add = lambda record, total, g: total if record.is_stacked else total + g.astype(jnp.float32)  # noqa: E731
        return jax.tree.map(add, self.records, accumulators, gradients)

    def _zero_losses(self) -> LossSums:
        """Builds float32 zeros with the names and shapes of all losses and counters."""
        batch, like = jax.tree.map(lambda a: a[0], self.microbatches), jax.tree.leaves(self.boundary)[0]
        zero = jnp.zeros((), jnp.int32)
        first = TickWork(batch, zero, zero, zero, zero > 0, 0)

        def losses() -> LossSums:
            of_layers = [self._run_chunk(i, self.shards, self.boundary, first)[1] for i in range(self.sections)]
            return functools.reduce(operator.or_, of_layers, self._head_losses(self.boundary, first))

        # A loop's carry has one type: losses of zero vary over the same ranks as those that are added.
        zeros = lambda a: varying_like(jnp.zeros(a.shape, jnp.float32), like)  # noqa: E731
        return jax.tree.map(zeros, jax.eval_shape(losses))

    # --- half ticks

    def _rows(self, halves: tuple[Half, ...]) -> Array:
        """Encodes halves of a timetable as int32 [ticks, stages, 4]: microbatch, chunk, slot, whether it counts."""
        idle = (0, 0, self.table.slots, 0)
        rows = [[idle if work is None else (*work, 1) for work in half] for half in halves]
        return jnp.asarray(np.asarray(rows, np.int32))

    def _tick_work(self, row: Array, after: Tree = None) -> TickWork:
        """Reads this stage's work off a row [stages, 4]; where an order is needed, it depends on the arrays `after`."""
        zero = self.start_zero + self.order.zero(after)
        # In an idle half microbatch and chunk are 0 (`idle` above): valid indices, whose results are dropped.
        microbatch, chunk, slot, counts = row[self.stage] + zero
        pick = lambda a: lax.dynamic_index_in_dim(a, microbatch, keepdims=False)  # noqa: E731
        return TickWork(jax.tree.map(pick, self.microbatches), microbatch, chunk, slot, counts > 0, zero)

    def _is_first_chunk(self, section: int, work: TickWork) -> Array:
        """Returns whether the chunk is the first of a section."""
        return (self.stage == 0) & (work.chunk == section * self.chunks)

    def _is_last_chunk(self, work: TickWork) -> Array:
        """Returns whether the chunk is the last of the model."""
        return (self.stage == self.table.stages - 1) & (work.chunk == self.table.chunks - 1)

    def _switch_section(self, work: TickWork, run: Callable[..., tuple[Any, ...]], *state: Any) -> tuple[Any, ...]:
        """Runs `run(section, *state)`, which returns the new state, for the section to which the chunk belongs."""
        if self.sections == 1:
            return run(0, *state)
        # XLA: of one `lax.switch` over all sections, it copies arrays that an earlier branch updates and a later one
        # passes on, such as the gradients of an entire stack. So each section has a conditional, one after the other.
        for section in range(self.sections):
            is_other = work.chunk // self.chunks != section
            state = cond_by_stage(is_other, lambda *unchanged: unchanged, partial(run, section), *state)
        return state

    def _received(self, boundary: Tree, work: TickWork) -> Tree:
        """Unpacks a received boundary for a half tick."""
        return unpacked(self.order.waiting(boundary, work.zero), self.boundary)

    def _send(self, boundary: Tree, by: int) -> Tree:
        return send(boundary, by, wraps=self.table.chunks > 1)
