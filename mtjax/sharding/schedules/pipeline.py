"""Stages of a pipeline: each rank along `stage` has some of the layers, and works by a timetable.

A loop over ticks takes derivatives by hand: differentiating through the loop would run all forward passes before all
backward passes, whatever the timetable says (and does not lower on jax 0.10 to 0.12). What a forward half keeps for its
backward half is either its input alone, from which the chunk is computed again (full recompute), or what autodiff saves
besides the parameters.

All stages run one program. Which work is theirs, they read off the timetable; in a half in which a stage is idle it
works on a microbatch that does not count. Embedding and losses stand in branches that only the first or the last stage
takes.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mtjax.sharding.axes import cond_by_stage, varying_like
from mtjax.sharding.context.zigzag import context_axes
from mtjax.sharding.param_comm import differentiable_shards, with_shards, zeros_like_shards
from mtjax.sharding.reduction import Reduction
from mtjax.sharding.schedules.grad_accumulation import AddsUp, add_gradients, with_accumulators
from mtjax.sharding.schedules.microbatch_schedule import PipelineModel, Sums
from mtjax.sharding.schedules.order import Order
from mtjax.sharding.schedules.residuals import (
    Linearize,
    RecomputeChunk,
    ResidualPolicy,
    SaveResiduals,
    in_slots,
    put_in_slot,
    take_from_slot,
)
from mtjax.sharding.schedules.stage_transfer import packed, send, sum_from_owner, unpacked
from mtjax.sharding.zero import gather_for_step, materialize_outside_stacks, wrap_for_inference
from mtjax.theory.rules import STAGE
from mtjax.theory.timetable import Half, Phase, Timetable

Tree = Any


@dataclass(frozen=True)
class PipelineSchedule:
    """Gradients by a training timetable, losses by a forward one."""

    training: Timetable
    evaluation: Callable[[int], Timetable]
    """Of a number of microbatches."""
    microbatch_size: int | None
    """Samples that a rank takes at a time in evaluation; all at once when None, or where they don't divide."""
    keeps_inputs: bool
    """Whether stages keep the input of a chunk alone, and compute it again."""
    order: Order
    """Of collectives: by data dependencies where the runtime keeps none (`mtjax.sharding.schedules.order`)."""

    def gradients(self, model: PipelineModel, parameters: Tree, batch: Tree, reduction: Reduction) -> tuple[Sums, Tree]:
        """As `Schedule.gradients` says."""
        wrapped = self.unstack_parameters(reduction.records, reduction.wrap(parameters))
        microbatches = _microbatches(batch, self.training.microbatches)
        run = _Run(model, reduction.records, wrapped, microbatches, self.training, self.order)
        return run.gradients(keeps_inputs=self.keeps_inputs)

    def unstack_parameters(self, records: Tree, wrapped: Tree) -> Tree:
        """As `Schedule.apart` says: a chunk's layers are in a loop."""
        return gather_for_step(records, wrapped)

    def losses(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Sums:
        """As `Schedule.losses` says."""
        return self._evaluation_run(model, parameters, batch, records).losses()

    def final_boundary(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> Tree:
        """As `Schedule.output` says."""
        return self._evaluation_run(model, parameters, batch, records).output()

    def _evaluation_run(self, model: PipelineModel, parameters: Tree, batch: Tree, records: Tree) -> "_Run":
        samples = jax.tree.leaves(batch)[0].shape[0]
        size = self.microbatch_size or samples
        count = samples // size if samples % size == 0 else 1
        wrapped = gather_for_step(records, wrap_for_inference(records, parameters))
        return _Run(model, records, wrapped, _microbatches(batch, count), self.evaluation(count), self.order)


def _microbatches(batch: Tree, count: int) -> Tree:
    return jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)


class _TickWork(NamedTuple):
    """What this rank does in half a tick: `Work`, traced, and a microbatch of the batch."""

    part: Tree
    microbatch: Array
    chunk: Array
    slot: Array
    """The last one, which nothing reads, where the turn does not count."""
    counts: Array
    """Whether this stage has work in this half."""
    zero: Array | int
    """A 0 (`Order.zero`) that depends on everything before this half."""


def _with_own(losses: Sums, own: Sums, counts: Array | bool = True) -> Sums:
    """Losses and what a part of the model adds to some of them, if it counts."""
    return losses | {name: losses[name] + jnp.where(counts, value, 0) for name, value in own.items()}


def _of_losses(own: Sums, counts: Array) -> Sums:
    """The gradient of the loss by what a chunk adds to it: of what is counted beside the losses 0."""
    return {name: jnp.where(counts & (not value.ndim), jnp.ones_like(value), 0) for name, value in own.items()}


class _Carry(NamedTuple):
    """What goes from one tick to the next."""

    wire: Tree
    """Arrived from the chunk before; packed."""
    gradient: Tree
    """Of the wire that came in for this rank's last backward half; packed, and not yet sent."""
    wires: Tree
    """By slot: each chunk's input; behind the first section, the wire from which it is made."""
    kept: Tree
    """By slot: what else `Kept` keeps."""
    sums: Tree
    """Gradients."""
    losses: Sums


class _Run:
    """A timetable at work on one rank's parameters and microbatches."""

    def __init__(
        self, model: PipelineModel, records: Tree, wrapped: Tree, microbatches: Tree, table: Timetable, order: Order
    ) -> None:
        self.model, self.records, self.wrapped, self.table, self.order = model, records, wrapped, table, order
        self.microbatches, self.stage = microbatches, lax.axis_index(STAGE)
        self.begun = order.zero(wrapped, microbatches)
        self.sections = len(model.sections)
        self.chunks = table.chunks // self.sections
        self.parts = differentiable_shards(wrapped)
        first = jax.tree.map(lambda a: a[0], microbatches)
        self.wire = jax.tree.map(jnp.zeros_like, model.boundary(self._parameters(self.parts), first))

    # --- losses alone

    def losses(self) -> Sums:
        """Of all microbatches, forward only."""
        none = self._no_losses()

        def tick(carry: tuple[Tree, Sums], row: Array) -> tuple[tuple[Tree, Sums], None]:
            (wire, losses), turn = carry, self._turn(row, carry)
            wire, losses = self._through_chunk(self._arrived(wire, turn), turn, losses)
            left = lambda losses: _with_own(losses, self._left(wire, turn))  # noqa: E731
            last = self.order.when(self._leaves(turn) & turn.counts, wire, losses)
            losses = cond_by_stage(last, left, lambda losses: losses, losses)
            return (self._send(packed(self.order.behind(wire, losses)), 1), losses), None

        (_, losses), _ = lax.scan(tick, (packed(self.wire), none), self._rows(self.table.forward))
        return losses

    def output(self) -> Tree:
        """The last chunk's output of all microbatches, one after another, on every stage."""
        count = jax.tree.leaves(self.microbatches)[0].shape[0]

        def tick(carry: tuple[Tree, Tree], row: Array) -> tuple[tuple[Tree, Tree], None]:
            (wire, out), turn = carry, self._turn(row, carry[0])
            wire, _ = self._through_chunk(self._arrived(wire, turn), turn, {})
            last = self._leaves(turn) & turn.counts
            new = jax.tree.map(lambda a: a.astype(jnp.float32), wire)
            return (self._send(packed(wire), 1), put_in_slot(out, jnp.where(last, turn.microbatch, count), new)), None

        def joined(slots: Array, like: Array) -> Array:
            return sum_from_owner(slots[:count].reshape(-1, *like.shape[1:])).astype(like.dtype)

        nothing = jax.tree.map(lambda a: in_slots(a.astype(jnp.float32), count), self.wire)
        (_, out), _ = lax.scan(tick, (packed(self.wire), nothing), self._rows(self.table.forward))
        return jax.tree.map(joined, out, self.wire)

    def _through_chunk(self, wire: Tree, turn: _TickWork, losses: Sums) -> tuple[Tree, Sums]:
        """The wire behind a chunk, and losses with what its layers add to them."""

        def of_section(section: int, wire: Tree, losses: Sums) -> tuple[Tree, Sums]:
            start = self._entered(section, wire, turn)
            wire, own = self._chunk(section, self.order.behind(self.parts, start), start, turn)
            return wire, _with_own(losses, own, turn.counts)

        return self._in_section(turn, of_section, wire, losses)

    # --- losses and gradients

    def gradients(self, *, keeps_inputs: bool) -> tuple[Sums, Tree]:
        """Of all microbatches."""
        sums = zeros_like_shards(self.parts)
        wires = jax.tree.map(lambda a: in_slots(a, self.table.slots), self.wire)
        forward, backward = self._rows(self.table.forward), self._rows(self.table.backward)
        kept: ResidualPolicy = RecomputeChunk()
        if not keeps_inputs:
            linearize = self._linearize(sums, self._turn(forward[0]), self.parts)
            kept = SaveResiduals.of(self.sections, self.table.slots, self.wire, linearize)
        carry = _Carry(packed(self.wire), packed(self.wire), wires, kept.empty(), sums, self._no_losses())
        for phase in self.table.phases:
            rows = (forward[phase.start : phase.stop], backward[phase.start : phase.stop])
            carry, _ = lax.scan(partial(self._tick, kept, phase), carry, rows)
        # Nobody reads the last gradient: whatever waited for it would have it computed.
        return self.order.behind((carry.losses, carry.sums), carry._replace(gradient=()))

    def _tick(
        self, kept: ResidualPolicy, phase: Phase, carry: _Carry, rows: tuple[Array, Array]
    ) -> tuple[_Carry, None]:
        """Gradients leave at the start, to travel behind the forward half; activations travel behind the backward.

        Between the halves each waits for the other, or XLA might compute the backward half first, have both under way
        at a time, or join the gathers of what arrived, and hide neither. It costs nothing: the backward half, behind
        which activations travel, needs the gradients.
        """
        if phase.backward:
            gradient = self.order.behind(carry.gradient, carry.sums, carry.losses)
            carry = carry._replace(gradient=self._send(gradient, -1))
        if phase.forward:
            turn = self._turn(rows[0], (carry.wire, carry.gradient))
            forward, arrived = partial(self._forward, kept, turn, carry.sums), self._arrived(carry.wire, turn)
            wire, wires, arrays = self._in_section(turn, forward, arrived, carry.wires, carry.kept)
            out, gradient = lax.optimization_barrier((packed(wire), carry.gradient))
            carry = carry._replace(gradient=gradient, wire=self._send(out, 1), wires=wires, kept=arrays)
        if phase.backward:
            turn = self._turn(rows[1], (carry.wire, carry.gradient))
            backward = partial(self._backward, kept, turn, carry.wires, carry.kept)
            arrived = self._arrived(carry.gradient, turn)
            gradient, sums, losses = self._in_section(turn, backward, arrived, carry.sums, carry.losses)
            carry = carry._replace(gradient=packed(gradient), sums=sums, losses=losses)
        return carry, None

    def _forward(
        self, kept: ResidualPolicy, turn: _TickWork, sums: Tree, section: int, wire: Tree, wires: Tree, arrays: Tree
    ) -> tuple[Tree, Tree, Tree]:
        """The forward half of a chunk: what it puts out, and what is kept."""
        start = self._entered(section, wire, turn)
        parts = self.order.behind(self.parts, start)
        wires = put_in_slot(wires, turn.slot, start if section == 0 else wire)
        skips = isinstance(kept, RecomputeChunk) and not context_axes()
        if skips and section == self.sections - 1:
            # The losses are computed in the backward half, from the chunk computed again: nobody needs this output.
            # Not where ranks share samples: all devices take part in a permute, whichever of them it is between.
            chunk = lambda: self._chunk(section, parts, start, turn)[0]  # noqa: E731
            return cond_by_stage(self._leaves(turn), lambda: start, chunk), wires, arrays
        (out, _), arrays = kept.put(section, arrays, turn.slot, start, self._linearize(sums, turn, parts))
        return out, wires, arrays

    def _backward(
        self,
        kept: ResidualPolicy,
        turn: _TickWork,
        wires: Tree,
        arrays: Tree,
        section: int,
        gradient: Tree,
        sums: Tree,
        losses: Sums,
    ) -> tuple[Tree, Tree, Sums]:
        """The backward half of a chunk: the gradient of its input, and sums and losses with what it adds to them."""
        wire = take_from_slot(wires, turn.slot)
        start = wire if section == 0 else self._entered(section, wire, turn)
        order = self.order
        parts = order.behind(self.parts, start, gradient)
        (out, own), pull = kept.take(section, arrays, turn.slot, start, self._linearize(sums, turn, parts))
        losses = _with_own(losses, own, turn.counts)
        gradient = jax.tree.map(lambda g: jnp.where(turn.counts, g, 0), gradient)
        if section == self.sections - 1:
            leave = partial(self._leave_backward, out, turn)
            unchanged = lambda *values: values  # noqa: E731
            last = order.when(self._leaves(turn) & turn.counts, out, own, pull)
            gradient, sums, losses = cond_by_stage(last, leave, unchanged, gradient, sums, losses)
            pull = order.behind(pull, gradient, sums, losses)
        gradients, gradient = pull((gradient, _of_losses(own, turn.counts)))
        sums = add_gradients(self.records, sums, gradients, self._in_stack(section))
        enter = partial(self._enter_backward, section, wire, turn)
        # The branch waits for the gradient where it reads it, and nobody computes it for a frozen embedding otherwise.
        first = order.when(self._enters(section, turn) & turn.counts, sums)
        gradient, sums = cond_by_stage(first, enter, lambda *values: values, gradient, sums)
        return gradient, sums, losses

    def _leave_backward(
        self, wire: Tree, turn: _TickWork, _: Tree, sums: Tree, losses: Sums
    ) -> tuple[Tree, Tree, Sums]:
        """The losses and their gradients; replaces the gradient of the last chunk's output."""
        own, pull = jax.vjp(lambda parts, wire: self._left(wire, turn, parts), self.parts, wire)
        gradients, gradient = pull(jax.tree.map(jnp.ones_like, own))
        return gradient, self._with_outside(sums, gradients), _with_own(losses, own)

    def _enter_backward(
        self, section: int, wire: Tree, turn: _TickWork, gradient: Tree, sums: Tree
    ) -> tuple[Tree, Tree]:
        """Through what makes a section's input."""
        enter = lambda parts, wire: self.model.embed(section, self._parameters(parts), wire, turn.part)  # noqa: E731
        _, pull = jax.vjp(enter, self.parts, wire)
        gradients, gradient = pull(gradient)
        return gradient, self._with_outside(sums, gradients)

    # --- the model's parts

    def _entered(self, section: int, wire: Tree, turn: _TickWork) -> Tree:
        """The input of a chunk: the section's first makes it, the others have it from the chunk before."""
        enter = lambda wire: self.model.embed(section, self._parameters(self.parts), wire, turn.part)  # noqa: E731
        return cond_by_stage(self._enters(section, turn), enter, lambda wire: wire, wire)

    def _chunk(self, section: int, parts: Tree, start: Tree, turn: _TickWork, sums: Tree = None) -> tuple[Tree, Sums]:
        chunk = turn.chunk - section * self.chunks
        return self.model.forward_layers(
            section, self._parameters(parts, sums, section), start, turn.part, self.stage, chunk
        )

    def _left(self, wire: Tree, turn: _TickWork, parts: Tree = None) -> Sums:
        return self.model.head_losses(self._parameters(self.parts if parts is None else parts), wire, turn.part)

    def _linearize(self, sums: Tree, turn: _TickWork, parts: Tree) -> Linearize:
        """Of chunks with these parameters; gradients of stacks come out added to `sums`."""
        chunk = self._chunk
        return lambda section, start: jax.vjp(
            lambda parts, start: chunk(section, parts, start, turn, sums), parts, start
        )

    def _parameters(self, parts: Tree, sums: Tree = None, section: int = 0) -> Tree:
        """Parameters that the model can use; with sums, those to which the section's gradients are added."""
        wrapped = with_shards(self.wrapped, parts)
        if sums is not None:
            wrapped = with_accumulators(self.records, wrapped, sums, self._in_stack(section))
        return materialize_outside_stacks(self.records, wrapped)

    def _in_stack(self, section: int) -> AddsUp:
        """Whether a parameter is of a section's layers."""
        names = tuple(f"{name}." for name in self.model.sections[section])
        return lambda record: record.is_stacked and record.name.startswith(names)

    def _with_outside(self, sums: Tree, gradients: Tree) -> Tree:
        """Sums with the gradients of what is outside the stacks."""
        add = lambda record, total, g: total if record.is_stacked else total + g.astype(jnp.float32)  # noqa: E731
        return jax.tree.map(add, self.records, sums, gradients)

    def _no_losses(self) -> Sums:
        """Zeros."""
        part, like = jax.tree.map(lambda a: a[0], self.microbatches), jax.tree.leaves(self.wire)[0]
        zero = jnp.zeros((), jnp.int32)
        first = _TickWork(part, zero, zero, zero, zero > 0, 0)

        def losses() -> Sums:
            of_layers = [self._chunk(i, self.parts, self.wire, first)[1] for i in range(self.sections)]
            return functools.reduce(operator.or_, of_layers, self._left(self.wire, first))

        zeros = lambda a: varying_like(jnp.zeros(a.shape, jnp.float32), like)  # noqa: E731
        return jax.tree.map(zeros, jax.eval_shape(losses))

    # --- turns

    def _rows(self, halves: tuple[Half, ...]) -> Array:
        """int32 [tick, stage, 4]: microbatch, chunk, slot, and whether they count."""
        idle = (0, 0, self.table.slots, 0)
        rows = [[idle if work is None else (*work, 1) for work in half] for half in halves]
        return jnp.asarray(np.asarray(rows, np.int32))

    def _turn(self, row: Array, after: Tree = None) -> _TickWork:
        """A row of the timetable; where an order is needed, reading it depends on the arrays `after`."""
        zero = self.begun + self.order.zero(after)
        microbatch, chunk, slot, counts = row[self.stage] + zero
        pick = lambda a: lax.dynamic_index_in_dim(a, microbatch, keepdims=False)  # noqa: E731
        return _TickWork(jax.tree.map(pick, self.microbatches), microbatch, chunk, slot, counts > 0, zero)

    def _enters(self, section: int, turn: _TickWork) -> Array:
        """Whether a turn's chunk is the first of a section."""
        return (self.stage == 0) & (turn.chunk == section * self.chunks)

    def _leaves(self, turn: _TickWork) -> Array:
        """Whether a turn's chunk is the model's last."""
        return (self.stage == self.table.stages - 1) & (turn.chunk == self.table.chunks - 1)

    def _in_section(self, turn: _TickWork, run: Callable[..., tuple[Any, ...]], *state: Any) -> tuple[Any, ...]:
        """`run(section, *state)`, the state's successor, of the section to which the turn's chunk belongs.

        Each section has a branch of its own, behind one that passes the state on. Of one switch over all sections XLA
        copies what an earlier branch updates and a later one passes on: the gradients of an entire stack.
        """
        if self.sections == 1:
            return run(0, *state)
        for section in range(self.sections):
            other = turn.chunk // self.chunks != section
            state = cond_by_stage(other, lambda *unchanged: unchanged, partial(run, section), *state)
        return state

    def _arrived(self, wire: Tree, turn: _TickWork) -> Tree:
        """A wire as a turn reads it."""
        return unpacked(self.order.waiting(wire, turn.zero), self.wire)

    def _send(self, wire: Tree, by: int) -> Tree:
        return send(wire, by, wraps=self.table.chunks > 1)
