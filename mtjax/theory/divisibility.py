"""What must be divisible by what: model by mesh, batch by data ranks and microbatches, layers by stages."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtjax.config import Config, Model
from mtjax.config.sizes import mlp_size, nearest_divisors, num_kv_heads, padded_vocab_size
from mtjax.errors import UserError
from mtjax.theory.anatomy import Stack
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plans import Plan


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
    yield from _model_problems(model, plan)
    yield from _batch_problems(plan.global_batch_size, plan.microbatch_size, plan.mesh.data)
    yield from _stage_problems(model, plan)
    if plan.zero not in range(4):
        yield f"ZeRO has stages 0 to 3, not {plan.zero}"


def check_config(config: Config, mesh: MeshShape) -> None:
    """Checks that a run's model and batch divide over a mesh; a vocabulary that is not known yet is left out.

    Raises:
      UserError: names the dimension, both numbers and the nearest sizes that fit.
    """
    training, plan = config.training, Plan.of(config, mesh)
    batch = _batch_problems(training.global_batch_size, training.microbatch_size, mesh.data)
    reason = next((text for found in (_model_problems(config.model, plan), batch) for text in found), None)
    if reason is not None:
        raise UserError(reason)


def _model_problems(model: Model, plan: Plan) -> Iterator[str]:
    rules, mesh = plan.layout(model).rules, plan.mesh
    sizes = [("heads", "num_heads", model.num_heads), ("mlp", "mlp_size", mlp_size(model))]
    if model.vocab_size is not None:
        sizes.append(("vocab", "the padded vocabulary", padded_vocab_size(model)))
    sizes += [("act_seq", f"{stack.side}sequence_length", stack.tokens) for stack in _stacks(model)]
    for axis, name, size in sizes:
        ways = mesh.ways(rules.axes(axis))
        if size % ways:
            over = " x ".join(rules.axes(axis))
            yield (
                f"{name} {size} does not divide over {ways} {over} ways of the mesh; "
                f"{_fitting(axis, size, ways, model.hidden_size)}"
            )
    ways, shared = mesh.ways(rules.heads), num_kv_heads(model)
    if shared % ways and ways % shared:
        over = " x ".join(rules.heads)
        yield (
            f"num_kv_heads {shared} is neither a multiple nor a divisor of the {ways} {over} ways of the mesh; take "
            f"{over} ways among the divisors or multiples of {shared}"
        )


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


def _stage_problems(model: Model, plan: Plan) -> Iterator[str]:
    stages, chunks = plan.mesh.stage, plan.chunks
    for stack in _stacks(model):
        name, count = f"num_{stack.side}layers", stack.layers
        if count % (stages * chunks):
            what = f"{stages} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
            near = nearest_divisors(count, stages * chunks)
            yield f"{name} {count} does not divide over {what}; the nearest numbers that fit are {near}"
    if plan.schedule == "interleaved" and stages > 1 and plan.microbatches % stages:
        yield (
            f"the interleaved schedule needs a multiple of {stages} stages as microbatches, not {plan.microbatches}; "
            f"the nearest that are: {_nearest_multiples(plan.microbatches, stages)}"
        )
    if chunks > 1 and (plan.schedule != "interleaved" or stages == 1):
        yield f"{chunks} chunks per stage need --schedule interleaved and more than one stage"


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
    micro, ways = config.training.microbatch_size, mesh.data
    unit = (micro or 1) * ways
    wrong = next((size for size in sizes if size % unit), None)
    if wrong is not None:
        ramp = " ".join(map(str, config.training.rampup_batch_size or ()))
        needs = f"microbatch_size {micro} x {ways} data ways = {unit}" if micro else f"the {ways} data ways of the mesh"
        raise UserError(
            f"rampup_batch_size {ramp} passes through a global batch of {wrong}, which is not a multiple of {needs}; "
            f"take multiples of {unit} for START and INCREMENT"
        )


def num_microbatches(config: Config, mesh: MeshShape, global_batch_size: int | None = None) -> int:
    """Microbatches that a data rank accumulates in a step."""
    batch = global_batch_size or config.training.global_batch_size
    micro = config.training.microbatch_size or batch // mesh.data
    return batch // (micro * mesh.data)


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
