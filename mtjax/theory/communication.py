"""What a run sends: the sum of what its parts send over the model ways, and what crosses `data`.

Per pre-LN layer and microbatch the tensor layout sends what Figure 4 of the paper (arXiv 1909.08053) shows: two
all-reduces forward, two backward, and one more when the layer is computed again, as the second one's result is not
needed then. With the sequence split each all-reduce becomes a reduce-scatter and an all-gather of the same bytes.
"""

from dataclasses import replace
from functools import cache

from mtjax.config.sizes import output_is_tied
from mtjax.theory.anatomy import Anatomy
from mtjax.theory.contract import GRADIENTS, PARAMETERS, STAGES, Contract, Dtype, Expectation, Kind, Symbols, add_up
from mtjax.theory.counts import counts, fullest_counts
from mtjax.theory.layout import Layout
from mtjax.theory.parts.embedding import Lookup, Positions
from mtjax.theory.parts.part import Stream
from mtjax.theory.plans import Plan
from mtjax.theory.rules import DATA, MODEL, STAGE
from mtjax.theory.stages import layers_in_chunk
from mtjax.theory.timetable import num_ticks


def contract_of(anatomy: Anatomy, plan: Plan) -> Contract:
    """The contract of a model on a plan's layout."""
    pipeline = "" if not plan.is_staged else "recomputed" if plan.recompute == "full" else "kept"
    scattered = plan.mesh.model > 1 and all(stack.tokens % plan.mesh.model == 0 for stack in anatomy.stacks)
    settings = (plan.label_smoothing, plan.drops_last_reduction, pipeline, scattered, plan.gradient_wire)
    return _contract(anatomy, plan.layout(anatomy.model), *settings)


@cache
def _contract(
    anatomy: Anatomy,
    layout: Layout,
    label_smoothing: bool,
    drops_last: bool,
    pipeline: str,
    scattered: bool,
    wire: Dtype,
) -> Contract:
    """`pipeline`: whether the stages' chunks are "recomputed" or "kept"; "" without stages."""
    turns = "ticks" if pipeline else "microbatches"
    common = Stream(
        split=layout.sequence,
        label_smoothing=label_smoothing,
        shares_heads=not layout.rules.axes("kv_heads"),
        turns=turns,
        forward_turns="2*ticks" if pipeline == "recomputed" else turns,
    )
    lines = [line for part in anatomy.outside for line in part.sends(common)]
    for stack, part in anatomy.layer_parts():
        needed = part is not stack.parts[-1] or stack.is_post_norm or not drops_last
        lines += part.sends(replace(common, side=stack.side, needed_again=needed))
    lines += over_data_lines(layout.zero, bool(pipeline), wire)
    lines += over_stage_lines(anatomy, layout, scattered, wire) if pipeline else []
    family = anatomy.model.family
    name = layout.name if family in ("gpt", "llama") else f"{family}, {layout.name}"
    return Contract(name, add_up(lines), split=("heads", "mlp", "vocab"))


def over_stage_lines(anatomy: Anatomy, layout: Layout, scattered: bool, wire: Dtype = "float32") -> list[Expectation]:
    """What stages of a pipeline send each other, in every tick forward and backward, and once a step.

    Args:
      anatomy: of the model; with several stacks, the streams of all travel together.
      layout: whether the stream is split along the sequence.
      scattered: whether the model ranks can split what they all have for the way.
      wire: type in which gradients travel.
    """
    lines = []
    for stack in anatomy.stacks:
        elements = f"batch*{stack.side}sequence*hidden"
        why = "activations to the next chunk, gradients to the one before"
        each = f"{elements}/model_ways" if layout.sequence or scattered else elements
        lines.append(Expectation(STAGES, "collective-permute", STAGE, "2*ticks", each, why=why))
        if scattered and not layout.sequence:
            whole = "the stream, which travelled in parts"
            lines.append(Expectation(STAGES, "all-gather", MODEL, "2*ticks", elements, why=whole))
    why = "gradients of what is outside the layers, which every stage holds"
    shared = Expectation(GRADIENTS, "all-reduce", STAGE, "1", "shared_parameters", wire, pooled=True, why=why)
    return [*lines, shared]


def over_data_lines(zero: int, staged: bool = False, wire: Dtype = "float32") -> list[Expectation]:
    """Gradients, in the type `wire`, and, with ZeRO, parameters: everything that may cross `data`."""

    def line(
        phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = wire, hoisted: bool = False
    ) -> Expectation:
        return Expectation(phase, kind, DATA, count, elements, dtype, pooled=True, hoisted=hoisted, why=why)

    if not zero:
        why = "every gradient once a step, however many microbatches"
        return [line(GRADIENTS, "all-reduce", "1", "parameters", why)]
    whole = line(GRADIENTS, "all-reduce", "1", "unsplit_parameters", "gradients not divisible by the data ways")
    split, turns = "parameters - unsplit_parameters", "ticks" if staged else "microbatches"
    times = turns if zero >= 2 else "1"
    often = "in every microbatch, so that full gradients never live" if zero >= 2 else "once a step"
    scatters = [line(GRADIENTS, "reduce-scatter", times, split, f"each rank sums its part of the gradients, {often}")]
    if staged and zero >= 2:
        why = "once more where embeddings and head, each a branch of its own, have a table in common"
        scatters.append(line(GRADIENTS, "reduce-scatter", times, "parameters_used_again", why))
    if zero < 3:
        return [whole, *scatters, line(PARAMETERS, "all-gather", "1", split, "the updated parameters", "float32")]
    times = f"parameter_gathers*{turns}"
    often = "forward and again backward; layers of a group also when their group is computed again"
    vectors, small = "layer_vectors + outside_vectors", "biases and norms, as often as they are needed"
    outside = "outside_matrices + parameters_used_again" if staged else "outside_matrices"
    return [
        whole,
        *scatters,
        line(PARAMETERS, "all-gather", times, "layer_matrices", f"matrices of the layers, {often}", "compute"),
        line(PARAMETERS, "all-gather", turns, outside, "matrices outside the layers", "compute", True),
        line(PARAMETERS, "all-gather", times, vectors, small, "float32", True),
    ]


def symbols_of(anatomy: Anatomy, plan: Plan) -> Symbols:
    """The words of the formulas, for a plan; on stages those of the stage that holds most."""
    model, held = anatomy.model, fullest_counts(anatomy, plan)
    symbols = {
        "microbatches": plan.microbatches,
        "batch": plan.microbatch_size,
        "hidden": model.hidden_size,
        "parameter_gathers": 3 if plan.grouped_layers(model.num_layers) else 2,
        "parameters": held.all,
        "unsplit_parameters": held.unsplit,
        "layer_matrices": held.layer_matrices,
        "layer_vectors": held.layer_vectors,
        "outside_matrices": held.outside_matrices,
        "outside_vectors": held.outside_vectors,
    }
    staged = plan.is_staged
    if staged:
        chunks = plan.chunks * len(anatomy.stacks)
        symbols |= {
            "ticks": num_ticks(plan.mesh.stage, plan.microbatches, chunks),
            "model_ways": plan.mesh.model,
            "shared_parameters": _shared_parameters(anatomy, plan),
            "parameters_used_again": _used_again(anatomy, plan),
            "parameter_gathers": 3 if plan.recompute == "full" else 2,
        }
    for stack in anatomy.stacks:
        layers = layers_in_chunk(stack.layers, plan)
        symbols |= {
            f"{stack.side}sequence": stack.tokens,
            f"{stack.side}layers": layers,
            f"{stack.side}recomputed_layers": 0 if staged else plan.recomputed_layers(layers),
            f"{stack.side}grouped_layers": 0 if staged else plan.grouped_layers(layers),
        }
    for part in (*anatomy.outside, *(part for _, part in anatomy.layer_parts())):
        symbols |= part.symbols
    return symbols


def _shared_parameters(anatomy: Anatomy, plan: Plan) -> int:
    """Elements outside the layers whose gradients a device sums over the stages: its part of those that ZeRO splits."""
    layout = plan.layout(anatomy.model)
    held = counts([weight for part in anatomy.outside for weight in part.weights], layout, plan.mesh)
    return held.all if not layout.zero else held.unsplit + (held.all - held.unsplit) // plan.mesh.data


def _used_again(anatomy: Anatomy, plan: Plan) -> int:
    """Elements of tables outside the layers that ZeRO splits, for each of their uses but the first."""
    layout, again = plan.layout(anatomy.model), 0
    lookups = sum(isinstance(part, Lookup) for part in anatomy.embed)
    for part in anatomy.embed:
        uses = len(part.sides) if isinstance(part, Positions) else 1
        uses = lookups + output_is_tied(anatomy.model) if isinstance(part, Lookup) else uses
        held = counts(part.weights, layout, plan.mesh)
        again += (uses - 1) * (held.all - held.unsplit)
    return again
