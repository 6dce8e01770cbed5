"""FLOPs of a model by formula, as papers count them and as XLA compiles them; and what follows for days and cost.

Symbols: l layers, h hidden size, V padded vocabulary rows, s sequence length, B global batch; closed forms are GPT-2's,
with an MLP of 4h. A product [m,k] x [k,n] costs 2mkn.
"""

import math
from dataclasses import replace
from functools import cache

from mtjax.config.sizes import num_kv_heads
from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.mesh import MeshShape
from mtjax.theory.parts.attention import QUERIES_AT_A_TIME
from mtjax.theory.parts.part import unrepeated
from mtjax.theory.plan import Plan, Recompute
from mtjax.theory.stages import layers_in_chunk
from mtjax.theory.timetable import num_ticks

SECONDS_PER_DAY = 86_400


def products_flops(stack: Stack) -> float:
    """Forward FLOPs of the products with weights of one layer, for a sample."""
    return sum(product.flops for part in stack.parts for product in part.products())


def core_flops(stack: Stack, *, causal: bool = False) -> float:
    """Forward FLOPs of attention's scores and their use of one layer, for a sample: `4sq` a token and attention."""
    return sum(part.scores.flops(causal=causal) for part in stack.parts if part.scores)


def once_more_flops(stack: Stack) -> float:
    """Those of products that their own backward pass computes once more: experts' into their inner width."""
    return sum(product.flops for part in stack.parts for product in part.products() if product.again)


def routing_again(stack: Stack, plan: Plan) -> float:
    """FLOPs of one layer's routers, forward for a sample, that model ways compute alike: of whole sequences all."""
    if plan.sequence_parallel:
        return 0.0
    return (plan.mesh.model - 1) * sum(p.flops for part in stack.parts for p in part.products() if p.is_repeated)


def layer_flops(stack: Stack, *, causal: bool = False) -> float:
    """Forward FLOPs of one layer, for a sample: `s (24h^2 + 4sh)` in GPT-2 (arXiv 2104.04473)."""
    return products_flops(stack) + core_flops(stack, causal=causal)


def logit_flops(anatomy: Anatomy) -> float:
    """Forward FLOPs of the output projection, for a sample: `2hV` for each token that has logits."""
    return max((product.flops for part in anatomy.head for product in part.products()), default=0.0)


def taught_flops(anatomy: Anatomy, plan: Plan) -> float:
    """FLOPs of a teacher's logits, for a sample, which a step makes of its hidden states: where they come chunk by
    chunk, forward and again backward; 0 without a teacher, or of a task."""
    if not plan.teacher_width:
        return 0.0
    once = logit_flops(anatomy) * plan.teacher_width / anatomy.model.hidden_size
    return 2 * once if _is_in_chunks(anatomy, plan) else once


def _is_in_chunks(anatomy: Anatomy, plan: Plan) -> bool:
    return plan.local_tokens(max(stack.tokens for stack in anatomy.stacks)) > (plan.loss_chunk or math.inf)


def outside_flops(anatomy: Anatomy) -> float:
    """Forward FLOPs of everything outside the layers, for a sample."""
    return sum(product.flops for part in anatomy.outside for product in part.products())


def forward_flops(anatomy: Anatomy, *, causal: bool = False) -> float:
    """FLOPs of a sample's forward pass: `s (24lh^2 + 4slh + 2hV)` in GPT-2."""
    layers = sum(stack.layers * layer_flops(stack, causal=causal) for stack in anatomy.stacks)
    return layers + outside_flops(anatomy)


def model_flops(anatomy: Anatomy, *, causal: bool = False) -> float:
    """FLOPs that training a sample asks for, recompute never counted: the numerator of MFU.

    Forward once, backward twice: `72 s l h^2 (1 + s/(6h) + V/(12lh))`. With `causal=False` (the convention of the
    Megatron papers) attention is counted in full; `causal=True` halves the `s/(6h)` term. Where only adapters are
    trained, the other weights have no gradient: of their products the backward pass has one.
    """
    unlearnt = sum(stack.layers * frozen_flops(anatomy, stack) for stack in anatomy.stacks)
    return 3 * forward_flops(anatomy, causal=causal) - unlearnt - frozen_outside_flops(anatomy)


def frozen_flops(anatomy: Anatomy, stack: Stack) -> float:
    """FLOPs of the weights' gradients of one layer, for a sample, that are left out where only adapters are trained."""
    if not anatomy.model.lora_rank:
        return 0.0
    return sum(product.flops for part in stack.parts for product in part.products() if not product.is_adapter)


def repeated_flops(stack: Stack, model_ways: int) -> float:
    """FLOPs of the adapters of one layer, forward for a sample, that several model ways compute alike: those with A of
    column-parallel products, and with B of row-parallel ones."""

    def of_adapters(ways: int) -> float:
        return sum(p.flops for part in stack.parts for p in part.products(ways) if p.is_adapter)

    return model_ways * of_adapters(model_ways) - of_adapters(1)


def frozen_outside_flops(anatomy: Anatomy) -> float:
    """Likewise of the output table; a task's head learns."""
    is_frozen = anatomy.model.lora_rank and anatomy.model.head == "language"
    return outside_flops(anatomy) if is_frozen else 0.0


def hardware_flops(anatomy: Anatomy, recompute: Recompute = "full", *, causal: bool = False) -> float:
    """FLOPs per trained sample as published, recompute included: the numerator of HFU.

    Full: `96 s l h^2 (1 + s/(6h) + V/(16lh))` (arXiv 2104.04473, equation 3); selective: the attention core a fourth
    time (arXiv 2205.05198, section 5); none: `model_flops`.
    """
    again = {"none": lambda *_, **__: 0.0, "selective": core_flops, "full": layer_flops}[recompute]
    layers = sum(stack.layers * again(stack, causal=causal) for stack in anatomy.stacks)
    return model_flops(anatomy, causal=causal) + layers


def compiled_flops(anatomy: Anatomy, plan: Plan, *, causal: bool = False) -> float:
    """FLOPs per trained sample that XLA keeps in the program of a plan.

    Like `hardware_flops`, but with full recompute the last product of a pre-LN layer is not computed again, for nobody
    needs its result: `s (88lh^2 + 16slh + 8hV)` in GPT-2; where several layers share a group it is. Logits are computed
    again, `8hV`, but by a microbatch of one chunk, which keeps them: `6hV`. Key and value heads that are fewer than the
    model ways are computed on every rank. With flash attention the backward kernel computes the scores once more.
    Context parallel ranks do so too, and compute c+1 of 2c blocks of the scores
    (`mtjax.sharding.context.ring_attention`).
    Experts' backward pass computes the first of their products once more, and full recompute leaves both out.

    On stages, of what all of them do in all ticks, idle or not, as if each had the embedding and the losses, which are
    counted once a microbatch.
    """
    if plan.is_staged:
        return _staged_flops(computed_over(anatomy, plan.mesh), plan, causal=causal)
    anatomy = computed_over(anatomy, plan.mesh)
    flops = model_flops(anatomy, causal=causal) + taught_flops(anatomy, plan)
    if _is_in_chunks(anatomy, plan):
        flops += logit_flops(anatomy)
    for stack in anatomy.stacks:
        again, grouped = plan.recomputed_layers(stack.layers), plan.grouped_layers(stack.layers)
        whole, core = core_flops(stack, causal=causal), _computed_core_flops(stack, plan, causal=causal)
        flops -= (3 * stack.layers + again) * (whole - core)
        flops -= (again - grouped) * _scores_asked_for_twice(stack, plan, causal=causal)
        if (
            plan.flash_attention or plan.context_parallelism or plan.recompute == "selective"
        ):  # the scores alone: the output is kept
            flops += stack.layers * core / 2
        needed = again if stack.is_post_norm else grouped
        flops += (3 * stack.layers + again) * repeated_flops(stack, plan.mesh.model)
        flops += (3 * stack.layers + again) * routing_again(stack, plan)
        left_out = sum(product.flops for product in unrepeated(stack.parts[-1].products()))
        flops += again * layer_flops(stack, causal=causal) - (again - needed) * left_out
        flops += stack.layers * once_more_flops(stack)
    return flops


def _staged_flops(anatomy: Anatomy, plan: Plan, *, causal: bool) -> float:
    """Every tick runs a chunk of one section forward, and backward - full recompute: forward once more -, idle ticks
    one of the first section; the losses are computed once a microbatch."""
    is_full, m = plan.recompute == "full", plan.microbatches
    total = m * (
        3 * outside_flops(anatomy)
        - frozen_outside_flops(anatomy)
        + taught_flops(anatomy, plan)
        + (logit_flops(anatomy) if _is_in_chunks(anatomy, plan) else 0)
    )
    idle = num_ticks(plan.stages, m, plan.chunks * len(anatomy.sections)) - m * plan.chunks * len(anatomy.sections)
    for number, section in enumerate(anatomy.sections):
        ticks = m * plan.chunks + (0 if number else idle)
        for stack in section:
            whole, core = core_flops(stack, causal=causal), _computed_core_flops(stack, plan, causal=causal)
            again = 0.5 if plan.flash_attention or plan.context_parallelism or plan.recompute == "selective" else 0.0
            once = layer_flops(stack, causal=causal) - whole + core + repeated_flops(stack, plan.mesh.model)
            once += routing_again(stack, plan)
            each = (4 if is_full else 3) * once - frozen_flops(anatomy, stack) + once_more_flops(stack)
            total += ticks * layers_in_chunk(stack, plan) * (each + again * core)
    return total * plan.stages / m


def _computed_core_flops(stack: Stack, plan: Plan, *, causal: bool) -> float:
    """`core_flops` of the blocks that ranks compute: of causal attention, where c of them share samples, c+1 of 2c."""
    whole, is_causal = core_flops(stack, causal=causal), all(p.scores.is_causal for p in stack.parts if p.scores)
    return whole if causal or not is_causal else whole * (plan.mesh.context + 1) / (2 * plan.mesh.context)


def _scores_asked_for_twice(stack: Stack, plan: Plan, *, causal: bool) -> float:
    """FLOPs of scores, for a sample, that a layer that is computed again and its backward pass both ask for, and that
    XLA computes once: where ranks share samples, those that no loop takes in parts. These are a rank's own, and of two
    ranks the other's too."""
    ways = plan.mesh.context
    if not plan.context_parallelism or plan.flash_attention or stack.tokens > ways * QUERIES_AT_A_TIME:
        return 0.0
    share = _computed_core_flops(stack, plan, causal=causal) if ways == 2 else core_flops(stack, causal=causal) / ways
    return share / 2


def computed_over(anatomy: Anatomy, mesh: MeshShape) -> Anatomy:
    """What ranks compute together, some of it more than once: on each of the model ways key and value heads that are
    fewer than these, on each of those that share a sample what only one of them may need."""
    if num_kv_heads(anatomy.model) < mesh.model:
        anatomy = anatomy_of(replace(anatomy.model, num_kv_heads=mesh.model))
    return _over_context(anatomy, mesh.context) if mesh.has_context_parallel else anatomy


@cache
def _over_context(anatomy: Anatomy, ways: int) -> Anatomy:
    stacks = (replace(s, parts=tuple(part.over_context(ways) for part in s.parts)) for s in anatomy.stacks)
    return replace(anatomy, stacks=tuple(stacks), head=tuple(part.over_context(ways) for part in anatomy.head))


def utilisation(flops: float, seconds: float, gpus: int, peak_flops: float) -> float:
    """Share of the peak: MFU when `flops` are model FLOPs, HFU when they are hardware FLOPs."""
    return flops / (seconds * gpus * peak_flops)


# Time and money


def training_days(
    parameters: float,
    tokens: float,
    gpus: float,
    flops_per_second: float,
    flops_per_parameter_token: float = 6,
) -> float:
    """Days by the rule of thumb: 6 FLOPs per parameter and token, 8 with full recompute; sustained FLOP/s per GPU."""
    return flops_per_parameter_token * parameters * tokens / (gpus * flops_per_second) / SECONDS_PER_DAY


def amdahl_speedup(serial_share: float, processors: float) -> float:
    """Largest speed-up of n processors when a share x of the work stays serial: `1 / (x + (1-x)/n)`."""
    return 1 / (serial_share + (1 - serial_share) / processors)


def cost(gpus: int, days: float, price_per_gpu_hour: float) -> float:
    """Price of holding `gpus` for `days`, in the currency of the hourly price."""
    return gpus * days * 24 * price_per_gpu_hour


def steps_for_tokens(tokens: float, global_batch_size: int, sequence_length: int) -> int:
    """Optimizer steps that read `tokens`, rounded up."""
    return math.ceil(tokens / (global_batch_size * sequence_length))
