"""The contract of a run: the collectives of its components over `model`, and those over `data` and the other axes.

Per pre-LN layer and microbatch, tensor parallelism has the collectives of Figure 4 of the paper (arXiv 1909.08053): two
all-reduces forward, two backward, and one more when the layer is recomputed, since the result of the second one is not
needed then. With sequence parallelism each all-reduce becomes a reduce-scatter and an all-gather of the same bytes.
"""

import re
from dataclasses import replace
from functools import cache
from typing import Any

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.contract import (
    GRADIENTS,
    JOINED,
    LAYER_BACKWARD,
    LAYER_RECOMPUTE,
    STAGES,
    Contract,
    Dtype,
    Expectation,
    Symbols,
    sum_expectations,
)
from mtjax.analysis.counts import Counts, counts, peak_stage_counts, trainable_counts
from mtjax.analysis.float8 import float8_symbols, gathered_types, with_float8
from mtjax.analysis.frozen import unread_gradients
from mtjax.analysis.groups import EXPERT_ZERO_DEGREE, across_groups, group_symbols
from mtjax.analysis.optimizer import update_lines, update_symbols
from mtjax.analysis.over_ranks import over_ranks_lines, over_ranks_lines_of_experts
from mtjax.analysis.parts.experts import load_line
from mtjax.analysis.parts.heads import teacher_lines, teacher_table
from mtjax.analysis.parts.part import ResidualStream
from mtjax.analysis.prediction import expert_lines, expert_symbols, prediction_lines, prediction_symbols
from mtjax.analysis.stage_symbols import symbols_of_stages
from mtjax.config import Model
from mtjax.config.adapters import is_trainable, trains_all
from mtjax.config.families import is_decoder
from mtjax.config.shared_blocks import num_blocks
from mtjax.config.sizes import head_dim, joins_outputs, num_kv_heads, value_head_dim
from mtjax.layout.attention_kernel import ContextParallelism
from mtjax.layout.layouts import Layout
from mtjax.layout.mesh import AXES
from mtjax.layout.plan import ExpertDispatch, Plan
from mtjax.layout.rules import MODEL, STAGE
from mtjax.layout.stages import layers_in_chunk
from mtjax.layout.timetable import num_ticks


def contract_of(anatomy: Anatomy, plan: Plan) -> Contract:
    """Returns the contract of a model on a plan's layout."""
    pipeline = "" if not plan.is_staged else "recomputed" if plan.recompute == "full" else "kept"
    # Tensor parallel ranks that all have the whole stream each send a part of it to the next stage, if they can divide
    # the tokens.
    scattered = plan.mesh.model > 1 and all(
        stack.tokens // plan.mesh.context % plan.mesh.model == 0 for stack in anatomy.stacks
    )
    # Only what lines depend on, so that plans which differ in sizes alone share a contract: a search asks for
    # thousands.
    settings = (
        *(plan.label_smoothing, plan.teacher_width > 0, plan.drops_last_reduction),
        *(pipeline, scattered, plan.unrolled),
        plan.grad_reduce_dtype,
        plan.context_parallelism,
        plan.expert_dispatch,
        (  # of parallel sublayers, and of routed and shared experts
            plan.joins_parallel and plan.fp8 == "none" and joins_outputs(anatomy.model),
            plan.joins_parallel or not anatomy.model.shared_expert_size,
        ),
        (gathered_types(anatomy.model, plan), _type_of_matrix_gradients(plan)),
    )
    contract = _contract(anatomy, plan.layout(anatomy.model), *settings)
    return with_float8(contract.extended(update_lines(anatomy, plan)), anatomy, plan)


@cache
def _contract(
    anatomy: Anatomy,
    layout: Layout,
    label_smoothing: bool,
    distils: bool,
    drops_last: bool,
    pipeline: str,
    scattered: bool,
    unrolled: bool,
    comm_dtype: Dtype,
    across: ContextParallelism | None,
    expert_dispatch: ExpertDispatch,
    joins: tuple[bool, bool],
    types: tuple[tuple[Dtype, Dtype], Dtype],
) -> Contract:
    """Builds a contract; `pipeline`: chunks are "recomputed" or "kept", or ""; `joins`: XLA adds outputs first."""
    # Embedding and losses are in branches that a stage takes once a microbatch; chunks of layers run in every tick.
    ends = ResidualStream(
        split=layout.sequence or layout.width,
        width_sums=(1 if anatomy.model.norm == "rmsnorm" else 2) if layout.width else 0,
        label_smoothing=label_smoothing,
        distils=distils,
        shares_heads=not layout.rules.axes("kv_heads"),
        shares_groups=not layout.rules.axes("groups"),
        forward_turns="2*microbatches" if pipeline == "recomputed" else "microbatches",
        embedding_turns="embedding_ticks" if pipeline else "microbatches",
        across=across,
        expert_dispatch=expert_dispatch,
        joins_shared=joins[1],
    )
    outside = ((part, replace(ends, is_frozen=anatomy.is_frozen(part))) for part in anatomy.outside)
    lines = [line for part, stream in outside for line in part.collectives(stream)]
    for stack, part in anatomy.layer_parts():
        turns = section_ticks(anatomy, stack) if pipeline else "microbatches"
        # A recomputed chunk runs forward once more under the names of a forward pass; a loop's recompute has its own.
        ahead = f"2*{turns}" if pipeline == "recomputed" else turns
        inside = replace(ends, turns=turns, forward_turns=ahead, unstacked=unrolled)
        inside = replace(inside, gathers=types[0], matrix_gradients=types[1])
        reads = {"needed_again": part not in stack.unread or not drops_last, **(stack.joined(part) if joins[0] else {})}
        reads |= {"learns_before": anatomy.learns_before(stack, part), "is_frozen": anatomy.is_frozen(part, stack)}
        of_part = part.collectives(replace(inside, side=stack.side, of=stack.stream, **reads))
        lines += [without_idle(line, stack) for line in of_part] if stack.idle else of_part
    lines += prediction_lines(anatomy, ends, drops_last=drops_last)
    sharing = [axis for axis in AXES if axis in layout.rules.token_axes]
    group = [axis for axis in sharing if axis in layout.zero_axes]
    between, ranks = tuple(axis for axis in sharing if axis not in group), JOINED.join(group)
    ticks = {section_ticks(anatomy, stack): stack.side for *_, stack in anatomy.sections} if pipeline else {}
    adapts, is_first_alone = not trains_all(anatomy.model), unrolled and anatomy.predictors is None
    shared = over_ranks_lines(layout.zero, ticks, comm_dtype, ranks, adapts, is_first_alone, num_blocks(anatomy.model))
    lines += across_groups(shared, between, "adapters" if adapts else "parameters", comm_dtype)
    lines += teacher_lines(ranks) if distils and layout.zero == 3 else []
    if anatomy.model.num_experts:
        lines.append(load_line([axis for axis in AXES if axis in (*sharing, *([STAGE] if pipeline else []))]))
        same = JOINED.join(axis for axis in group if axis not in layout.rules.expert)  # over which experts are the same
        turns = "ticks" if pipeline else "microbatches"
        of_experts = over_ranks_lines_of_experts(layout.zero, comm_dtype, same, turns, anatomy.model.expert_bias)
        lines += across_groups(of_experts, between, "expert_parameters", comm_dtype, EXPERT_ZERO_DEGREE)
        lines += expert_lines(anatomy, layout.zero, comm_dtype, same)
    lines += over_stage_lines(anatomy, layout, scattered, comm_dtype) if pipeline else []
    return Contract(_name(anatomy.model, layout, distils), sum_expectations(lines), split=("heads", "mlp", "vocab"))


def _type_of_matrix_gradients(plan: Plan) -> Dtype:
    """Returns the type in which layers compute the gradients of matrices: unrolled ones with ZeRO-3 that in which they
    are sent."""
    is_sent = plan.unrolled and plan.zero == 3 and plan.fp8 == "none" and plan.grad_reduce_dtype == "float32"
    return "float32" if is_sent else "compute"


def _name(model: Model, layout: Layout, distils: bool) -> str:
    name = layout.name if is_decoder(model) else f"{model.family}, {layout.name}"
    return f"{name}{' + LoRA' if model.lora_rank else ''}{' + teacher' if distils else ''}"


LEARNING = "learning_layers"
"""Symbol of the layers of a stack that have a backward pass."""


def without_idle(line: Expectation, stack: StackParts) -> Expectation:
    """Returns a line of a stack some of whose layers have no backward pass."""
    if line.phase not in (LAYER_BACKWARD, LAYER_RECOMPUTE):
        return line
    # A whole word: "decoder_layers" contains "layers".
    layers = re.compile(rf"\b{stack.side}layers\b")
    changed = {
        name: layers.sub(f"{stack.side}{LEARNING}", getattr(line, name)) for name in ("count", "elements", "sent")
    }
    return replace(line, **changed)


def over_stage_lines(
    anatomy: Anatomy, layout: Layout, scattered: bool, comm_dtype: Dtype = "float32"
) -> list[Expectation]:
    """Returns what stages of a pipeline send each other, in every tick forward and backward, and once a step.

    Args:
      anatomy: of the model; with several sections, the streams of all travel together.
      layout: whether the stream is split along the sequence.
      scattered: whether the model ranks can split what they all have for the way.
      comm_dtype: type in which gradients travel.
    """
    lines = []
    # Where nothing below the layers is trained, the output of the first chunk's backward half is not read.
    dropped: dict[str, Any] = {} if anatomy.learns_below else {"pooled": True, "hoisted": True}
    often = f"{2 + 2 * anatomy.sent_with_streams}*ticks"
    for *_, stack in anatomy.sections:
        elements = f"batch*{stack.side}sequence*hidden"
        why = "activations to the next chunk, gradients to the one before"
        each = f"{elements}/model_degree" if layout.sequence or scattered else elements
        lines.append(Expectation(STAGES, "collective-permute", STAGE, often, each, why=why))
        if scattered and not layout.sequence:
            whole = "the stream, which travelled in parts"
            lines.append(Expectation(STAGES, "all-gather", MODEL, often, elements, why=whole, **dropped))
    why = "gradients of what is outside the layers, which every stage holds"
    outside = anatomy.outside_weights
    shared = Expectation(GRADIENTS, "all-reduce", STAGE, "1", "shared_parameters", comm_dtype, pooled=True, why=why)
    return [*lines, shared] if any(is_trainable(anatomy.model, weight.name) for weight in outside) else lines


def section_ticks(anatomy: Anatomy, stack: StackParts) -> str:
    """Returns the word for the ticks in which a stage runs layers of a stack's section: of several sections a tick runs
    one, and idle ticks the first."""
    return "ticks" if len(anatomy.sections) == 1 else f"{stack.side or 'encoder_'}ticks"


def symbols_of(anatomy: Anatomy, plan: Plan) -> Symbols:
    """Returns the values of the formulas' symbols for a plan; in a pipeline, of the stage with the most parameters."""
    model, every = anatomy.model, peak_stage_counts(anatomy, plan)
    held = every.shared
    trained, in_turn = trainable_counts(anatomy, plan), plan.chunks if plan.is_staged else 1
    adapters = trained.shared
    symbols = {
        "microbatches": plan.microbatches,
        "batch": plan.microbatch_size,
        "hidden": model.hidden_size,
        # Forward, backward, and for groups of layers, whose recompute comes before the first backward pass of the
        # group, once more.
        "parameter_gathers": 3 if plan.grouped_layers(model.num_layers) else 2,
        "parameters": held.all,
        "unsplit_parameters": held.replicated,
        "adapters": adapters.all,
        "unsplit_adapters": adapters.replicated,
        "rank": model.lora_rank,
        **_gathered(held, held if trains_all(model) else adapters, in_turn),
        **group_symbols(plan),
    }
    if plan.teacher_width:
        table = teacher_table(model, plan.teacher_width)
        symbols["teacher_table"] = counts([table], plan.layout(model), plan.mesh).outside_matrices
    staged, chunks = plan.is_staged, plan.chunks * len(anatomy.sections)
    if staged:
        symbols |= _tick_symbols(anatomy, plan) | dict(symbols_of_stages(anatomy, plan.shards))
    if plan.context_parallelism:
        # Ranks with the same key head have a copy each, and each sends its own.
        keys = max(num_kv_heads(model), plan.mesh.model) // plan.mesh.model
        symbols |= {"context_degree": plan.mesh.context, "rank_key_width": keys * head_dim(model)}
        symbols["rank_value_width"] = keys * value_head_dim(model)
    if model.num_experts:
        symbols |= expert_symbols(anatomy, plan, every, trained if model.lora_rank else every, in_turn)
    for stack in anatomy.stacks:
        layers = layers_in_chunk(stack, plan)
        unread = unread_gradients(anatomy, stack, plan, chunks)
        learning = layers - (0 if staged else stack.idle)
        symbols |= {
            f"{stack.side}sequence": stack.tokens // plan.mesh.context,
            f"{stack.side}layers": layers,
            f"{stack.side}{LEARNING}": learning,
            f"{stack.side}recomputed_layers": 0 if staged else plan.recomputed_layers(learning),
            f"{stack.side}grouped_layers": 0 if staged else plan.grouped_layers(learning),
            f"{stack.side}unread_gradients": unread,
        }
    for part in (*anatomy.outside, *(part for _, part in anatomy.layer_parts())):
        symbols |= part.symbols(plan)
    for of in (prediction_symbols, update_symbols, float8_symbols):
        symbols |= of(anatomy, plan)
    return symbols


def _tick_symbols(anatomy: Anatomy, plan: Plan) -> dict[str, int]:
    """Returns the symbols of a pipeline's ticks."""
    sections = len(anatomy.sections)
    ticks = num_ticks(plan.mesh.stage, plan.microbatches, plan.chunks * sections)
    working = plan.microbatches * plan.chunks
    symbols = {
        "ticks": ticks,
        # An idle stage runs the first chunk, so the first stage computes its input then too.
        "embedding_ticks": ticks - working * sections + plan.microbatches,
        "parameter_gathers": 3 if plan.recompute == "full" else 2,
    }
    for number, section in enumerate(anatomy.sections if sections > 1 else ()):
        symbols[section_ticks(anatomy, section[-1])] = working if number else ticks - working * (sections - 1)
    return symbols


def _gathered(held: Counts, trained: Counts, in_turn: int) -> dict[str, int]:
    """Returns the elements that ZeRO gathers: of `trained` parameters once a step, or of all in each tick."""
    return {
        "split_matrices": trained.layer_matrices + trained.outside_matrices,
        "split_vectors": trained.layer_vectors + trained.outside_vectors,
        "layer_matrices": held.layer_matrices // in_turn,
        "layer_vectors": held.layer_vectors // in_turn,
        "outside_matrices": held.outside_matrices,
        "outside_vectors": held.outside_vectors,
    }
