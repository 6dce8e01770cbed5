"""The fastest plan that fits, by the scaling model: meshes, microbatches, recompute, ZeRO and sequence parallelism."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import groupby

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.flops import SECONDS_PER_DAY, model_flops, steps_for_tokens
from mtjax.analysis.hardware import Server
from mtjax.analysis.memory import Memory, peak_stage_memory
from mtjax.analysis.timing import StepTime, least_seconds, step_time
from mtjax.config.sizes import divisors
from mtjax.errors import UserError
from mtjax.layout.divisibility import problems
from mtjax.layout.gpu_memory import USABLE_MEMORY
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import ExpertDispatch, Plan, Recompute
from mtjax.layout.proposed_meshes import context_degrees, meshes_within, with_groups
from mtjax.layout.stages import balanced_layers

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Space:
    """What the search may choose from."""

    recomputes: tuple[Recompute, ...] = RECOMPUTES
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    sequence: tuple[bool, ...] = (False, True)
    max_stages: int = 64
    chunks: tuple[int, ...] | None = None
    """Chunks of a stage's layers; all numbers that divide them when None."""
    uneven: float = 1.25
    """Maximum number of layers of a stage relative to the mean: all stages wait for the one with the most layers."""
    unrolled: tuple[bool, ...] = (False, True)
    """Whether layers are unrolled, where that is possible."""
    usable: float = USABLE_MEMORY
    """Share of a GPU's memory that a plan may fill."""


@dataclass(frozen=True)
class Candidate:
    """A plan with its cost."""

    plan: Plan
    memory: Memory
    timed: Callable[[Plan], StepTime]
    bounded: Callable[[Plan], float]

    @cached_property
    def time(self) -> StepTime:
        """Of a step: worked out where it is asked for, as it takes longer than the memory."""
        return self.timed(self.plan)

    @cached_property
    def least(self) -> float:
        """Seconds that a step takes at least, which take less to work out."""
        return self.bounded(self.plan)

    @property
    def kind(self) -> tuple[MeshShape, Recompute]:
        """Mesh and recompute: plans that differ in other settings are alike."""
        return (self.plan.mesh, self.plan.recompute)

    @property
    def order(self) -> tuple[float, float]:
        """Fastest first; of equally fast ones the smallest."""
        return (self.time.total, self.memory.total)


def fastest_kinds(candidates: Sequence[Candidate], most: int, limit: float = math.inf) -> list[Candidate]:
    """Returns the fastest plan of each mesh and recompute that takes at most `limit` seconds, fastest first.

    It works out the time of those alone whose lower bound does not rule them out.

    Args:
      candidates: plans; of equal ones the first is taken.
      most: number of plans to return.
      limit: seconds of a step.
    """
    best: dict[tuple[MeshShape, Recompute], tuple[tuple[float, float], int]] = {}
    # In the order of lower bounds: after the first that is too long, all others are too long as well.
    for number in sorted(range(len(candidates)), key=lambda number: candidates[number].least):
        candidate = candidates[number]
        slowest = sorted(order[0] for order, _ in best.values())[most - 1] if len(best) >= most else math.inf
        if candidate.least > min(slowest, limit):
            break
        now = best.get(candidate.kind)
        if (now and candidate.least > now[0][0]) or candidate.time.total > limit:
            continue
        # The number breaks ties, or the result would depend on the order of the bounds.
        best[candidate.kind] = min(now or (candidate.order, number), (candidate.order, number))
    return [candidates[number] for _, number in sorted(best.values())[:most]]


@dataclass(frozen=True)
class Found:
    """The results of a search."""

    fitting: list[Candidate]
    """Plans that fit, in no order."""
    excessive: list[Candidate]
    """Would-be plans that exceed the memory, in no order."""
    limit: float
    """Bytes a plan may fill."""

    @cached_property
    def best(self) -> Candidate:
        """The winner: the fastest that fits."""
        (best,) = fastest_kinds(self.fitting, 1)
        return best


def meshes(anatomy: Anatomy, base: Plan, gpus: int, server: Server, space: Space) -> Iterator[MeshShape]:
    """Yields the meshes of `gpus` GPUs that divide the model and the batch, with tensor parallelism inside a server."""
    for model in divisors(gpus):
        # Tensor parallel ranks exchange activations in every layer, for which networks between servers are too slow.
        if model > server.gpus:
            continue
        for stage in divisors(gpus // model):
            if stage > space.max_stages or not chunk_shares(anatomy, stage, space.uneven):
                continue
            mesh_shape = MeshShape(data=gpus // model // stage, stage=stage, model=model)
            for mesh in meshes_within(mesh_shape, anatomy.model.num_experts, anatomy.model.sequence_length):
                if not _obstacle(anatomy, base, mesh):
                    yield mesh
                    yield from with_groups(mesh, server.gpus, anatomy.model.hidden_size)


def _obstacle(anatomy: Anatomy, base: Plan, mesh: MeshShape) -> str | None:
    """Returns why no plan is possible on a mesh, whatever the microbatch; None if one is."""
    plainest = replace(base, mesh=mesh, microbatch_size=1, sequence_parallel=False, pipeline_schedule="1f1b", chunks=1)
    plainest = replace(plainest, splits_width=False, zero=0)
    shares = chunk_shares(anatomy, plainest.stages, math.inf).get(1)
    plainest = replace(plainest, layers_per_stage=shares, unrolled=False)
    return next(problems(anatomy.model, plainest), None)


def rejections(anatomy: Anatomy, base: Plan, gpus: int, server: Server) -> list[tuple[MeshShape, str]]:
    """Returns the meshes of two axes that the search skips, each with the reason.

    The tensor parallel degree is at most twice a server's GPUs.
    """
    rejected = []
    for model in divisors(gpus):
        mesh = MeshShape(data=gpus // model, model=model)
        if model > 2 * server.gpus:
            break
        reason = _obstacle(anatomy, base, mesh)
        if reason is None and model > server.gpus:
            reason = f"tensor parallel degree {model} exceeds the {server.gpus} GPUs of a server"
        if reason is not None:
            rejected.append((mesh, reason))
    return rejected


def variants(anatomy: Anatomy, base: Plan, mesh: MeshShape, space: Space) -> Iterator[Plan]:
    """Yields everything that the search may choose on a mesh, without settings that change nothing.

    Of schedules it leaves out GPipe: with the bubble of 1F1B it keeps more.
    """
    base = replace(base, mesh=mesh)
    fitting = chunk_shares(anatomy, base.stages, space.uneven)
    allowed = {n: shares for n, shares in fitting.items() if space.chunks is None or n in space.chunks}
    per_rank, zeros = base.global_batch_size // base.data_degree, space.zeros if base.zero_degree > 1 else (0,)
    # Without traffic in each microbatch, or with one microbatch, groups gain nothing where ZeRO needs none.
    once = mesh.has_sharding_groups and mesh.divides(anatomy.model.hidden_size)
    zeros = tuple(zero for zero in zeros if zero >= (2 if once else int(mesh.has_sharding_groups)))
    for microbatch in divisors(per_rank):
        # Powers of two, and the whole batch: all divisors would multiply the plans.
        if microbatch & (microbatch - 1) and microbatch != per_rank:
            continue
        if once and microbatch == per_rank:
            continue
        for recompute in space.recomputes:
            if recompute == "selective" and (base.flash_attention or base.attention_in_blocks):
                continue  # there are no stored scores to leave out
            for sequence in space.sequence if base.tensor_degree > 1 else (False,):
                for zero in zeros:
                    for chunks, shares in allowed.items():
                        plan = replace(
                            base,
                            microbatch_size=microbatch,
                            recompute=recompute,
                            sequence_parallel=sequence,
                            zero=zero,
                            pipeline_schedule="interleaved" if chunks > 1 else "1f1b",
                            chunks=chunks,
                            layers_per_stage=shares,
                        )
                        for method in expert_dispatches(anatomy, plan):
                            for unrolled in _unrolled(anatomy, plan, space):
                                # Most plans change neither, and need no copy.
                                as_asked = plan.expert_dispatch == method and plan.unrolled == unrolled
                                yield plan if as_asked else replace(plan, expert_dispatch=method, unrolled=unrolled)


def _unrolled(anatomy: Anatomy, plan: Plan, space: Space) -> tuple[bool, ...]:
    """Returns whether layers of a plan may be unrolled, and whether they may be in a loop."""
    # The formulas of time assume that unrolled layers overlap as much as loops that prefetch. Where they were asked
    # for, it is enough that they are possible.
    is_asked_for = False not in space.unrolled
    may_be = not any(plan.unrolling_problems(anatomy.model)) if is_asked_for else plan.gains_by_unrolling(anatomy.model)
    return tuple(unrolled for unrolled in space.unrolled if (may_be and plan.residuals == "jax") or not unrolled)


def expert_dispatches(anatomy: Anatomy, plan: Plan) -> tuple[ExpertDispatch, ...]:
    """Returns how tokens may be sent to other ranks' experts: by all-gathers alone if there are none, or a capacity."""
    is_free = plan.expert_degree > 1 and anatomy.model.capacity_factor is None
    return ("all-gather", "all-to-all") if is_free else ("all-gather",)


def chunk_counts(anatomy: Anatomy, stages: int) -> list[int]:
    """Returns the numbers of chunks that divide a stage's layers of every section, where stages have equal shares; 1
    without."""
    if stages == 1:
        return [1]
    return divisors(math.gcd(*(sum(stack.layers for stack in section) // stages for section in anatomy.sections)))


@cache
def chunk_shares(anatomy: Anatomy, stages: int, uneven: float) -> Mapping[int, tuple[int, ...] | None]:
    """Returns the numbers of chunks of a stage's layers, each with the layers of every stage; None as these where all
    are equal.

    Equal shares alone where the stages divide the layers of every section; else shares as equal as they can be, which
    sections of different lengths don't have.

    Args:
      anatomy: the model.
      stages: of the pipeline.
      uneven: maximum number of layers of a stage relative to the mean.
    """
    counts = {sum(stack.layers for stack in section) for section in anatomy.sections}
    if all(count % stages == 0 for count in counts):
        return dict.fromkeys(chunk_counts(anatomy, stages))
    if len(counts) > 1:
        return {}
    (layers,) = counts
    shares = {chunks: balanced_layers(layers, stages, chunks) for chunks in divisors(layers)}
    return {n: each for n, each in shares.items() if each and max(each) * stages <= uneven * layers}


def search(anatomy: Anatomy, base: Plan, gpus: int, server: Server, space: Space | None = None) -> Found:
    """Finds all plans on `gpus`.

    `base` gives what is not searched: global batch, precision, attention kernel, dropout.
    """
    space = space or Space()
    limit = space.usable * server.gpu.memory
    fitting: list[Candidate] = []
    excessive: list[Candidate] = []
    timed = partial(step_time, anatomy, server=server)
    bounded = partial(least_seconds, anatomy, server=server)
    for mesh in meshes(anatomy, base, gpus, server, space):
        for plan in variants(anatomy, base, mesh, space):
            if next(problems(anatomy.model, plan), None):
                continue
            candidate = Candidate(plan, peak_stage_memory(anatomy, plan), timed, bounded)
            (fitting if candidate.memory.total <= limit else excessive).append(candidate)
    return Found(fitting, excessive, limit)


def fitting_plans(anatomy: Anatomy, base: Plan, gpus: int, server: Server, space: Space | None = None) -> Found:
    """Returns the result of `search`, if any plan fits.

    Raises:
      UserError: no mesh of that many GPUs divides the model and batch, or none fits; names the nearest that does.
    """
    found = search(anatomy, base, gpus, server, space)
    # Stages may be as unequal as they like only if nothing else fits, as all wait for the slowest.
    if not found.fitting:
        found = search(anatomy, base, gpus, server, replace(space or Space(), uneven=math.inf))
    if found.fitting:
        return found
    near = nearest_feasible(anatomy, base, gpus, server, space)
    hint = (
        f"the nearest plan that fits is {describe(near.plan)}, {near.plan.mesh.size} GPUs"
        if near
        else ("no number of GPUs up to 64 times as many fits; take GPUs with more memory")
    )
    if not found.excessive:
        raise UserError(
            f"{gpus} GPUs form no mesh that divides {anatomy.model.num_heads} heads, {anatomy.model.num_layers} layers "
            f"and global batch {base.global_batch_size} with a tensor parallel degree of at most {server.gpus}; {hint}"
        )
    least = min(found.excessive, key=lambda c: c.memory.total)
    raise UserError(
        f"no plan for {gpus} GPUs fits {found.limit / 2**30:.1f} GiB each: the smallest, {describe(least.plan)}, needs "
        f"{least.memory.total / 2**30:.1f} GiB; {hint}"
    )


def nearest_feasible(
    anatomy: Anatomy, base: Plan, gpus: int, server: Server, space: Space | None = None
) -> Candidate | None:
    """Finds the best plan of the nearest number of GPUs, up to 64 times as many, that has one."""
    searched = (search(anatomy, base, n, server, space) for n in _counts_near(anatomy, base, gpus, server))
    return next((found.best for found in searched if found.fitting), None)


def _counts_near(anatomy: Anatomy, base: Plan, gpus: int, server: Server) -> Iterator[int]:
    counts = {
        data * context * model
        for data in divisors(base.global_batch_size)
        for context in context_degrees(anatomy.model.sequence_length)
        for model in divisors(anatomy.model.num_heads)
        if model <= server.gpus
    }
    # Without such divisors, pipeline stages may take a factor of two.
    counts |= {gpus * 2**k for k in range(1, 7)}
    yield from sorted((n for n in counts if n != gpus and n <= 64 * gpus), key=lambda n: (abs(math.log(n / gpus)), n))


def gpus_within(
    anatomy: Anatomy,
    base: Plan,
    tokens: float,
    days: float,
    server: Server,
    space: Space | None = None,
) -> Candidate:
    """Finds the plan with the fewest GPUs that reads `tokens` within `days`; whole servers above one.

    Raises:
      UserError: no number of GPUs does, with the time of the largest that there is.
    """
    space = space or Space()
    steps = steps_for_tokens(tokens, base.global_batch_size, anatomy.model.sequence_length)
    # No plan computes less than this at the peak, so smaller numbers of GPUs need no search.
    floor = steps * base.global_batch_size * model_flops(anatomy, causal=True)
    least = floor / (days * SECONDS_PER_DAY * server.gpu.peak[max(server.gpu.peak, key=lambda d: server.gpu.peak[d])])
    counts = _counts(anatomy, base, server, space)
    for count in (n for n in counts if n >= least):
        found = search(anatomy, base, count, server, space)
        # Ascending: the first number of GPUs that is fast enough is the smallest.
        if found.fitting and found.best.time.total * steps <= days * SECONDS_PER_DAY:
            return found.best
    searched = (search(anatomy, base, count, server, space) for count in reversed(counts))
    largest = next((found.best for found in searched if found.fitting), None)
    if largest is None:
        raise UserError(
            f"no number of {server.gpu.name} GPUs holds this model at global batch {base.global_batch_size}"
        )
    took = largest.time.total * steps / SECONDS_PER_DAY
    raise UserError(
        f"no plan reads {tokens:.3g} tokens within {days:g} days at global batch {base.global_batch_size}; the largest "
        f"takes {took:.3g} days on {largest.plan.mesh.size} GPUs ({describe(largest.plan)}); a larger batch feeds more"
    )


def _counts(anatomy: Anatomy, base: Plan, server: Server, space: Space) -> list[int]:
    """Returns the numbers of GPUs that some mesh has: inside one server, or whole servers."""
    counts = {
        data * stage * context * model
        for data in divisors(base.global_batch_size)
        for context in context_degrees(anatomy.model.sequence_length)
        for stage in range(1, space.max_stages + 1)
        if chunk_shares(anatomy, stage, space.uneven)
        for model in divisors(anatomy.model.num_heads)
        if model <= server.gpus
    }
    return sorted(n for n in counts if n <= server.gpus or n % server.gpus == 0)


def describe(plan: Plan) -> str:
    """Describes a plan in a few words: mesh, microbatch, and what is switched on."""
    parts = [f"mesh {plan.mesh}", f"microbatch {plan.microbatch_size}", f"recompute {plan.recompute}"]
    if plan.zero:
        parts.append(f"ZeRO-{plan.zero}")
    if plan.sequence_parallel:
        parts.append("sequence parallel")
    if plan.splits_width:
        parts.append("tensor layout 2d")
    if plan.unrolled:
        parts.append("layers unrolled")
    if plan.mesh.has_context_parallel and plan.context_method != "ring":
        parts.append(f"keys and values by {plan.context_method}")
    if plan.expert_dispatch != "all-gather":
        parts.append(f"experts by {plan.expert_dispatch}")
    if plan.grad_reduce_dtype != "float32" and plan.residuals == "jax":
        parts.append(f"gradients sent in {plan.grad_reduce_dtype}")
    if plan.stages > 1:
        parts.append(plan.pipeline_schedule + (f" x{plan.chunks}" if plan.chunks > 1 else ""))
    if plan.layers_per_stage is not None:
        parts.append(f"layers {_in_runs(plan.layers_per_stage)}")
    return ", ".join(parts)


def _in_runs(numbers: tuple[int, ...]) -> str:
    """Writes the layers of stages: 27,27,26; of many stages 2x3 + 60x2."""
    if len(numbers) <= 4:
        return ",".join(map(str, numbers))
    return " + ".join(f"{len(list(run))}x{number}" for number, run in groupby(numbers))
