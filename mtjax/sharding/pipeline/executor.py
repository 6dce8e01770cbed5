"""Runs a pipeline schedule: each rank along `stage` has some of the layers, and works by a timetable.

The loop over ticks takes derivatives explicitly, with `jax.vjp` inside a tick. Autodiff of the loop would run all
forward passes before all backward passes, whatever the timetable (and does not lower on jax 0.10 to 0.12). For its
backward half, a forward half saves either its input alone, from which the chunk is recomputed (full recompute), or the
residuals of autodiff without the parameters.

All stages run one program, and read their work off the timetable; in a half in which a stage is idle, it works on a
microbatch that does not count. The embedding and the head are in branches that only the first or the last stage takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from mtjax.config import Config
from mtjax.layout.timetable import Phase, Timetable, forward_timetable, timetable
from mtjax.sharding.axes import context_axes
from mtjax.sharding.gradients import LossFunction, LossSums, add_microbatch, in_microbatches, zeros_like_shards
from mtjax.sharding.pipeline.model import PipelineModel
from mtjax.sharding.pipeline.order import Order
from mtjax.sharding.pipeline.residuals import (
    RecomputeChunk,
    ResidualPolicy,
    SaveResiduals,
    in_slots,
    put_in_slot,
    take_from_slot,
)
from mtjax.sharding.pipeline.stage_transfer import packed, sum_from_owner
from mtjax.sharding.pipeline.stage_work import StageWork, TickWork
from mtjax.sharding.rank_values import cond_by_stage
from mtjax.sharding.zero import StepReduction, gather_for_step, wrap_for_inference

Tree = Any


@dataclass(frozen=True)
class PipelineSchedule:
    """Computes gradients by a training timetable, and losses by a forward one."""

    training: Timetable
    evaluation: Callable[[int], Timetable]
    """Of a number of microbatches."""
    microbatch_size: int | None
    """Samples per rank and microbatch in evaluation; a single microbatch when None, or where they don't divide."""
    keeps_inputs: bool
    """Whether stages save only the input of a chunk, and recompute the chunk in its backward half."""
    order: Order
    """Of collectives: by data dependencies on platforms whose runtime has none (`mtjax.sharding.pipeline.order`)."""

    @classmethod
    def of(cls, config: Config, stages: int, num_microbatches: int, sections: int, platform: str) -> "PipelineSchedule":
        """Returns a config's schedule for a model with this number of sections."""
        # The timetable knows no sections: a model with two has twice the chunks, those of the first section first.
        chunks = config.parallel.chunks * sections
        return cls(
            timetable(config.parallel.pipeline_schedule, stages, num_microbatches, chunks),
            partial(forward_timetable, stages, chunks=chunks),
            config.training.microbatch_size,
            keeps_inputs=config.training.recompute == "full",
            order=Order(is_needed=platform == "cpu"),
        )

    def gradients(
        self, loss_function: LossFunction, parameters: Tree, batch: Tree, step_reduction: StepReduction
    ) -> tuple[LossSums, Tree]:
        """See `Accumulate.gradients`."""
        wrapped = self.prepare_parameters(step_reduction.records, step_reduction.wrap(parameters))
        microbatches = in_microbatches(batch, self.training.microbatches)
        run = _Run(
            cast(PipelineModel, loss_function), step_reduction.records, wrapped, microbatches, self.training, self.order
        )
        return run.gradients(keeps_inputs=self.keeps_inputs)

    def prepare_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """See `Accumulate.prepare_parameters`: a chunk's layers are scanned, so stacks stay stacked."""
        return gather_for_step(records, wrapped)

    def losses(self, loss_function: LossFunction, parameters: Tree, batch: Tree, records: Tree) -> LossSums:
        """See `Accumulate.losses`."""
        return self._evaluation_run(loss_function, parameters, batch, records).losses()

    def final_boundary(self, loss_function: LossFunction, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """Computes the hidden states behind the last layer."""
        return self._evaluation_run(loss_function, parameters, batch, records).output()

    def _evaluation_run(self, loss_function: LossFunction, parameters: Tree, batch: Tree, records: Tree) -> "_Run":
        """Divides a batch, arrays [samples, ...], into microbatches, and gathers parameters for them."""
        samples = jax.tree.leaves(batch)[0].shape[0]
        size = self.microbatch_size or samples
        # A last validation batch may have any size: it is evaluated in one microbatch.
        count = samples // size if samples % size == 0 else 1
        wrapped = gather_for_step(records, wrap_for_inference(records, parameters))
        return _Run(
            cast(PipelineModel, loss_function),
            records,
            wrapped,
            in_microbatches(batch, count),
            self.evaluation(count),
            self.order,
        )


def _add_losses(losses: LossSums, added: LossSums, counts: Array | bool = True) -> LossSums:
    """Adds the losses of a part of the model to those with the same names, if they count."""
    # A select, not a product with 0: what an idle half computes from zeros may be infinite or NaN.
    return losses | {name: losses[name] + jnp.where(counts, value, 0) for name, value in added.items()}


def _loss_cotangents(losses: LossSums, counts: Array) -> LossSums:
    """Returns the derivatives of the total loss by a chunk's losses: 1, or 0 for counters and for idle halves."""
    # Losses are scalars; arrays are counters, such as the tokens of each expert, and have no gradient.
    return {name: jnp.where(counts & (not value.ndim), jnp.ones_like(value), 0) for name, value in losses.items()}


class _Carry(NamedTuple):
    """The carry of the loop over ticks. Boundaries are stage-boundary activations, [batch, seq, embed] each."""

    boundary: Tree
    """Received from the chunk before; packed."""
    gradient: Tree
    """Of the boundary that this rank's last backward half received; packed, and not sent yet."""
    chunk_inputs: Tree
    """By slot: each chunk's input; after the first section, the boundary from which it is computed."""
    residuals: Tree
    """By slot: what the `ResidualPolicy` saves."""
    accumulators: Tree
    """Gradient accumulators, float32."""
    losses: LossSums


class _Run(StageWork):
    """A timetable applied to one rank's parameters and microbatches."""

    # --- losses alone

    def losses(self) -> LossSums:
        """Computes the losses of all microbatches, forward only."""
        none = self._zero_losses()

        def tick(carry: tuple[Tree, LossSums], row: Array) -> tuple[tuple[Tree, LossSums], None]:
            """Receives a boundary, runs a chunk, adds the losses, and sends the boundary after the chunk."""
            (boundary, losses), work = carry, self._tick_work(row, carry)
            boundary, losses = self._forward_chunk(self._received(boundary, work), work, losses)
            with_head = lambda losses: _add_losses(losses, self._head_losses(boundary, work))  # noqa: E731
            is_last = self.order.when(self._is_last_chunk(work) & work.counts, boundary, losses)
            losses = cond_by_stage(is_last, with_head, lambda losses: losses, losses)
            return (self._send(packed(self.order.after(boundary, losses)), 1), losses), None

        (_, losses), _ = lax.scan(tick, (packed(self.boundary), none), self._rows(self.table.forward))
        return losses

    def output(self) -> Tree:
        """Computes the last chunk's output of all microbatches: arrays [samples, ...], on every stage."""
        count = jax.tree.leaves(self.microbatches)[0].shape[0]

        def tick(carry: tuple[Tree, Tree], row: Array) -> tuple[tuple[Tree, Tree], None]:
            """Receives a boundary, runs a chunk, and stores the last chunk's output by microbatch."""
            (boundary, out), work = carry, self._tick_work(row, carry[0])
            boundary, _ = self._forward_chunk(self._received(boundary, work), work, {})
            is_last = self._is_last_chunk(work) & work.counts
            # float32, because only the last stage has an output, and `joined` adds the zeros of all other stages.
            new = jax.tree.map(lambda a: a.astype(jnp.float32), boundary)
            # All other halves write to the last slot, which is dropped below: no branch around a write.
            slot = jnp.where(is_last, work.microbatch, count)
            return (self._send(packed(boundary), 1), put_in_slot(out, slot, new)), None

        def joined(slots: Array, like: Array) -> Array:
            return sum_from_owner(slots[:count].reshape(-1, *like.shape[1:])).astype(like.dtype)

        empty = jax.tree.map(lambda a: in_slots(a.astype(jnp.float32), count), self.boundary)
        (_, out), _ = lax.scan(tick, (packed(self.boundary), empty), self._rows(self.table.forward))
        return jax.tree.map(joined, out, self.boundary)

    def _forward_chunk(self, boundary: Tree, work: TickWork, losses: LossSums) -> tuple[Tree, LossSums]:
        """Runs a chunk: the boundary after it, and losses with those of its layers."""

        def of_section(section: int, boundary: Tree, losses: LossSums) -> tuple[Tree, LossSums]:
            start = self._chunk_input(section, boundary, work)
            boundary, added = self._run_chunk(section, self.order.after(self.shards, start), start, work)
            return boundary, _add_losses(losses, added, work.counts)

        return self._switch_section(work, of_section, boundary, losses)

    # --- losses and gradients

    def gradients(self, *, keeps_inputs: bool) -> tuple[LossSums, Tree]:
        """Computes losses and gradients of all microbatches.

        Args:
          keeps_inputs: whether stages save only the input of a chunk, and recompute the chunk.

        Returns:
          The losses, summed over microbatches, and float32 gradients, both of this rank's samples.
        """
        accumulators = zeros_like_shards(self.shards)
        chunk_inputs = jax.tree.map(lambda a: in_slots(a, self.table.slots), self.boundary)
        forward, backward = self._rows(self.table.forward), self._rows(self.table.backward)
        policy: ResidualPolicy = RecomputeChunk()
        if not keeps_inputs:
            # Traced once, for the shapes of residuals; the compiler removes this computation.
            linearize = self._linearize(accumulators, self._tick_work(forward[0]), self.shards)
            policy = SaveResiduals.of(self.sections, self.table.slots, self.boundary, linearize)
        empty = packed(self.boundary), packed(self.boundary)
        carry = _Carry(*empty, chunk_inputs, policy.empty(), accumulators, self._zero_losses())
        # One loop for each phase, whose body has the halves of that phase alone: no tick runs a half in which all
        # stages idle.
        for phase in self.table.phases:
            rows = (forward[phase.start : phase.stop], backward[phase.start : phase.stop])
            carry, _ = lax.scan(partial(self._tick, policy, phase), carry, rows)
        # Nothing reads the last gradient, so nothing may be ordered after it: it would be computed for that alone.
        return self.order.after((carry.losses, carry.accumulators), carry._replace(gradient=()))

    # `phase` is static: consecutive ticks with the same halves are one `lax.scan`. A schedule has a warm-up of forward
    # halves alone, a steady state with both, and a cool-down of backward halves alone.
    def _tick(
        self, policy: ResidualPolicy, phase: Phase, carry: _Carry, rows: tuple[Array, Array]
    ) -> tuple[_Carry, None]:
        """Runs a forward and a backward half."""
        if phase.backward:
            # Sent at the start of the tick, where the forward half overlaps the permute.
            gradient = self.order.after(carry.gradient, carry.accumulators, carry.losses)
            carry = carry._replace(gradient=self._send(gradient, -1))
        if phase.forward:
            work = self._tick_work(rows[0], (carry.boundary, carry.gradient))
            forward, received = (
                partial(self._forward, policy, work, carry.accumulators),
                self._received(carry.boundary, work),
            )
            boundary, chunk_inputs, residuals = self._switch_section(
                work, forward, received, carry.chunk_inputs, carry.residuals
            )
            # Between the halves, the activations and the received gradients wait for each other. It costs nothing,
            # because the backward half needs these gradients anyway.
            # XLA: without the barrier it may compute the backward half first, have both permutes in flight at a time,
            # or merge the all-gathers of the received arrays; then neither permute is overlapped.
            out, gradient = lax.optimization_barrier((packed(boundary), carry.gradient))
            # The backward half overlaps this permute.
            carry = carry._replace(
                gradient=gradient, boundary=self._send(out, 1), chunk_inputs=chunk_inputs, residuals=residuals
            )
        if phase.backward:
            work = self._tick_work(rows[1], (carry.boundary, carry.gradient))
            backward = partial(self._backward, policy, work, carry.chunk_inputs, carry.residuals)
            received = self._received(carry.gradient, work)
            gradient, accumulators, losses = self._switch_section(
                work, backward, received, carry.accumulators, carry.losses
            )
            carry = carry._replace(gradient=packed(gradient), accumulators=accumulators, losses=losses)
        return carry, None

    def _forward(
        self,
        policy: ResidualPolicy,
        work: TickWork,
        accumulators: Tree,
        section: int,
        boundary: Tree,
        chunk_inputs: Tree,
        residuals: Tree,
    ) -> tuple[Tree, Tree, Tree]:
        """Runs the forward half of a chunk.

        Args:
          policy: saves residuals.
          work: of this half.
          accumulators: of gradients; only their shapes matter here.
          section: of the chunk.
          boundary: received from the chunk before, [batch, seq, embed] arrays.
          chunk_inputs: by slot.
          residuals: by slot.

        Returns:
          The boundary after the chunk, and `chunk_inputs` and `residuals` with this microbatch's in `work.slot`.
        """
        start = self._chunk_input(section, boundary, work)
        shards = self.order.after(self.shards, start)
        # A later section keeps the boundary: in the backward half `embed` is differentiated by it, and `start`
        # recomputed from it.
        chunk_inputs = put_in_slot(chunk_inputs, work.slot, start if section == 0 else boundary)
        can_skip = isinstance(policy, RecomputeChunk) and not context_axes()
        if can_skip and section == self.sections - 1:
            # The backward half recomputes the last chunk and its losses, and no stage receives its output: skip it. Not
            # with context parallelism: a collective-permute needs all devices, also those of other stages.
            chunk = lambda: self._run_chunk(section, shards, start, work)[0]  # noqa: E731
            return cond_by_stage(self._is_last_chunk(work), lambda: start, chunk), chunk_inputs, residuals
        linearize = self._linearize(accumulators, work, shards)
        (out, _), residuals = policy.put(section, residuals, work.slot, start, linearize)
        return out, chunk_inputs, residuals

    def _backward(
        self,
        policy: ResidualPolicy,
        work: TickWork,
        chunk_inputs: Tree,
        residuals: Tree,
        section: int,
        gradient: Tree,
        accumulators: Tree,
        losses: LossSums,
    ) -> tuple[Tree, Tree, LossSums]:
        """Runs the backward half of a chunk: head (last chunk only), layers, embedding (first chunk only).

        Args:
          policy: restores residuals.
          work: of this half.
          chunk_inputs: by slot.
          residuals: by slot.
          section: of the chunk.
          gradient: of the boundary after the chunk, [batch, seq, embed] arrays, received from the chunk after.
          accumulators: of gradients, float32, like `self.shards`.
          losses: of earlier microbatches.

        Returns:
          The gradient of the boundary before the chunk, and `accumulators` and `losses` with those of the chunk.
        """
        boundary = take_from_slot(chunk_inputs, work.slot)
        # Slots of the first section hold the embedded tokens.
        start = boundary if section == 0 else self._chunk_input(section, boundary, work)
        order = self.order
        shards = order.after(self.shards, start, gradient)
        linearize = self._linearize(accumulators, work, shards)
        (out, chunk_losses), vjp = policy.take(section, residuals, work.slot, start, linearize)
        losses = _add_losses(losses, chunk_losses, work.counts)
        # An idle half runs like any other, with a gradient of 0: it adds 0 to the accumulators.
        gradient = jax.tree.map(lambda g: jnp.where(work.counts, g, 0), gradient)
        if section == self.sections - 1:
            # Only the last chunk of the model has the head; its gradient replaces the received one.
            head = partial(self._head_backward, out, work)
            unchanged = lambda *values: values  # noqa: E731
            is_last = order.when(self._is_last_chunk(work) & work.counts, out, chunk_losses, vjp)
            gradient, accumulators, losses = cond_by_stage(is_last, head, unchanged, gradient, accumulators, losses)
            vjp = order.after(vjp, gradient, accumulators, losses)
        gradients, gradient = vjp((gradient, _loss_cotangents(chunk_losses, work.counts)))
        # Gradients of the section's stacks come out with `accumulators` added (`_linearize`); those of other parameters
        # that its layers read are added here.
        accumulators = add_microbatch(self.records, accumulators, gradients, self._is_of_section(section))
        embed = partial(self._embed_backward, section, boundary, work)
        # The gradient is not an argument of `when`: the branch waits for it anyway where it reads it, and for a frozen
        # embedding, whose branch does not read it, the gradient would be computed for nothing.
        is_first = order.when(self._is_first_chunk(section, work) & work.counts, accumulators)
        gradient, accumulators = cond_by_stage(is_first, embed, lambda *values: values, gradient, accumulators)
        return gradient, accumulators, losses

    def _head_backward(
        self, boundary: Tree, work: TickWork, _: Tree, accumulators: Tree, losses: LossSums
    ) -> tuple[Tree, Tree, LossSums]:
        """Computes the head's losses of a boundary; returns its gradient, and `accumulators` and `losses` with those of
        the head."""
        # The received gradient, the unnamed argument, means nothing on the last stage.
        head = lambda shards, boundary: self._head_losses(boundary, work, shards)  # noqa: E731
        head_losses, vjp = jax.vjp(head, self.shards, boundary)
        gradients, gradient = vjp(jax.tree.map(jnp.ones_like, head_losses))
        return gradient, self._add_outside_stacks(accumulators, gradients), _add_losses(losses, head_losses)

    def _embed_backward(
        self, section: int, boundary: Tree, work: TickWork, gradient: Tree, accumulators: Tree
    ) -> tuple[Tree, Tree]:
        """Differentiates a section's embedding by the gradient of its result; returns the gradient of `boundary`, which
        is after the section before, and `accumulators` with the embedding's."""
        embed = lambda shards, boundary: self.model.embed(  # noqa: E731
            section, self._parameters(shards), boundary, work.batch
        )
        # Its forward pass runs again here, a lookup, instead of being saved by slot.
        _, vjp = jax.vjp(embed, self.shards, boundary)
        gradients, gradient = vjp(gradient)
        return gradient, self._add_outside_stacks(accumulators, gradients)
