"""Symbols of a pipeline's parameters in the formulas of contracts."""

from collections.abc import Mapping, Sequence
from functools import cache

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.counts import Counts, counts, peak_stage_counts, stage_weights, trainable_counts
from mtjax.analysis.parts.embedding import LookupPart, PositionsPart
from mtjax.config.adapters import is_trainable
from mtjax.config.shared_blocks import BLOCK
from mtjax.config.sizes import output_is_tied
from mtjax.layout.plan import Plan


@cache
def symbols_of_stages(anatomy: Anatomy, plan: Plan) -> Mapping[str, int]:
    """Returns the symbols of a pipeline's parameters, and of those that each tick gathers."""
    held, adapters = peak_stage_counts(anatomy, plan).shared, trainable_counts(anatomy, plan).shared
    blocks, of_blocks = block_counts(anatomy, plan), block_counts(anatomy, plan, trained=True)
    symbols = {
        "model_degree": plan.mesh.model,
        "shared_parameters": _shared_parameters(anatomy, plan),
        "parameters_used_again": _used_again(anatomy, plan),
        "outside_parameters": held.all - held.in_layers - blocks.all,
        "unsplit_outside_parameters": held.replicated - held.replicated_in_layers - blocks.replicated,
        "outside_adapters": adapters.all - adapters.in_layers - of_blocks.all,
        "unsplit_outside_adapters": adapters.replicated - adapters.replicated_in_layers - of_blocks.replicated,
        "block_parameters": blocks.all - blocks.replicated,
        "block_adapters": of_blocks.all - of_blocks.replicated,
        "block_matrices": blocks.outside_matrices,
        "block_vectors": blocks.outside_vectors,
        "outside_matrices": held.outside_matrices - blocks.outside_matrices,
        "outside_vectors": held.outside_vectors - blocks.outside_vectors,
    }
    for section in anatomy.sections:
        side, sharded = section[-1].side, _section_counts(anatomy, plan, section)
        trained = sharded if anatomy.model.lora_rank == 0 else _section_counts(anatomy, plan, section, trained=True)
        symbols |= {
            f"{side}turn_parameters": (sharded.all - sharded.replicated) // plan.chunks,
            f"{side}turn_adapters": (trained.all - trained.replicated) // plan.chunks,
            f"{side}layer_matrices": sharded.layer_matrices // plan.chunks,
        }
    return symbols


def block_counts(anatomy: Anatomy, plan: Plan, *, trained: bool = False) -> Counts:
    """Counts the parameters of shared blocks that ZeRO-2 and 3 gather and reduce once a step, as layers read them in
    every tick of a pipeline; if `trained`, of those that are trained. None without stages."""
    if not plan.is_staged or plan.zero < 2:
        return Counts()
    weights = [weight for weight in anatomy.outside_weights if weight.name.startswith(BLOCK)]
    chosen = [weight for weight in weights if not trained or is_trainable(anatomy.model, weight.name)]
    return counts(chosen, plan.layout(anatomy.model), plan.mesh)


def _section_counts(anatomy: Anatomy, plan: Plan, section: Sequence[StackParts], *, trained: bool = False) -> Counts:
    """Counts what a stage holds of a section's layers, without experts' matrices; if `trained`, of what is trained."""
    paths = tuple(f"{stack.path}.layers." for stack in section)
    weights = [weight for weight in stage_weights(anatomy, plan) if weight.name.startswith(paths)]
    chosen = [weight for weight in weights if not trained or is_trainable(anatomy.model, weight.name)]
    return counts(chosen, plan.layout(anatomy.model), plan.mesh).shared


def _shared_parameters(anatomy: Anatomy, plan: Plan) -> int:
    """Returns the elements outside the layers whose gradients a device sums over the stages: its part of those that
    ZeRO splits."""
    layout = plan.layout(anatomy.model)
    outside = anatomy.outside_weights
    held = counts([weight for weight in outside if is_trainable(anatomy.model, weight.name)], layout, plan.mesh)
    if not layout.zero:
        return held.all
    experts, others = held.experts - held.replicated_experts, held.shared
    # A rank sends its own part only, over the stages.
    shards = experts // plan.expert_zero_degree + (others.all - others.replicated) // plan.zero_degree
    return held.replicated + shards


def _used_again(anatomy: Anatomy, plan: Plan) -> int:
    """Returns the elements of tables outside the layers that ZeRO splits, for each of their uses but the first."""
    layout, again = plan.layout(anatomy.model), 0
    lookups = sum(isinstance(part, LookupPart) for part in anatomy.embed)
    for part in anatomy.embed:
        uses = len(set(part.sides)) if isinstance(part, PositionsPart) else 1
        with_head = output_is_tied(anatomy.model) or anatomy.predictors is not None
        uses = lookups + with_head if isinstance(part, LookupPart) else uses
        held = counts(part.weights, layout, plan.mesh)
        # Each use of a table is in a branch of its own, which reduces what it has.
        again += (uses - 1) * (held.all - held.replicated)
    return again
