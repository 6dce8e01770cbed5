"""Divisibility checks: the model by the mesh, the batch by data ranks and microbatches, layers by pipeline stages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtjax.config import Config, Model
from mtjax.config.families import family_of, kind_of
from mtjax.config.sizes import (
    nearest_divisors,
    nearest_multiples,
    num_kv_heads,
    padded_vocab_size,
    rows_of_question,
)
from mtjax.config.ssm import has_attention
from mtjax.errors import UserError, listed
from mtjax.families.registry import FAMILIES
from mtjax.families.retro.layout import retro_problems
from mtjax.layout.float8 import float8_problems
from mtjax.layout.hybrid import inner_widths, sharing_problems, split_heads, state_space_problems
from mtjax.layout.layouts import Layout, zero_problems
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan
from mtjax.layout.rules import CONTEXT, EXPERT
from mtjax.layout.stacks import stacks_of
from mtjax.layout.stages import balanced_layers, order_in_plan
from mtjax.layout.width import width_problems


def check(model: Model, plan: Plan) -> None:
    """Checks that every dimension is divisible by the degree it is sharded over; skips an unknown vocabulary size.

    Raises:
      UserError: the first dimension that is not divisible, with both numbers and the nearest sizes that fit.
    """
    if reason := next(problems(model, plan), None):
        raise UserError(reason)


def problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields one sentence for each reason why `check` rejects the plan."""
    return _problems(model, plan, plan.microbatch_size)


def check_config(config: Config, mesh: MeshShape) -> None:
    """Checks that a run's model and batch are divisible by its mesh; skips an unknown vocabulary size.

    Raises:
      UserError: names the dimension, both numbers and the nearest sizes that fit.
    """
    if reason := next(_problems(config.model, Plan.of(config, mesh), config.training.microbatch_size), None):
        raise UserError(reason)


def _problems(model: Model, plan: Plan, microbatch: int | None) -> Iterator[str]:
    """Yields what does not fit; `microbatch` is None where the config sets no `microbatch_size`."""
    yield from retro_problems(model, plan)
    yield from _context_problems(model, plan)
    yield from _expert_problems(model, plan)
    yield from _model_problems(model, plan)
    yield from _batch_problems(plan.global_batch_size, microbatch, plan.data_degree)
    yield from _multiple_choice_problems(model, plan, microbatch)
    yield from float8_problems(model, plan) if plan.fp8 != "none" else ()
    if plan.mesh.stage == 1:
        yield from _settings_without_stages(plan)
    else:
        yield from _microbatch_problems(plan, microbatch)
        yield from _schedule_problems(model, plan)
        yield from _layer_problems(model, plan)
        yield from _recompute_problems(plan)
    if plan.unrolled:
        yield from plan.unrolling_problems(model)
    yield from zero_problems(plan.mesh, plan.zero)
    yield from width_problems(model, plan) if plan.splits_width else ()
    if plan.teacher is not None:
        # The teacher runs on the student's mesh and microbatches, without its backward pass.
        teacher_problems = _problems(plan.teacher, plan.forward_only, microbatch)
        yield from (f"the teacher does not fit the run: {reason}" for reason in teacher_problems)


def _model_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields dimensions of the model that are not divisible by the degree of the mesh axes they are sharded over."""
    rules, mesh = plan.layout(model).rules, plan.mesh
    sizes = [*split_heads(model), *inner_widths(model)]
    if model.vocab_size is not None:
        sizes.append(("vocab", "the padded vocabulary", padded_vocab_size(model)))
    # Stacks that take turns in a section share its sequence, which is named once. Of Retro's, the last one has it;
    # `retro_problems` checks the tokens of neighbours.
    lengths = {"" if stack.among else stack.side: stack.tokens for stack in stacks_of(model)}
    sizes += [("act_seq", f"{side}sequence_length", tokens) for side, tokens in lengths.items()]
    for axis, name, size in sizes:
        degree = mesh.degree(rules.mesh_axes(axis))
        if size % degree:
            yield (
                f"{name} {size} is not divisible by the {mesh.degree_text(rules.mesh_axes(axis))}; "
                f"{_nearest_fit(axis, size, degree, model.hidden_size)}"
            )
    # Grouped-query attention: with fewer key heads than ranks, each key head is replicated on degree / heads ranks.
    if has_attention(model):
        yield from sharing_problems("num_kv_heads", num_kv_heads(model), model, plan)
    yield from state_space_problems(model, plan)


def _context_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields what context parallelism is not compatible with."""
    if plan.optimizer.clips_scores and plan.mesh.context > 1:
        yield (
            f"qk_clip needs all scores of a sample, and mesh {plan.mesh} divides samples into {plan.mesh.context} parts"
            ": use a mesh without context parallelism, or remove qk_clip"
        )
    mesh, degree = plan.mesh, plan.mesh.context
    if degree == 1:
        if plan.context_method != "ring":
            example = replace(mesh, context=2)
            yield (
                f"context_method {plan.context_method} needs context parallelism, and mesh {mesh} has none: "
                f"remove context_method, or use a mesh such as {example}"
            )
        return
    # Not with both: the attention has a relative bias, and the decoder a cross-attention over the encoder's tokens.
    if kind_of(model) == "encoder-decoder":
        names = [name for name in FAMILIES if family_of(name).kind in ("decoder", "encoder")]
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) supports the families {listed(names)}, and family "
            f"is {model.family}: remove context from the mesh"
        )
    if model.mtp_num_layers:
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) divides the samples in which mtp_num_layers "
            f"{model.mtp_num_layers} reads tokens ahead: remove context from the mesh, or use --mtp-num-layers 0"
        )
    if model.head != "language":
        yield (
            f"context parallelism (context={degree} in mesh {mesh}) needs a loss per token, and head is "
            f"{model.head}: remove context from the mesh"
        )
    # Two chunks for each rank, one from either half of the sequence: causal attention is then balanced.
    length, chunks = model.sequence_length, 2 * degree
    if length % chunks:
        yield (
            f"sequence_length {length} is not divisible by {chunks}, 2 chunks for each rank of the "
            f"{mesh.degree_text((CONTEXT,))}; the nearest that are: {nearest_multiples(length, chunks)}"
        )


def _expert_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields what experts are not compatible with, and expert parallel degrees that do not divide `num_experts`."""
    mesh, count = plan.mesh, model.num_experts
    if not count:
        if mesh.expert > 1:
            yield (
                f"mesh {mesh} has expert parallelism (expert={mesh.expert}), and num_experts is 0: "
                "remove expert from the mesh"
            )
        return
    if count % mesh.expert:
        yield (
            f"num_experts {count} is not divisible by the {mesh.degree_text((EXPERT,))}; choose a degree that divides "
            f"it: {nearest_divisors(count, mesh.expert)}"
        )


def _batch_problems(batch: int, microbatch: int | None, data_degree: int) -> Iterator[str]:
    """Yields a global batch size that is not a multiple of data parallel degree x microbatch size."""
    # Without a microbatch size the samples of a rank are one microbatch, of any size.
    unit = data_degree * (microbatch or 1)
    if batch % unit == 0:
        return
    near = nearest_multiples(batch, unit)
    if microbatch in (None, 1):
        yield (
            f"global_batch_size {batch} is not divisible by the data parallel degree {data_degree}; "
            f"the nearest that are: {near}"
        )
    else:
        yield (
            f"global_batch_size {batch} is not a multiple of microbatch_size {microbatch} x data parallel degree "
            f"{data_degree} = {unit}; the nearest that are: {near}"
        )


def _multiple_choice_problems(model: Model, plan: Plan, microbatch: int | None) -> Iterator[str]:
    """Yields a microbatch that would cut a multiple-choice question: its choices are rows of one microbatch."""
    choices = rows_of_question(model)
    rows = microbatch or plan.global_batch_size // plan.data_degree
    if rows % choices:
        name = "microbatch_size" if microbatch else "global_batch_size on each data rank"
        yield (
            f"{name} is {rows}, and a question has {choices} choices, each a row: use a multiple of {choices}, for "
            f"example {-(-rows // choices) * choices}"
        )


def _settings_without_stages(plan: Plan) -> Iterator[str]:
    """Yields settings of pipeline parallelism on a mesh that has one stage."""
    per_stage = plan.layers_per_stage and _listed(plan.layers_per_stage)
    settings = {
        "pipeline_schedule": (plan.pipeline_schedule, "1f1b"),
        "chunks": (plan.chunks, 1),
        "layers_per_stage": (per_stage, None),
    }
    for name, (value, default) in settings.items():
        if value != default:
            example = replace(plan.mesh, stage=len(plan.layers_per_stage or (1, 1)))
            yield (
                f"{name} {value} needs pipeline parallelism, and mesh {plan.mesh} has 1 stage: remove {name}, or use a "
                f"mesh such as {example}"
            )


def _microbatch_problems(plan: Plan, microbatch: int | None) -> Iterator[str]:
    """Yields a missing `microbatch_size`: one microbatch of the entire batch would leave all stages but one idle."""
    if microbatch is not None:
        return
    samples, stages = plan.global_batch_size // plan.data_degree, plan.mesh.stage
    # The largest size with as many microbatches as stages, so that the bubble is at most half.
    sizes = (size for size in range(1, samples + 1) if samples % size == 0)
    largest = max(size for size in sizes if samples // size >= stages or size == 1)
    yield (
        f"mesh {plan.mesh} has {stages} stages, and the {samples} samples of a data parallel rank are one microbatch: "
        f"set microbatch_size, for example {largest}, for {samples // largest} microbatches"
    )


def _schedule_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields chunks and microbatches that the pipeline schedule does not support."""
    stages, chunks = plan.mesh.stage, plan.chunks
    if chunks > 1 and plan.pipeline_schedule != "interleaved":
        yield (
            f"chunks {chunks} needs pipeline_schedule interleaved, and pipeline_schedule is "
            f"{plan.pipeline_schedule}: set chunks to 1, or pipeline_schedule to interleaved"
        )
    if chunks == 1 and plan.pipeline_schedule == "interleaved":
        share = min(plan.layers_per_stage or (model.num_layers // stages,))
        near = next((n for n in range(2, share + 1) if share % n == 0), None)
        alternative = f", or chunks {near}" if near else ""
        yield ("pipeline_schedule interleaved needs several chunks per stage, and chunks is 1: use 1f1b" + alternative)
    # Where a group of microbatches is smaller than the stages, mtjax's stages are idle; Megatron refuses it.
    if plan.residuals == "megatron" and chunks > 1 and plan.microbatches % stages:
        yield (
            f"Megatron's interleaved schedule needs a number of microbatches that is a multiple of {stages} stages, "
            f"and there are {plan.microbatches}; the nearest that are: {nearest_multiples(plan.microbatches, stages)}"
        )


def _layer_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields stacks whose layers can't be distributed over the stages and their chunks."""
    per_stage = plan.layers_per_stage
    if stacks_of(model)[0].among is not None:
        stacks = {"num_layers": model.num_layers}
    else:
        stacks = {f"num_{stack.side}layers": stack.layers for stack in stacks_of(model)}
    if per_stage is not None and len(set(stacks.values())) > 1:
        counts = " and ".join(f"{name} {count}" for name, count in stacks.items())
        yield f"layers_per_stage {_listed(per_stage)} applies to both stacks, and {counts} differ: make them equal"
        return
    problems = [reason for name, count in stacks.items() for reason in _count_problems(name, count, plan)]
    yield from problems or _ring_problems(model, plan)


def _count_problems(name: str, count: int, plan: Plan) -> Iterator[str]:
    """Yields why the layers of a section can't be distributed over the stages and their chunks."""
    stages, chunks, per_stage = plan.mesh.stage, plan.chunks, plan.layers_per_stage
    if count < stages:
        yield (
            f"{name} {count} leaves some of the {stages} stages of the mesh without a layer: "
            f"use {count} stages or {stages} layers"
        )
    elif per_stage is None and count % (stages * chunks):
        yield _unequal_shares(name, count, stages, chunks)
    elif per_stage is not None:
        yield from _layers_per_stage_problems(name, count, plan, per_stage)


def _ring_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Yields stages that skip layers in which ring attention sends keys: all stages take part in every permute."""
    is_ring = plan.is_staged and plan.mesh.context > 1 and plan.context_method == "ring" and has_attention(model)
    if is_ring and any(order_in_plan(stack, plan).is_padded for stack in stacks_of(model)):
        yield (
            f"context_method is ring, in whose permutes all stages of mesh {plan.mesh} take part, and some stages have "
            "fewer or other layers than others: use context_method all-gather, or stages with the same layers"
        )


def _unequal_shares(name: str, count: int, stages: int, chunks: int) -> str:
    """Returns the message about layers that are not divisible by stages x chunks, with what would fit."""
    divisor, over = stages * chunks, f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    fits = [f"{nearest_multiples(count, divisor)} layers"]
    if count % chunks == 0:
        fits.append(f"{nearest_divisors(count // chunks, stages)} stages")
    if shares := balanced_layers(count, stages, chunks):
        fits.append(f"layers_per_stage {_listed(shares)}")
    return f"{name} {count} is not divisible by {over}; the nearest that fit: {', or '.join(fits)}"


def _layers_per_stage_problems(name: str, count: int, plan: Plan, per_stage: tuple[int, ...]) -> Iterator[str]:
    """Yields why `layers_per_stage` does not fit a stack."""
    stages, chunks = plan.mesh.stage, plan.chunks
    setting, shares = f"layers_per_stage {_listed(per_stage)}", balanced_layers(count, stages, chunks)
    advice = f"use {_listed(shares)}" if shares else f"use {name} {nearest_multiples(count, chunks)}"
    odd = next((n for n in per_stage if n < 1 or n % chunks), None)
    if len(per_stage) != stages:
        yield f"{setting} has {len(per_stage)} numbers, and mesh {plan.mesh} has {stages} stages: {advice}"
    elif odd is not None:
        needs = f"a multiple of chunks {chunks}" if chunks > 1 else "at least 1"
        yield f"{setting} contains {odd}, and each number must be {needs}: {advice}"
    elif sum(per_stage) != count:
        yield f"{setting} adds up to {sum(per_stage)}, and {name} is {count}: {advice}"


def _recompute_problems(plan: Plan) -> Iterator[str]:
    """Yields variants of full recompute that pipeline parallelism does not support."""
    if plan.recompute != "full":
        return
    settings = {
        "recompute_method block": plan.recompute_first is not None,
        f"recompute_num_layers {plan.recompute_group}": plan.recompute_group > 1,
        "recompute_offload": plan.recompute_offload,
    }
    for setting, is_set in settings.items():
        if is_set:
            yield (
                f"{setting} does not support pipeline parallelism: with recompute full each of the {plan.mesh.stage} "
                "stages of the mesh saves the input of its chunk only; remove it"
            )


def _listed(numbers: Sequence[int]) -> str:
    """Returns the numbers as `--layers-per-stage` reads them: "5,6,6,5"."""
    return ",".join(map(str, numbers))


def check_ramp(config: Config, sizes: Sequence[int], mesh: MeshShape) -> None:
    """Checks that every global batch of a ramp is a multiple of microbatch size x data parallel degree.

    Args:
      config: the run's; `check_config` checks its `global_batch_size`.
      sizes: global batch sizes of the ramp.
      mesh: of the run.

    Raises:
      UserError: names the ramp, the first batch that does not fit, and what START and INCREMENT must be multiples of.
    """
    micro, degree = config.training.microbatch_size, mesh.batch_degree
    unit = (micro or 1) * degree
    wrong = next((size for size in sizes if size % unit), None)
    if wrong is not None:
        ramp = " ".join(map(str, config.training.rampup_batch_size or ()))
        data_parallel = f"data parallel degree {degree}"
        needs = f"microbatch_size {micro} x {data_parallel} = {unit}" if micro else f"the {data_parallel}"
        raise UserError(
            f"rampup_batch_size {ramp} passes through a global batch size of {wrong}, which is not a multiple of "
            f"{needs}; use multiples of {unit} for START and INCREMENT"
        )


def parts_of_samples(layout: Layout, mesh: MeshShape) -> int:
    """Returns the number of which every sequence length is a multiple, for context and sequence parallelism."""
    # Two chunks for each rank (zig-zag).
    chunks = 2 * mesh.degree(layout.rules.seq) if layout.rules.seq else 1
    return math.lcm(chunks, mesh.degree(layout.rules.act_seq))


def num_microbatches(config: Config, mesh: MeshShape, global_batch_size: int | None = None) -> int:
    """Returns how many microbatches a data parallel rank accumulates in a step."""
    batch = global_batch_size or config.training.global_batch_size
    micro = config.training.microbatch_size or batch // mesh.batch_degree
    return batch // (micro * mesh.batch_degree)


def _nearest_fit(axis: str, size: int, degree: int, hidden_size: int) -> str:
    """Returns the advice on a size that is not divisible by the degree over which its axis is sharded."""
    if axis == "heads":
        # Heads must divide hidden_size too, so that another degree may be the only fix.
        heads = [n for n in range(degree, hidden_size + 1, degree) if hidden_size % n == 0]
        near = sorted(heads, key=lambda n: abs(n - size))[:2]
        choices = [f"{' or '.join(map(str, sorted(near)))} heads"] if near else []
        choices.append(f"a tensor parallel degree that divides {size}: {nearest_divisors(size, degree)}")
        return f"use {', or '.join(choices)}"
    advice = " (set vocab_multiple to a multiple of the tensor parallel degree)" if axis == "vocab" else ""
    return f"the nearest that are: {nearest_multiples(size, degree)}{advice}"
