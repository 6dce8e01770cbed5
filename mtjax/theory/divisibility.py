"""What must be divisible by what: model by mesh, batch by data ranks and microbatches, layers by stages."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtjax.config import Config, Model
from mtjax.config.sizes import (
    dense_layers,
    expert_size,
    mlp_size,
    nearest_divisors,
    num_kv_heads,
    padded_vocab_size,
    rows_of_question,
)
from mtjax.errors import UserError
from mtjax.theory.anatomy import Stack
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.layout import Layout
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plan import Plan
from mtjax.theory.stages import balanced_layers
from mtjax.theory.teacher_cost import teacher_of


def check(model: Model, plan: Plan) -> None:
    """Checks that everything a plan splits divides; a vocabulary that is not known yet is left out.

    Raises:
      UserError: the first division that leaves a remainder, with both numbers and the nearest that fit.
    """
    reason = next(problems(model, plan), None)
    if reason is not None:
        raise UserError(reason)


def problems(model: Model, plan: Plan) -> Iterator[str]:
    """What `check` refuses, one sentence each."""
    return _problems(model, plan, plan.microbatch_size)


def check_config(config: Config, mesh: MeshShape) -> None:
    """Checks that a run's model and batch divide over a mesh; a vocabulary that is not known yet is left out.

    Raises:
      UserError: names the dimension, both numbers and the nearest sizes that fit.
    """
    reason = next(_problems(config.model, Plan.of(config, mesh), config.training.microbatch_size), None)
    if reason is not None:
        raise UserError(reason)


def _problems(model: Model, plan: Plan, microbatch: int | None) -> Iterator[str]:
    """What does not fit; `microbatch` is None where a config leaves it out."""
    yield from _context_problems(model, plan)
    yield from _expert_problems(model, plan)
    yield from _model_problems(model, plan)
    yield from _batch_problems(plan.global_batch_size, microbatch, plan.data_degree)
    yield from _choice_problems(model, plan, microbatch)
    if plan.mesh.stage == 1:
        yield from _settings_without_stages(plan)
    else:
        yield from _microbatch_problems(plan, microbatch)
        yield from _schedule_problems(model, plan)
        yield from _layer_problems(model, plan)
        yield from _recompute_problems(plan)
    if plan.unrolled:
        yield from _unrolled_problems(model, plan)
    if plan.zero not in range(4):
        yield f"ZeRO has stages 0 to 3, not {plan.zero}"
    if teacher := teacher_of(plan):
        theirs = _problems(teacher.anatomy.model, teacher.plan, microbatch)
        yield from (f"the teacher does not fit the run: {reason}" for reason in theirs)


def _model_problems(model: Model, plan: Plan) -> Iterator[str]:
    rules, mesh = plan.layout(model).rules, plan.mesh
    sizes = [("heads", "num_heads", model.num_heads), *_inner_widths(model)]
    if model.vocab_size is not None:
        sizes.append(("vocab", "the padded vocabulary", padded_vocab_size(model)))
    sizes += [("act_seq", f"{stack.side}sequence_length", stack.tokens) for stack in _stacks(model)]
    for axis, name, size in sizes:
        ways = mesh.degree(rules.axes(axis))
        if size % ways:
            over = " x ".join(rules.axes(axis))
            yield (
                f"{name} {size} does not divide over {ways} {over} ways of the mesh; "
                f"{_fitting(axis, size, ways, model.hidden_size)}"
            )
    ways, shared = mesh.degree(rules.heads), num_kv_heads(model)
    if shared % ways and ways % shared:
        over = " x ".join(rules.heads)
        yield (
            f"num_kv_heads {shared} is neither a multiple nor a divisor of the {ways} {over} ways of the mesh; take "
            f"{over} ways among the divisors or multiples of {shared}"
        )


def _inner_widths(model: Model) -> list[tuple[str, str, int]]:
    """Of layers' MLPs, and of their experts."""
    if not model.num_experts:
        return [("mlp", "mlp_size", mlp_size(model))]
    widths = [("mlp", "expert_size", expert_size(model))]
    widths += [("mlp", "mlp_size", mlp_size(model))] if dense_layers(model) else []
    return [*widths, ("mlp", "shared_expert_size", model.shared_expert_size)]


CONTEXT_FAMILIES = ("gpt", "llama", "bert")
"""Families whose attention ranks can share: T5's has a bias, and a second one that reads other tokens."""


def _context_problems(model: Model, plan: Plan) -> Iterator[str]:
    """What ranks that share the tokens of a sample do not go with."""
    mesh, ways = plan.mesh, plan.mesh.context
    if ways == 1:
        if plan.context_method != "ring":
            like = replace(mesh, context=2)
            yield (
                f"context_method {plan.context_method} is for ranks that share the tokens of a sample, and mesh {mesh} "
                f"has none: leave it out, or take a mesh such as {like}"
            )
        return
    if model.family not in CONTEXT_FAMILIES:
        known = f"{', '.join(CONTEXT_FAMILIES[:-1])} and {CONTEXT_FAMILIES[-1]}"
        yield (
            f"mesh {mesh} splits samples over context={ways}, which is for {known}, and family is "
            f"{model.family}: leave it out"
        )
    if model.head != "language":
        yield (
            f"mesh {mesh} splits samples over context={ways}, which is for losses of tokens, and head is "
            f"{model.head}: leave it out"
        )
    length, each = model.sequence_length, 2 * ways
    if length % each:
        yield (
            f"sequence_length {length} does not divide into 2 chunks for each of the {ways} context ways of the mesh; "
            f"the nearest that do are {_nearest_multiples(length, each)}"
        )


def _expert_problems(model: Model, plan: Plan) -> Iterator[str]:
    """What experts do not go with, and ranks that would have none."""
    mesh, count = plan.mesh, model.num_experts
    if not count:
        if mesh.expert > 1:
            yield f"mesh {mesh} splits experts over expert={mesh.expert}, and num_experts is 0: leave expert out"
        return
    if count % mesh.expert:
        yield (
            f"num_experts {count} does not divide over {mesh.expert} expert ways of the mesh; take expert ways "
            f"that divide it: {nearest_divisors(count, mesh.expert)}"
        )
    if plan.unrolled:
        yield f"unroll_layers is for layers without experts, and num_experts is {count}: leave one of the two out"


def _batch_problems(batch: int, microbatch: int | None, ways: int) -> Iterator[str]:
    each = ways * (microbatch or 1)
    if batch % each == 0:
        return
    near = _nearest_multiples(batch, each)
    if microbatch in (None, 1):
        yield (
            f"global_batch_size {batch} does not divide over {ways} data ways of the mesh; "
            f"the nearest that do are {near}"
        )
    else:
        yield (
            f"global_batch_size {batch} is not a multiple of microbatch_size {microbatch} x {ways} data ways = {each}; "
            f"the nearest that are: {near}"
        )


def _choice_problems(model: Model, plan: Plan, microbatch: int | None) -> Iterator[str]:
    """Choices of one question go through the model together, as rows side by side."""
    choices = rows_of_question(model)
    rows = microbatch or plan.global_batch_size // plan.data_degree
    if rows % choices:
        name = "microbatch_size" if microbatch else "global_batch_size on each data rank"
        yield (
            f"{name} is {rows}, and a question has {choices} choices, each a row: take a multiple of {choices}, say "
            f"{-(-rows // choices) * choices}"
        )


def _settings_without_stages(plan: Plan) -> Iterator[str]:
    """Settings of stages on a mesh that has none."""
    per_stage = plan.layers_per_stage and _listed(plan.layers_per_stage)
    settings = {
        "pipeline_schedule": (plan.pipeline_schedule, "1f1b"),
        "chunks": (plan.chunks, 1),
        "layers_per_stage": (per_stage, None),
    }
    for name, (value, default) in settings.items():
        if value != default:
            like = replace(plan.mesh, stage=len(plan.layers_per_stage or (1, 1)))
            yield (
                f"{name} {value} is for stages of a pipeline, and mesh {plan.mesh} has 1: leave it out, or take a mesh "
                f"such as {like}"
            )


def _microbatch_problems(plan: Plan, microbatch: int | None) -> Iterator[str]:
    """Stages that would wait for the entire batch, because nobody said how to cut it."""
    if microbatch is not None:
        return
    share, stages = plan.global_batch_size // plan.data_degree, plan.mesh.stage
    fits = max(size for size in range(1, share + 1) if share % size == 0 and (share // size >= stages or size == 1))
    yield (
        f"mesh {plan.mesh} has {stages} stages, which need the {share} samples of a data rank as microbatches: set "
        f"microbatch_size, say {fits}, which makes {share // fits}"
    )


def _schedule_problems(model: Model, plan: Plan) -> Iterator[str]:
    stages, chunks = plan.mesh.stage, plan.chunks
    if chunks > 1 and plan.pipeline_schedule != "interleaved":
        yield (
            f"chunks {chunks} is for pipeline_schedule interleaved, and pipeline_schedule is "
            f"{plan.pipeline_schedule}: take chunks 1, or pipeline_schedule interleaved"
        )
    if chunks == 1 and plan.pipeline_schedule == "interleaved":
        share = min(plan.layers_per_stage or (model.num_layers // stages,))
        near = next((n for n in range(2, share + 1) if share % n == 0), None)
        other = f", or chunks {near}" if near else ""
        yield f"pipeline_schedule interleaved needs several chunks a stage, and chunks is 1: take 1f1b{other}"
    if plan.residuals == "megatron" and chunks > 1 and plan.microbatches % stages:
        yield (
            f"Megatron's interleaved schedule needs a multiple of {stages} stages as microbatches, not "
            f"{plan.microbatches}; the nearest that are: {_nearest_multiples(plan.microbatches, stages)}"
        )


def _layer_problems(model: Model, plan: Plan) -> Iterator[str]:
    """Layers that the stages and their chunks can't share."""
    stages, chunks, per_stage = plan.mesh.stage, plan.chunks, plan.layers_per_stage
    if dense_layers(model):
        stacks = {"num_layers": model.num_layers}
        yield from _broken_turns(model, plan)
    else:
        stacks = {f"num_{stack.side}layers": stack.layers for stack in _stacks(model)}
    if per_stage is not None and len(set(stacks.values())) > 1:
        counts = " and ".join(f"{name} {count}" for name, count in stacks.items())
        yield f"layers_per_stage {_listed(per_stage)} is for both stacks, which have {counts}: make them equal"
        return
    for name, count in stacks.items():
        if count < stages:
            yield (
                f"{name} {count} leaves some of the {stages} stages of the mesh without a layer: "
                f"take {count} stages or {stages} layers"
            )
        elif per_stage is None and count % (stages * chunks):
            yield _not_shared(name, count, stages, chunks)
        elif per_stage is not None:
            yield from _unequal_shares(name, count, plan, per_stage)


def _broken_turns(model: Model, plan: Plan) -> Iterator[str]:
    """Chunks that would end between layers of a turn."""
    if model.moe_every == 1:
        return
    shares = plan.layers_per_stage or (model.num_layers // plan.mesh.stage,)
    if odd := next((n for n in shares if n % (plan.chunks * model.moe_every)), None):
        yield (
            f"moe_every {model.moe_every} does not divide the {odd / plan.chunks:g} layers that a stage has at a time: "
            f"take num_layers or stages, chunks and layers_per_stage so that each has whole turns"
        )


def _not_shared(name: str, count: int, stages: int, chunks: int) -> str:
    """What layers that equal shares don't fit could be instead."""
    ways, what = stages * chunks, f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
    fits = [f"{_nearest_multiples(count, ways)} layers"]
    if count % chunks == 0:
        fits.append(f"{nearest_divisors(count // chunks, stages)} stages")
    if shares := balanced_layers(count, stages, chunks):
        fits.append(f"layers_per_stage {_listed(shares)}")
    return f"{name} {count} does not divide over {what}; the nearest that fit: {', or '.join(fits)}"


def _unequal_shares(name: str, count: int, plan: Plan, per_stage: tuple[int, ...]) -> Iterator[str]:
    """Why `layers_per_stage` does not fit a stack."""
    stages, chunks = plan.mesh.stage, plan.chunks
    asked, shares = f"layers_per_stage {_listed(per_stage)}", balanced_layers(count, stages, chunks)
    instead = f"take {_listed(shares)}" if shares else f"take {name} {_nearest_multiples(count, chunks)}"
    odd = next((n for n in per_stage if n < 1 or n % chunks), None)
    if len(per_stage) != stages:
        yield f"{asked} has {len(per_stage)} numbers, and mesh {plan.mesh} {stages} stages: {instead}"
    elif odd is not None:
        needs = f"a multiple of chunks {chunks}" if chunks > 1 else "at least 1"
        yield f"{asked} has {odd}, and each must be {needs}: {instead}"
    elif sum(per_stage) != count:
        yield f"{asked} adds up to {sum(per_stage)}, and {name} is {count}: {instead}"


def _recompute_problems(plan: Plan) -> Iterator[str]:
    """Ways of full recompute that stages leave no room for."""
    if plan.recompute != "full":
        return
    settings = {
        "recompute_method block": plan.recompute_first is not None,
        f"recompute_num_layers {plan.recompute_group}": plan.recompute_group > 1,
        "recompute_offload": plan.recompute_offload,
    }
    for setting, is_asked in settings.items():
        if is_asked:
            yield (
                f"{setting} is for layers that are all on one device, and with recompute full each of the "
                f"{plan.mesh.stage} stages of the mesh keeps the input of its layers alone: leave it out"
            )


def _unrolled_problems(model: Model, plan: Plan) -> Iterator[str]:
    """What layers without a loop do not go with."""
    if plan.mesh.has_pipeline:
        yield (
            f"unroll_layers is for layers that are all on one device, and mesh {plan.mesh} has {plan.stages} stages, "
            "where what layers keep waits in slots: leave it out"
        )
    if plan.recompute != "none":
        yield (
            f"unroll_layers goes with recompute none, and recompute is {plan.recompute}: without a loop XLA would "
            "compute several layers again at once, each in memory of its own; leave one of the two out"
        )
    if plan.zero == 3:
        yield "unroll_layers goes with zero 0 to 2; with zero 3 layers are gathered in a loop: leave one of the two out"
    if len(_stacks(model)) > 1:
        yield f"unroll_layers is for families of one stack of layers, and {model.family} has two: leave it out"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


def _stacks(model: Model) -> tuple[Stack, ...]:
    """A model's stacks of layers, whether or not its vocabulary is known."""
    return anatomy_of(model if model.vocab_size is not None else replace(model, vocab_size=1)).stacks


def check_ramp(config: Config, sizes: Sequence[int], mesh: MeshShape) -> None:
    """Checks that every global batch of a ramp is a whole number of microbatches on every data rank.

    Args:
      config: its own `global_batch_size` is checked by `check_config`.
      sizes: global batches that the run goes through.
      mesh: data ways.

    Raises:
      UserError: names the ramp, the first batch that does not fit, and what START and INCREMENT must be multiples of.
    """
    micro, ways = config.training.microbatch_size, mesh.batch_degree
    unit = (micro or 1) * ways
    wrong = next((size for size in sizes if size % unit), None)
    if wrong is not None:
        ramp = " ".join(map(str, config.training.rampup_batch_size or ()))
        needs = f"microbatch_size {micro} x {ways} data ways = {unit}" if micro else f"the {ways} data ways of the mesh"
        raise UserError(
            f"rampup_batch_size {ramp} passes through a global batch of {wrong}, which is not a multiple of {needs}; "
            f"take multiples of {unit} for START and INCREMENT"
        )


def parts_of_samples(layout: Layout, mesh: MeshShape) -> int:
    """Of what the length of every sample is a multiple: ranks share its tokens, or each has a part of the stream."""
    chunks = 2 * mesh.degree(layout.rules.seq) if layout.rules.seq else 1
    return math.lcm(chunks, mesh.degree(layout.rules.act_seq))


def num_microbatches(config: Config, mesh: MeshShape, global_batch_size: int | None = None) -> int:
    """Microbatches that a data rank accumulates in a step."""
    batch = global_batch_size or config.training.global_batch_size
    micro = config.training.microbatch_size or batch // mesh.batch_degree
    return batch // (micro * mesh.batch_degree)


def _nearest_multiples(size: int, of: int) -> str:
    below, above = size // of * of, -(-size // of) * of
    return " and ".join(str(n) for n in (below, above) if n > 0)


def _fitting(axis: str, size: int, ways: int, hidden_size: int) -> str:
    """What would divide: heads must divide hidden_size too, so another number of ways may be the only fix."""
    if axis == "heads":
        heads = [n for n in range(ways, hidden_size + 1, ways) if hidden_size % n == 0]
        near = sorted(heads, key=lambda n: abs(n - size))[:2]
        choices = [f"{' or '.join(map(str, sorted(near)))} heads"] if near else []
        choices.append(f"model ways that divide {size}: {nearest_divisors(size, ways)}")
        return f"take {', or '.join(choices)}"
    advice = " (set vocab_multiple to a multiple of the model ways)" if axis == "vocab" else ""
    return f"the nearest that do are {_nearest_multiples(size, ways)}{advice}"
