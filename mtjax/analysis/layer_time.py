"""Seconds of the kernels of a layer, and of the head, in one microbatch."""

from dataclasses import replace
from functools import cache

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.copies import FLOAT32
from mtjax.analysis.expert_blocks import blocks_of
from mtjax.analysis.float8 import float8_bytes, is_float8
from mtjax.analysis.flops import stack_over_context, times_again
from mtjax.analysis.kernels import CORE, KEPT_GATE, ElementWise, Traffic
from mtjax.analysis.loop_time import loop_seconds, scan_seconds
from mtjax.analysis.machine import Machine
from mtjax.analysis.parts.part import Elementwise, Part, Product, Scores, unrepeated
from mtjax.analysis.parts.score_blocks import block_queries, computed_share
from mtjax.analysis.software import Software
from mtjax.config import Model
from mtjax.config.adapters import is_trainable
from mtjax.layout.attention_kernel import padded_width, spans_of
from mtjax.layout.plan import Plan


@cache
def layer_seconds(
    stack: StackParts, plan: Plan, machine: Machine, software: Software, frozen: tuple[bool, ...] = ()
) -> tuple[float, float, float]:
    """Seconds of one layer and microbatch, forward, recomputed and backward: products, attention, element-wise.

    Args:
      stack: of the layer.
      plan: of the run.
      machine: on which it runs.
      software: that runs it.
      frozen: of each component, whether it has no trained weights but adapters; none has where it is empty.
    """
    stack = _with_context(stack, plan)
    products = _layer_products(stack, plan)
    forward = {product: _forward(product, plan, machine) for product in products}
    # A stage recomputes a whole chunk, and saves its products for the backward pass that follows at once.
    saves_products = plan.is_staged or plan.recompute != "full"
    times = [(part, times_again(part, plan, saves_products=saves_products)) for part in stack.parts]
    backward = 0.0
    for (part, number), is_frozen in zip(times, frozen or (False,) * len(times), strict=True):
        for product in _products(part, plan):
            learns = not is_frozen or (product.is_adapter and not product.is_of_model)
            backward += number(product) * forward[product] + _backward(product, plan, machine, learns=learns)
    again = 0.0
    if plan.recompute == "full":
        # What comes out of a layer is not needed again, but by a norm, or where the next one of a chunk reads it.
        unread = stack.unread if software.drops_last_reduction and not plan.is_staged else ()
        left_out = [product for part in unread for product in unrepeated(part.products(plan.mesh.model))]
        again = sum(forward[product] for product in products) - sum(forward[product] for product in left_out)
    cores = _layer_cores(stack, plan, machine, software)
    # Selective recompute computes attention's core again, as full recompute does.
    times = 1 if plan.recompute == "none" else 2
    core = sum(times * core_forward + core_backward for core_forward, core_backward in cores)
    moves, touched = software.kernels, [part.elementwise for part in stack.parts]
    once, back = (machine.passes(_bytes(traffic, touched, plan)) for traffic in (moves.forward, moves.backward))
    ahead = sum(forward[product] for product in products)
    # A loop over layers keeps a gated MLP's product (`KEPT_GATE`).
    if plan.residuals == "jax" and plan.recompute != "full" and not plan.unrolled:
        gates = plan.local_tokens(1) * sum(t.gate for t in touched) / plan.mesh.model
        back += machine.passes(KEPT_GATE * plan.element_bytes * gates)
    back += machine.passes(sum(float8_bytes(product, _rows(product, plan)[0], plan) for product in products))
    looped = sum(loop_seconds(stack, plan, machine)) + sum(scan_seconds(stack, plan, machine))
    return ahead + again + backward, core, once * (2 if plan.recompute == "full" else 1) + back + looped


@cache
def layer_forward_seconds(stack: StackParts, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds of one layer and microbatch, forward."""
    stack = _with_context(stack, plan)
    products = sum(_forward(product, plan, machine) for product in _layer_products(stack, plan))
    cores = sum(forward for forward, _ in _layer_cores(stack, plan, machine, software))
    moved = _bytes(software.kernels.forward, [part.elementwise for part in stack.parts], plan)
    looped = loop_seconds(stack, plan, machine)[0] + scan_seconds(stack, plan, machine)[0]
    return products + cores + machine.passes(moved) + looped


def _with_context(stack: StackParts, plan: Plan) -> StackParts:
    """Returns a stack with what context parallel ranks compute besides their share of a layer."""
    return stack_over_context(stack, plan.mesh.context) if plan.context_parallelism else stack


def _layer_products(stack: StackParts, plan: Plan) -> list[Product]:
    return [product for part in stack.parts for product in _products(part, plan)]


def _products(part: Part, plan: Plan) -> list[Product]:
    """Returns the products of a component, without those that are among the kernels of its scan."""
    has_kernels = part.scan_kernels(plan) is not None
    return [product for product in part.products(plan.mesh.model) if not (has_kernels and product.in_scan)]


def _layer_cores(stack: StackParts, plan: Plan, machine: Machine, software: Software) -> list[tuple[float, float]]:
    """Seconds of the core of each attention, forward and backward."""
    return [_core(part.scores, plan, machine, software.kernels) for part in stack.parts if part.scores]


def _forward(product: Product, plan: Plan, machine: Machine) -> float:
    rows, times = _rows(product, plan)
    return times * machine.product(rows, product.inner, product.outer, is_float8=is_float8(product, plan))


def _backward(product: Product, plan: Plan, machine: Machine, *, learns: bool = True) -> float:
    """The gradients of what it reads, and of its weights if these are trained."""
    (rows, times), eight = _rows(product, plan), is_float8(product, plan)
    of_read = machine.product(rows, product.outer, product.inner, is_float8=eight)
    if product.in_scan:
        return product.gradients * of_read
    of_weights = machine.product(product.inner, rows, product.outer, is_float8=eight) if learns else 0.0
    return times * (of_read + of_weights)


def _rows(product: Product, plan: Plan) -> tuple[float, float]:
    """Rows of a product and how often it runs: once, or on the rank that has most for each block of experts' tokens."""
    rows = plan.local_tokens(product.tokens)
    if not product.experts:
        return rows, 1
    # Rows of a block fill tiles better or worse than all rows would: a product is timed as often as it is launched.
    blocks = blocks_of(int(plan.mesh.expert * rows), product.experts, plan.mesh.expert)
    return blocks.rows, plan.expert_imbalance * blocks.number


def _bytes(traffic: Traffic, touched: list[Elementwise], plan: Plan) -> float:
    """Bytes of a pass over a layer: elements outside and inside the split regions, times what the kernels move."""
    c, ways = plan.element_bytes, plan.mesh.model
    outside = sum(t.stream for t in touched) / (ways if plan.splits_stream else 1)
    inside, mlp, gate = (sum(getattr(t, name) for t in touched) / ways for name in ("inside", "mlp", "gate"))
    moved = outside * traffic.sublayer(c) + inside * traffic.inside(c) + mlp * traffic.mlp(c) + gate * traffic.gate(c)
    moved += sum(t.normed for t in touched) / ways * traffic.normed(c)
    return plan.local_tokens(1) * moved


def _core(scores: Scores, plan: Plan, machine: Machine, kernels: ElementWise) -> tuple[float, float]:
    """Seconds of scores, softmax and context of a layer, forward and backward."""
    heads = scores.heads / plan.mesh.model * plan.microbatch_size
    queries, keys, width = scores.queries / plan.mesh.context, scores.keys, scores.width
    if plan.pallas_attention:
        pairs = heads * queries * keys * (scores.visible if scores.is_causal else 1)
        draws, padded = pairs * plan.has_attention_dropout, padded_width(width)
        return machine.own_attention(4 * pairs * padded, draws), sum(
            machine.own_attention(2 * products * pairs * padded, draws)
            for products in (4, 3)  # of keys and values, and of queries
        )
    if plan.flash_attention:
        values = width - scores.narrower
        # Scores and the gradients of queries and keys have the keys' width; the output and the gradients of
        # probabilities and values have that of values. Scores are recomputed in the backward pass.
        flops = 2 * scores.visible * queries * keys * heads
        return machine.flash(flops * (width + values)), machine.flash(flops * (3 * width + 2 * values))
    if plan.attention_in_blocks and not plan.context_parallelism:
        return _in_blocks(scores, plan, machine)
    pairs = heads * queries * keys
    both = machine.product(queries, width, keys, heads) + machine.product(queries, keys, width - scores.narrower, heads)
    core = CORE[kernels.name]
    element, values = plan.element_bytes, width - scores.narrower
    forward = both + machine.passes(pairs * core.forward(element, plan.has_attention_dropout))
    backward = 2 * both + machine.passes(pairs * core.backward(element, plan.has_attention_dropout))
    if plan.has_attention_dropout and plan.residuals == "jax":  # a mask of a byte takes what its instructions take
        forward += max(machine.drawn(pairs) - machine.passes(pairs), 0.0)
    if plan.residuals == "jax" and plan.keeps_scores:
        # XLA: query, key and value are sliced out of their product's transpose, attention's output is transposed, and
        # so are the gradients of these.
        copied = scores.heads * queries * (width + values) + scores.groups * keys * (width + values)
        each = machine.passes(2 * element * copied / plan.mesh.model * plan.microbatch_size)
        forward, backward = forward + each, backward + each
        # XLA: a bias is written for each sample in float32 and read again, not in the recompute, and so are gradients.
        backward += machine.passes(2 * 8 * pairs) if scores.is_biased else 0.0
    return forward, backward


def _in_blocks(scores: Scores, plan: Plan, machine: Machine) -> tuple[float, float]:
    """Seconds of scores, softmax and context in blocks of a few queries, forward and backward, as XLA compiles them for
    H100 (jax 0.10.2): every kernel reads or writes scores, which takes longer than its FLOPs."""
    c, rows = plan.element_bytes, scores.heads / plan.mesh.model * plan.microbatch_size
    queries = min(block_queries(scores, plan), scores.queries)
    blocks, pairs = scores.queries / queries, rows * scores.queries * scores.keys * computed_share(scores, plan)
    width, values = scores.width, scores.width - scores.narrower
    groups = max(scores.groups / plan.mesh.model, 1) * plan.microbatch_size
    both, shared = width + values, groups / rows
    drawn = max(machine.drawn(pairs) - machine.passes(pairs), 0.0) if plan.has_attention_dropout else 0.0
    launches = blocks * machine.constants.launch
    # Bytes per score: products write 4 and read c; the maximum, the sum and the probabilities read 4 each and write c.
    # A block reads keys and values, of groups of heads.
    forward = pairs * (16 + 2 * c + c * both * shared / queries)
    # Two products write 4 each; both gradients are computed of these, 8 + 2c; three products read c each. A block adds
    # to float32 sums of the gradients of keys and values.
    backward = pairs * (16 + 5 * c + (c * (both + width) + 8 * both) * shared / queries)
    # The sums of gradients begin with zeros that are copied, and are cast; spans have their own.
    spans = spans_of(scores.queries, queries) if scores.is_causal else 1
    backward += groups * scores.keys * both * (spans + 1) / 2 * (4 + 8 + 4 + c)
    return (
        machine.passes(forward) + 6 * launches + drawn,
        machine.passes(backward) + 5 * launches + drawn,
    )


@cache
def head_seconds(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds of output projection and loss of a microbatch, with a teacher's logits; with stages, on the last one."""
    # The head is never in 8 bits.
    plan = replace(plan, fp8="none")
    sizes, frozen = [], []
    for part in anatomy.head:
        products = part.over_context(plan.mesh.context).products(plan.mesh.model)
        sizes += products
        frozen += [] if _is_trained(part, anatomy.model) else products
    logits = max(sizes, key=lambda product: product.flops)
    # Logits of multi-token prediction are equal to the head's, and computed as often as there are of them.
    others = [product for product in sizes if product is not logits and product != logits]
    losses = 1 + anatomy.model.mtp_num_layers
    made = [logits, *([replace(logits, inner=plan.teacher_width)] if plan.teacher_width else [])]
    pieces = _loss_chunks(logits, plan) if software.recomputes_logits else 1
    forward = sum(pieces * _forward(_piece(product, pieces), plan, machine) for product in made)
    seconds = forward + (len(sizes) - len(others)) * _logits_backward(
        logits, pieces, plan, machine, learns=logits not in frozen
    )
    seconds += (len(sizes) - len(others) - 1) * pieces * _forward(_piece(logits, pieces), plan, machine)
    seconds += sum(
        _forward(product, plan, machine) + _backward(product, plan, machine, learns=product not in frozen)
        for product in others
    )
    again = losses * forward
    if not software.recomputes_logits or plan.fuses_loss_gradient(anatomy.model):
        again = 0.0
    columns = losses * len(made) * plan.local_tokens(logits.tokens) * logits.outer
    if (ahead := anatomy.predictors) is not None:
        seconds += ahead.layers * sum(layer_seconds(ahead, plan, machine, software))
    return seconds + again + machine.passes(columns * software.kernels.logits)


def _is_trained(part: Part, model: Model) -> bool:
    """Returns whether a weight of a component after the layers is trained; logits may read the embedding's table."""
    return any(is_trainable(model, name) for name in ("embedding", *(weight.name for weight in part.weights)))


def _loss_chunks(logits: Product, plan: Plan) -> float:
    """Returns the number of chunks in which the loss of a microbatch is computed, each with separate products."""
    rows = plan.local_tokens(logits.tokens)
    return rows / min(rows, plan.loss_chunk or rows)


def _piece(product: Product, pieces: float) -> Product:
    return replace(product, tokens=product.tokens / pieces)


def _logits_backward(logits: Product, pieces: float, plan: Plan, machine: Machine, *, learns: bool) -> float:
    """Returns the seconds of the gradients of logits; every chunk but one adds to the table's, a sum in float32."""
    chunk = _piece(logits, pieces)
    both = _backward(chunk, plan, machine, learns=learns)
    if pieces == 1 or not learns:
        return pieces * both
    rows = plan.local_tokens(chunk.tokens)
    of_table = machine.product(chunk.inner, rows, chunk.outer)
    moved = 2 * FLOAT32 * chunk.inner * chunk.outer + plan.element_bytes * rows * (chunk.inner + chunk.outer)
    return pieces * (both - of_table + max(of_table, machine.passes(moved)))
