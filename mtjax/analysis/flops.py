"""FLOPs of a model by formula, as papers count them and as XLA compiles them; utilization, training days and cost.

Symbols: l layers, h hidden size, V padded vocabulary rows, s sequence length, B global batch size; closed forms are
GPT-2's, with an MLP of 4h. A matmul [m,k] x [k,n] costs 2mkn.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mtjax.analysis.anatomy import Anatomy, Predictors, StackParts, anatomy_of
from mtjax.analysis.frozen import unread_gradients
from mtjax.analysis.optimizer import update_flops
from mtjax.analysis.parts.part import Part, Product, unrepeated
from mtjax.analysis.parts.score_blocks import block_queries, computed_share
from mtjax.analysis.prediction import recomputed_predictors
from mtjax.config.adapters import is_trainable, trains_all
from mtjax.config.sizes import embedding_width, num_kv_heads
from mtjax.config.ssm import has_state_space, ssm_groups
from mtjax.layout.attention_kernel import QUERIES_AT_A_TIME
from mtjax.layout.mesh import MeshShape
from mtjax.layout.plan import Plan, Recompute
from mtjax.layout.stages import layers_in_chunk
from mtjax.layout.timetable import num_ticks

SECONDS_PER_DAY = 86_400


def products_flops(stack: StackParts) -> float:
    """Returns the forward FLOPs of one layer's matmuls with weights, for a sample."""
    return sum(product.flops for part in stack.parts for product in part.products())


def core_flops(stack: StackParts, *, causal: bool = False) -> float:
    """Returns the forward FLOPs of one layer's attention core (scores and values), for a sample: `4sq` per token."""
    return sum(part.scores.flops(causal=causal) for part in stack.parts if part.scores)


def once_more_flops(stack: StackParts, plan: Plan, *, saves_products: bool) -> float:
    """Returns the FLOPs of one layer's matmuls that their backward pass recomputes, for a sample: experts' first, and
    those of scans and the second of adapters, which are not saved with the products with weights.

    Args:
      stack: of the layer.
      plan: of the run.
      saves_products: whether the layer saves its products with weights, instead of its input alone.
    """
    times = [(part, times_again(part, plan, saves_products=saves_products)) for part in stack.parts]
    flops = sum(again(product) * product.flops for part, again in times for product in part.products())
    if not saves_products or plan.unrolled:  # XLA merges both where there is no loop
        return flops
    unsaved = [(part, product) for part in stack.parts for product in part.products() if product.is_unsaved]
    return flops + sum(p.flops for part, p in unsaved if not (p.is_output and part in stack.unread))


def times_again(part: Part, plan: Plan, *, saves_products: bool) -> Callable[[Product], int]:
    """Returns how often the backward pass of a component recomputes each of its matmuls, besides the recompute of an
    entire layer; arguments as of `once_more_flops`."""
    scans = saves_products + part.scans_in_blocks(plan)
    return lambda product: product.again + (scans if product.in_scan and not product.is_unread else 0)


def _gradients_less(stack: StackParts) -> float:
    """Returns the FLOPs of one layer's matmuls, for a sample, that their gradients have fewer than twice as many."""
    return sum((2 - product.gradients) * product.flops for part in stack.parts for product in part.products())


def routing_again(stack: StackParts, plan: Plan) -> float:
    """Returns the forward FLOPs of one layer's routers that are duplicated over tensor parallel ranks, for a sample.

    None with sequence parallelism, where each rank routes its tokens.
    """
    return sum(_again(part.products(), plan) for part in stack.parts)


def _again(products: Sequence[Product], plan: Plan) -> float:
    """Returns the FLOPs of matmuls that are duplicated over tensor parallel ranks."""
    return 0.0 if plan.sequence_parallel else (plan.mesh.model - 1) * sum(p.flops for p in products if p.is_repeated)


def layer_flops(stack: StackParts, *, causal: bool = False) -> float:
    """Returns the forward FLOPs of one layer, for a sample: `s (24h^2 + 4sh)` in GPT-2 (arXiv 2104.04473)."""
    return products_flops(stack) + core_flops(stack, causal=causal)


def logit_flops(anatomy: Anatomy) -> float:
    """Returns the forward FLOPs of the output projection, for a sample: `2hV` per token that has logits, and as much
    for each layer of multi-token prediction."""
    times = 1 + anatomy.model.mtp_num_layers
    return times * max((product.flops for part in anatomy.head for product in part.products()), default=0.0)


def taught_flops(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the FLOPs of a teacher's logits, for a sample, which a step computes from the teacher's hidden states.

    With loss chunks they are recomputed in the backward pass; 0 without a teacher, or of a task.
    """
    if not plan.teacher_width:
        return 0.0
    forward = logit_flops(anatomy) * plan.teacher_width / embedding_width(anatomy.model)
    return 2 * forward if _is_in_chunks(anatomy, plan) else forward


def _is_in_chunks(anatomy: Anatomy, plan: Plan) -> bool:
    """Returns whether a microbatch's loss is computed in several chunks."""
    return plan.local_tokens(max(stack.tokens for stack in anatomy.stacks)) > (plan.loss_chunk or math.inf)


def outside_flops(anatomy: Anatomy) -> float:
    """Returns the forward FLOPs outside the layers, for a sample."""
    return sum(product.flops for part in anatomy.outside for product in part.products())


def forward_flops(anatomy: Anatomy, *, causal: bool = False) -> float:
    """Returns the FLOPs of a sample's forward pass: `s (24lh^2 + 4slh + 2hV)` in GPT-2."""
    layers = sum(stack.layers * layer_flops(stack, causal=causal) for stack in anatomy.all_stacks)
    return layers + outside_flops(anatomy)


def model_flops(anatomy: Anatomy, *, causal: bool = False) -> float:
    """Returns the FLOPs of training on a sample without recompute: the numerator of MFU.

    Forward once, backward twice: `72 s l h^2 (1 + s/(6h) + V/(12lh))`. With `causal=False` (the convention of the
    Megatron papers) attention is counted in full; `causal=True` halves the `s/(6h)` term. Frozen weights have no
    gradient: the backward pass has one matmul for each of theirs, not two.
    """
    frozen = sum(stack.layers * (frozen_flops(anatomy, stack) + _gradients_less(stack)) for stack in anatomy.stacks)
    for stack in anatomy.stacks:  # layers without a backward pass
        left_out = frozen_flops(anatomy, stack) + _gradients_less(stack)
        # These layers have neither of the two backward matmuls for each forward one; `frozen` has some of them already.
        frozen += stack.idle * (2 * layer_flops(stack, causal=causal) - left_out)
    return 3 * forward_flops(anatomy, causal=causal) - frozen - frozen_outside_flops(anatomy)


def frozen_flops(anatomy: Anatomy, stack: StackParts) -> float:
    """Returns the FLOPs of weight gradients of one layer that frozen weights omit, for a sample."""
    if trains_all(anatomy.model):
        return 0.0
    parts = [part for part in stack.parts if anatomy.is_frozen(part, stack)]
    products = [product for part in parts for product in part.products()]
    frozen = [product for product in products if product.is_of_model or not product.is_adapter]
    return sum(product.flops for product in frozen if not product.in_scan)


def frozen_again(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns `frozen_flops` of what is duplicated over tensor parallel ranks, without the first rank's."""
    if not anatomy.model.lora_rank:
        return 0.0
    products = [product for part in stack.parts for product in part.products()]
    return _again([product for product in products if not product.is_adapter], plan)


def repeated_flops(stack: StackParts, tensor_degree: int) -> float:
    """Returns the forward FLOPs of one layer's adapters that are duplicated over tensor parallel ranks, for a sample.

    Those of A in column-parallel adapters, and of B in row-parallel ones.
    """

    def adapter_flops(degree: int) -> float:
        products = [product for part in stack.parts for product in part.products(degree)]
        return sum(p.flops for p in products if p.is_adapter and not p.is_repeated)

    return tensor_degree * adapter_flops(tensor_degree) - adapter_flops(1)


def frozen_outside_flops(anatomy: Anatomy) -> float:
    """Returns the FLOPs outside the layers that frozen weights omit, for a sample: those of weight gradients, and
    before the first layer also of input gradients. A task's head is trained."""
    if is_trainable(anatomy.model, "embedding"):
        return 0.0
    above = [part for part in anatomy.head if not any(is_trainable(anatomy.model, w.name) for w in part.weights)]
    below, head = (sum(p.flops for part in parts for p in part.products()) for parts in (anatomy.embed, above))
    return 2 * below + head


def outside_again(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the FLOPs of a sample's products outside the layers that are duplicated over tensor parallel ranks."""
    of_rank = 3 * _again([p for part in anatomy.outside for p in part.products()], plan)
    if is_trainable(anatomy.model, "embedding"):
        return of_rank
    below = _again([p for part in anatomy.embed for p in part.products()], plan)
    return of_rank - below - of_rank / 3


def hardware_flops(anatomy: Anatomy, recompute: Recompute = "full") -> float:
    """Returns the FLOPs per trained sample as published, recompute included: the numerator of HFU.

    Full: `96 s l h^2 (1 + s/(6h) + V/(16lh))` (arXiv 2104.04473, equation 3); selective: the attention core a fourth
    time (arXiv 2205.05198, section 5); none: `model_flops`.
    """
    recomputed = {"none": lambda _: 0.0, "selective": core_flops, "full": layer_flops}[recompute]
    layers = sum(stack.layers * recomputed(stack) for stack in anatomy.all_stacks)
    return model_flops(anatomy) + layers


def compiled_flops(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the FLOPs per trained sample in the program that XLA compiles for a plan.

    Like `hardware_flops`, but full recompute omits the last matmul of a pre-LN layer, whose result is not needed:
    `s (88lh^2 + 16slh + 8hV)` in GPT-2; in a group of layers it is needed.

    With pipeline parallelism: the FLOPs of all stages in all ticks, bubbles included, as if each stage had the
    embedding and the losses, which are computed once per microbatch.
    """
    # Muon's products; AdamW has none.
    update = update_flops(anatomy, plan) / plan.global_batch_size
    if plan.is_staged:
        return update + _staged_flops(computed_over(anatomy, plan.mesh), plan)
    anatomy = computed_over(anatomy, plan.mesh)
    flops = update + model_flops(anatomy) + taught_flops(anatomy, plan) + outside_again(anatomy, plan)
    # A chunk's logits are recomputed for its backward pass, so that only one chunk's are in memory.
    if _is_in_chunks(anatomy, plan) and not plan.fuses_loss_gradient(anatomy.model):
        flops += logit_flops(anatomy)
    for stack in anatomy.all_stacks:
        recomputed, grouped = plan.recomputed_layers(stack.layers), plan.grouped_layers(stack.layers)
        if isinstance(stack, Predictors):
            recomputed, grouped = recomputed_predictors(stack, plan), 0
        full_core, core = core_flops(stack), _computed_core_flops(stack, plan)
        idle = stack.idle
        recomputed -= idle if recomputed else 0
        learning = stack.layers - idle
        # Forward, two matmuls backward for each forward one, and recompute.
        passes = 3 * stack.layers - 2 * idle + recomputed
        # The core that is computed, in all passes, in place of the full one.
        flops -= passes * (full_core - core)
        flops -= (recomputed - grouped) * _deduplicated_score_flops(stack, plan)
        # Flash attention's backward kernel computes scores again, and so do context parallel ranks; the output is
        # saved.
        flops += learning * core * plan.core_again
        flops += passes * repeated_flops(stack, plan.mesh.model)
        flops += passes * routing_again(stack, plan) - stack.layers * frozen_again(anatomy, stack, plan)
        last = [product for part in stack.unread for product in unrepeated(part.products())]
        omitted = sum(product.flops for product in last) + _again(last, plan)
        flops += recomputed * layer_flops(stack) - (recomputed - grouped) * omitted
        unread = unread_gradients(anatomy, stack, plan, 1) / plan.microbatches
        flops -= unread * _unread_flops(anatomy, stack, plan)
        saving = learning - recomputed
        flops += recomputed * once_more_flops(stack, plan, saves_products=False)
        flops += saving * once_more_flops(stack, plan, saves_products=True)
    return flops


def _staged_flops(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the FLOPs per sample with pipeline parallelism.

    Every tick runs a chunk of one section forward (with full recompute twice) and backward; ticks of the bubble run one
    of the first section. The losses are computed once per microbatch.
    """
    is_full, m = plan.recompute == "full", plan.microbatches
    total = m * (
        3 * outside_flops(anatomy)
        - frozen_outside_flops(anatomy)
        + outside_again(anatomy, plan)
        + taught_flops(anatomy, plan)
        + (logit_flops(anatomy) if _is_in_chunks(anatomy, plan) else 0)
    )
    # Idle halves compute too: their FLOPs are in the program, and so in what is compared with it.
    idle = num_ticks(plan.stages, m, plan.chunks * len(anatomy.sections)) - m * plan.chunks * len(anatomy.sections)
    if (ahead := anatomy.predictors) is not None:  # with the head, once per microbatch, and not recomputed
        full_core, core = core_flops(ahead), _computed_core_flops(ahead, plan)
        layer = 3 * (layer_flops(ahead) - full_core + core + routing_again(ahead, plan))
        total += m * ahead.layers * (layer + once_more_flops(ahead, plan, saves_products=True) + plan.core_again * core)
    for number, section in enumerate(anatomy.sections):
        ticks = m * plan.chunks + (0 if number else idle)
        for stack in section:
            full_core, core = core_flops(stack), _computed_core_flops(stack, plan)
            forward = layer_flops(stack) - full_core + core + repeated_flops(stack, plan.mesh.model)
            forward += routing_again(stack, plan)
            # A chunk that is recomputed saves its products with weights for its backward pass.
            layer = (4 if is_full else 3) * forward + once_more_flops(stack, plan, saves_products=True)
            layer -= frozen_flops(anatomy, stack) + _gradients_less(stack) + frozen_again(anatomy, stack, plan)
            total += ticks * layers_in_chunk(stack, plan) * (layer + plan.core_again * core)
            unread = unread_gradients(anatomy, stack, plan, plan.chunks * len(anatomy.sections))
            total -= unread * _unread_flops(anatomy, stack, plan)
    # `total` is of one stage, in all its ticks; all run the same program.
    return total * plan.stages / m


def _unread_flops(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the FLOPs of a layer's backward pass, for a sample, that nothing reads in the first layer above a frozen
    embedding (LoRA): input gradients, and everything up to the first component with adapters."""
    if anatomy.learns_below or not anatomy.model.lora_rank:
        return 0.0
    flops, degree = 0.0, plan.mesh.model
    for part in stack.parts:
        learns = any(is_trainable(anatomy.model, w.name) for w in (*part.weights, *part.shared_weights))
        if not learns and part.scores:
            flops += (2 + plan.core_again) * _computed_core_flops(stack, plan)
            if plan.recomputed_layers(stack.layers):
                flops -= _deduplicated_score_flops(stack, plan)
        for product in part.products(degree):
            whole = degree * product.flops
            if product.in_scan and not learns:
                flops += whole * product.gradients
            elif not product.in_scan and (product.reads_input or not learns):
                flops += whole
        # Above the first component that learns, everything is needed.
        if learns and stack.parallel == "no":
            break
    return flops


def _computed_core_flops(stack: StackParts, plan: Plan) -> float:
    """Returns `core_flops` of the blocks that are computed, of a causal model: with context parallelism c+1 of 2c,
    otherwise those of `computed_share`."""
    full, is_causal = core_flops(stack), all(p.scores.is_causal for p in stack.parts if p.scores)
    if not is_causal:
        return full
    # A rank has two chunks of a sample's tokens (`mtjax.sharding.context.ring_attention`).
    if plan.context_parallelism:
        return full * (plan.mesh.context + 1) / (2 * plan.mesh.context)
    return sum(computed_share(p.scores, plan) * p.scores.flops() for p in stack.parts if p.scores)


def _deduplicated_score_flops(stack: StackParts, plan: Plan) -> float:
    """Returns the FLOPs of scores, for a sample, that XLA computes once for both the recompute and the backward pass.

    XLA: of attention in blocks, scores that no loop computes block by block (CSE): those of a rank's own keys, and in a
    ring of two also those of the other rank's.
    """
    degree = plan.mesh.context
    if plan.keeps_scores or plan.flash_attention:
        return 0.0
    if not plan.context_parallelism:
        is_one = all(p.scores.queries <= block_queries(p.scores, plan) for p in stack.parts if p.scores)
        return core_flops(stack) / 2 if is_one else 0.0
    if stack.tokens > degree * QUERIES_AT_A_TIME:
        return 0.0
    if degree == 2:
        return _computed_core_flops(stack, plan) / 2
    return core_flops(stack) / degree / 2


def computed_over(anatomy: Anatomy, mesh: MeshShape) -> Anatomy:
    """Returns the model with the work of all ranks together, replicated work counted on each.

    Tensor parallel ranks replicate key and value heads and groups of heads that are fewer than they, context parallel
    ranks the heads of
    one token.
    """
    shared: dict[str, Any] = {"num_kv_heads": mesh.model} if num_kv_heads(anatomy.model) < mesh.model else {}
    if has_state_space(anatomy.model) and ssm_groups(anatomy.model) < mesh.model:
        shared["ssm_groups"] = mesh.model
    if shared:
        anatomy = anatomy_of(replace(anatomy.model, **shared))
    return _over_context(anatomy, mesh.context) if mesh.has_context_parallel else anatomy


@cache
def _over_context(anatomy: Anatomy, degree: int) -> Anatomy:
    stacks = tuple(stack_over_context(stack, degree) for stack in anatomy.stacks)
    return replace(anatomy, stacks=stacks, head=tuple(part.over_context(degree) for part in anatomy.head))


def stack_over_context(stack: StackParts, degree: int) -> StackParts:
    """Returns a stack with the work of all context parallel ranks together."""
    return replace(stack, parts=tuple(part.over_context(degree) for part in stack.parts))


def utilization(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """Returns the share of the peak: MFU when `flops` are model FLOPs, HFU when they are hardware FLOPs."""
    return flops / (seconds * gpus * peak_flops)


# Time and money


def training_days(
    parameters: float,
    tokens: float,
    gpus: float,
    flops_per_second: float,
    flops_per_parameter_token: float = 6,
) -> float:
    """Returns the days by the rule of thumb: 6 FLOPs per parameter and token, 8 with full recompute.

    `flops_per_second` is the sustained rate per GPU.
    """
    return flops_per_parameter_token * parameters * tokens / (gpus * flops_per_second) / SECONDS_PER_DAY


def amdahl_speedup(serial_share: float, processors: float) -> float:
    """Returns the largest speed-up of n processors when a share x of the work is serial: `1 / (x + (1-x)/n)`."""
    return 1 / (serial_share + (1 - serial_share) / processors)


def cost(gpus: int, days: float, price_per_gpu_hour: float) -> float:
    """Returns the price of `gpus` GPUs for `days`, in the currency of the hourly price."""
    return gpus * days * 24 * price_per_gpu_hour


def steps_for_tokens(tokens: float, global_batch_size: int, sequence_length: int) -> int:
    """Returns the optimizer steps that read `tokens`, rounded up."""
    return math.ceil(tokens / (global_batch_size * sequence_length))
