"""What a run sends: the sum of what its parts send over the model ways, and what crosses `data`.

Per pre-LN layer and microbatch the tensor layout sends what Figure 4 of the paper (arXiv 1909.08053) shows: two
all-reduces forward, two backward, and one more when the layer is computed again, as the second one's result is not
needed then. With the sequence split each all-reduce becomes a reduce-scatter and an all-gather of the same bytes.
"""

from dataclasses import replace
from functools import cache

from mtjax.theory.anatomy import Anatomy
from mtjax.theory.contract import GRADIENTS, PARAMETERS, Contract, Dtype, Expectation, Kind, Symbols, add_up
from mtjax.theory.counts import fullest_counts
from mtjax.theory.layout import Layout
from mtjax.theory.parts.part import Stream
from mtjax.theory.plans import Plan
from mtjax.theory.rules import DATA


def contract_of(anatomy: Anatomy, plan: Plan) -> Contract:
    """The contract of a model on a plan's layout."""
    return _contract(anatomy, plan.layout(anatomy.model), plan.label_smoothing, plan.drops_last_reduction)


@cache
def _contract(anatomy: Anatomy, layout: Layout, label_smoothing: bool, drops_last: bool) -> Contract:
    common = Stream(
        split=layout.sequence, label_smoothing=label_smoothing, shares_heads=not layout.rules.axes("kv_heads")
    )
    lines = [line for part in anatomy.outside for line in part.sends(common)]
    for stack, part in anatomy.layer_parts():
        needed = part is not stack.parts[-1] or stack.is_post_norm or not drops_last
        lines += part.sends(replace(common, side=stack.side, needed_again=needed))
    family = anatomy.model.family
    name = layout.name if family in ("gpt", "llama") else f"{family}, {layout.name}"
    return Contract(name, add_up([*lines, *over_data_lines(layout.zero)]), split=("heads", "mlp", "vocab"))


def over_data_lines(zero: int) -> list[Expectation]:
    """Gradients and, with ZeRO, parameters: everything that may cross `data`."""

    def line(
        phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = "float32", hoisted: bool = False
    ) -> Expectation:
        return Expectation(phase, kind, DATA, count, elements, dtype, pooled=True, hoisted=hoisted, why=why)

    if not zero:
        why = "every gradient once a step, however many microbatches"
        return [line(GRADIENTS, "all-reduce", "1", "parameters", why)]
    whole = line(GRADIENTS, "all-reduce", "1", "unsplit_parameters", "gradients not divisible by the data ways")
    split = "parameters - unsplit_parameters"
    times = "microbatches" if zero >= 2 else "1"
    often = "in every microbatch, so that full gradients never live" if zero >= 2 else "once a step"
    scatter = line(GRADIENTS, "reduce-scatter", times, split, f"each rank sums its part of the gradients, {often}")
    if zero < 3:
        return [whole, scatter, line(PARAMETERS, "all-gather", "1", split, "the updated parameters")]
    times = "parameter_gathers*microbatches"
    often = "forward and again backward; layers of a group also when their group is computed again"
    vectors = "layer_vectors + outside_vectors"
    return [
        whole,
        scatter,
        line(PARAMETERS, "all-gather", times, "layer_matrices", f"matrices of the layers, {often}", "compute"),
        line(
            PARAMETERS, "all-gather", "microbatches", "outside_matrices", "matrices outside the layers", "compute", True
        ),
        line(PARAMETERS, "all-gather", times, vectors, "biases and norms, as often as they are needed", hoisted=True),
    ]


def symbols_of(anatomy: Anatomy, plan: Plan) -> Symbols:
    """The words of the formulas, for a plan; on stages those of the stage that holds most."""
    model, counts = anatomy.model, fullest_counts(anatomy, plan)
    symbols = {
        "microbatches": plan.microbatches,
        "batch": plan.microbatch_size,
        "hidden": model.hidden_size,
        "parameter_gathers": 3 if plan.grouped_layers(model.num_layers) else 2,
        "parameters": counts.all,
        "unsplit_parameters": counts.unsplit,
        "layer_matrices": counts.layer_matrices,
        "layer_vectors": counts.layer_vectors,
        "outside_matrices": counts.outside_matrices,
        "outside_vectors": counts.outside_vectors,
    }
    for stack in anatomy.stacks:
        layers = stack.layers // plan.mesh.stage
        symbols |= {
            f"{stack.side}sequence": stack.tokens,
            f"{stack.side}layers": layers,
            f"{stack.side}recomputed_layers": plan.recomputed_layers(layers),
            f"{stack.side}grouped_layers": plan.grouped_layers(layers),
        }
    for part in (*anatomy.outside, *(part for _, part in anatomy.layer_parts())):
        symbols |= part.symbols
    return symbols
