"""What layers of multi-token prediction add to a contract and to its symbols: they run with the head, once per
microbatch, and every pipeline stage has their parameters."""

from dataclasses import replace

from mtjax.analysis.anatomy import Anatomy, Predictors
from mtjax.analysis.contract import GRADIENTS, PARAMETERS, Dtype, Expectation, Symbols
from mtjax.analysis.counts import Counts, counts
from mtjax.analysis.parts.experts import exchanged_tokens
from mtjax.analysis.parts.part import ResidualStream
from mtjax.config.sizes import main_layers
from mtjax.layout.plan import Plan


def prediction_lines(anatomy: Anatomy, ends: ResidualStream, *, drops_last: bool) -> list[Expectation]:
    """Returns the lines of the layers' components.

    Args:
      anatomy: of the model.
      ends: the residual stream outside the stacks.
      drops_last: whether the recompute of a layer omits its last matmul.
    """
    if (stack := anatomy.predictors) is None:
        return []
    # With the head: once per microbatch, and in no stack, so that stages and recompute of chunks do not matter.
    stream, lines = replace(ends, side=stack.side, forward_turns=ends.turns, unstacked=True), []
    for part in stack.parts:
        lines += part.collectives(replace(stream, needed_again=part not in stack.unread or not drops_last))
    return lines


def expert_lines(anatomy: Anatomy, zero: int, comm_dtype: Dtype, ranks: str) -> list[Expectation]:
    """Returns what ZeRO-2 and 3 send of the layers' experts: outside the stacks, once per microbatch.

    Args:
      anatomy: of the model.
      zero: stage of ZeRO.
      comm_dtype: type in which gradients are reduced.
      ranks: axes over which ranks have the same experts.
    """
    if anatomy.predictors is None or zero < 2:
        return []

    def line(phase: str, kind: str, elements: str, why: str, dtype: Dtype, *, hoisted: bool = False) -> Expectation:
        settings = {"pooled": True, "hoisted": hoisted, "why": f"{why} of multi-token prediction's experts"}
        return Expectation(phase, kind, ranks, "microbatches", elements, dtype, **settings)  # pyright: ignore[reportArgumentType]

    lines = [line(GRADIENTS, "reduce-scatter", "outside_experts", "each rank sums its part of gradients", comm_dtype)]
    if zero == 3:
        lines.append(line(PARAMETERS, "all-gather", "outside_expert_matrices", "matrices", "compute", hoisted=True))
        if anatomy.model.expert_bias:
            lines.append(line(PARAMETERS, "all-gather", "outside_expert_vectors", "biases", "float32", hoisted=True))
    return lines


def counts_of_predictors(anatomy: Anatomy, plan: Plan) -> Counts:
    """Counts the elements of the layers' parameters on a device."""
    weights = anatomy.predictors.weights if anatomy.predictors else ()
    return counts(weights, plan.layout(anatomy.model), plan.mesh)


def prediction_symbols(anatomy: Anatomy, plan: Plan) -> Symbols:
    """Returns the symbols of the lines above; {} without such layers."""
    if (stack := anatomy.predictors) is None:
        return {}
    held, side = counts_of_predictors(anatomy, plan), stack.side
    symbols = {
        f"{side}sequence": stack.tokens,
        f"{side}layers": stack.layers,
        f"{side}recomputed_layers": recomputed_predictors(stack, plan),
        f"{side}grouped_layers": 0,
        f"{side}unread_gradients": 0,
        "outside_experts": held.experts - held.replicated_experts,
        "outside_expert_matrices": held.expert_matrices,
        "outside_expert_vectors": held.expert_vectors,
    }
    for part in stack.parts:
        symbols |= part.symbols(plan)
    return symbols


def recomputed_predictors(stack: Predictors, plan: Plan) -> int:
    """Returns how many of the layers are recomputed from their inputs: all with full recompute, and in a pipeline,
    whose stages run the head forward and backward at once, none."""
    return stack.layers if plan.recompute == "full" and not plan.is_staged else 0


def expert_symbols(anatomy: Anatomy, plan: Plan, every: Counts, trained: Counts, in_turn: int) -> dict[str, int]:
    """Returns the symbols of models with experts.

    Args:
      anatomy: of the model.
      plan: of the run.
      every: parameters of a device.
      trained: those of them that have gradients.
      in_turn: chunks of a stage, which run in turn.
    """
    ahead = counts_of_predictors(anatomy, plan)
    return {
        "expert_degree": plan.mesh.expert,
        "exchanged_tokens": exchanged_tokens(anatomy.model, plan),
        "routers": len(main_layers(anatomy.model)) + anatomy.model.mtp_num_layers,
        "expert_parameters": trained.experts,
        "unsplit_expert_parameters": trained.replicated_experts,
        "turn_experts": (trained.experts - ahead.experts - trained.replicated_experts + ahead.replicated_experts)
        // in_turn,
        "all_expert_matrices": trained.expert_matrices,
        "expert_matrices": (every.expert_matrices - ahead.expert_matrices) // in_turn,
        "all_expert_vectors": trained.expert_vectors,
        "expert_vectors": (every.expert_vectors - ahead.expert_vectors) // in_turn,
    }
