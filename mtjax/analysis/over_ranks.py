"""Contract lines over `data` and other axes whose ranks have the same parameters: gradients, ZeRO's parameters."""

from collections.abc import Mapping

from mtjax.analysis.contract import GRADIENTS, PARAMETERS, Dtype, Expectation, Kind


def over_ranks_lines(
    zero: int, ticks: Mapping[str, str], comm_dtype: Dtype, ranks: str, adapts: bool, unrolled: bool, blocks: int
) -> list[Expectation]:
    """Returns the gradients (in `comm_dtype`) and ZeRO parameters that cross `data` and the other axes of `ranks`.

    `ticks`: a section's symbol -> its last stack's side; `adapts` (LoRA): only adapters and a head are trained;
    `unrolled`: whether the first layer is in no loop with others; `blocks`: how many blocks layers share.
    """
    staged = bool(ticks)
    of = "adapters" if adapts else "parameters"

    def line(
        phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = comm_dtype, hoisted: bool = False
    ) -> Expectation:
        return Expectation(phase, kind, ranks, count, elements, dtype, pooled=True, hoisted=hoisted, why=why)

    if not zero:
        why = "every gradient once a step, however many microbatches"
        return [line(GRADIENTS, "all-reduce", "1", of, why)]
    whole = line(GRADIENTS, "all-reduce", "1", f"unsplit_{of}", "gradients that the ZeRO degree does not divide")
    split, turns = f"{of} - unsplit_{of}", "microbatches"
    often = "in every microbatch, so that full gradients never live" if zero >= 2 else "once a step"
    why = f"each rank sums its part of the gradients, {often}"
    # On stages gradients are reduced in each tick, of the layers that ran in it; shared blocks, which every tick uses,
    # once a step.
    if staged and zero >= 2:
        scattered = [(each, f"{side}turn_{of}") for each, side in ticks.items()]
        scattered.append(("microbatches", f"outside_{of} - unsplit_outside_{of}"))
        scattered += [("1", f"block_{of}")] if blocks else []
    else:
        scattered = [("microbatches" if zero >= 2 else "1", split)]
    scatters = [line(GRADIENTS, "reduce-scatter", times, elements, why) for times, elements in scattered]
    if staged and zero >= 2 and not adapts:
        why = "once more where embeddings and head, each a separate branch, have a table in common"
        scatters.append(line(GRADIENTS, "reduce-scatter", "microbatches", "parameters_used_again", why))
    if zero < 3:
        why = "matrices, once a step, however many microbatches"
        gathers = [line(PARAMETERS, "all-gather", "1", "split_matrices", why, "compute")]
        gathers.append(line(PARAMETERS, "all-gather", "1", "split_vectors", "biases and norms, once a step", "float32"))
        return [whole, *scatters, *gathers]
    of_layers = {each: f"{side}layer_matrices" for each, side in ticks.items()} or {turns: "layer_matrices"}
    gathers = _gathers_for_each_use(ranks, of_layers, staged, skips_first=adapts and unrolled)
    if staged and blocks:
        why = "shared blocks, which layers read in every tick, once a step"
        gathers.append(line(PARAMETERS, "all-gather", "1", "block_matrices", why, "compute"))
        gathers.append(line(PARAMETERS, "all-gather", "1", "block_vectors", why, "float32"))
    return [whole, *scatters, *gathers]


def _gathers_for_each_use(
    ranks: str, of_layers: Mapping[str, str], staged: bool, *, skips_first: bool
) -> list[Expectation]:
    """Returns the all-gathers of ZeRO-3.

    Args:
      ranks: axes over which parameters are sharded.
      of_layers: how often a step runs layers -> formula: their matrices.
      staged: whether there are pipeline stages.
      skips_first: whether XLA may not gather again what the first layer's backward pass reads for the gradient of its
        input alone, which is not needed.
    """

    def line(count: str, elements: str, why: str, dtype: Dtype = "compute", hoisted: bool = False) -> Expectation:
        return Expectation(PARAMETERS, "all-gather", ranks, count, elements, dtype, True, hoisted=hoisted, why=why)

    why = "matrices of the layers, forward and backward; in groups of recomputed layers also in the recompute"
    lines = []
    for times, matrices in of_layers.items():
        first = f"{matrices}/layers"
        others = f"{matrices} - {first}" if skips_first else matrices
        lines.append(line(f"parameter_gathers*{times}", others, why))
        if skips_first:
            lines.append(line(f"parameter_gathers*{times}", first, f"{why}: the first layer's", hoisted=True))
    turns, ends = ("ticks", "embedding_ticks") if staged else ("microbatches", "microbatches")
    # On stages embedding and losses are branches of their own, which gather a common table each.
    outside = "outside_matrices + parameters_used_again" if staged else "outside_matrices"
    vectors, small = "layer_vectors + outside_vectors", "biases and norms, as often as they are needed"
    return [
        *lines,
        line(ends, outside, "matrices outside the layers", hoisted=True),
        line(f"parameter_gathers*{turns}", vectors, small, "float32", hoisted=True),
    ]


def over_ranks_lines_of_experts(
    zero: int, comm_dtype: Dtype, ranks: str, turns: str, has_biases: bool
) -> list[Expectation]:
    """Returns the same of experts' matrices and biases, which the axes of `ranks` hold alike and `expert` splits;
    `turns`: how often a step goes through the layers."""

    def line(phase: str, kind: Kind, count: str, elements: str, why: str, dtype: Dtype = comm_dtype) -> Expectation:
        return Expectation(phase, kind, ranks, count, elements, dtype, pooled=True, why=why)

    if not zero:
        return [line(GRADIENTS, "all-reduce", "1", "expert_parameters", "experts' gradients, once a step")]
    whole = line(GRADIENTS, "all-reduce", "1", "unsplit_expert_parameters", "experts' that ZeRO can't divide")
    split = "expert_parameters - unsplit_expert_parameters"
    times, part = (turns, "turn_experts") if zero >= 2 else ("1", split)
    lines = [whole, line(GRADIENTS, "reduce-scatter", times, part, "each rank sums its part of experts' gradients")]
    times, prefix, often = "1", "all_", "once a step"
    if zero == 3:
        times, prefix, often = f"parameter_gathers*{turns}", "", "forward and again backward"
    matrices = line(
        PARAMETERS, "all-gather", times, f"{prefix}expert_matrices", f"experts' matrices, {often}", "compute"
    )
    if not has_biases:
        return [*lines, matrices]
    why = f"experts' biases, {often}"
    return [*lines, matrices, line(PARAMETERS, "all-gather", times, f"{prefix}expert_vectors", why, "float32")]
