"""Memory per GPU by formula: model states, activations by kind, logits; stage by stage.

Bytes. Sources: arXiv 2205.05198 (activations), 1910.02054 (ZeRO). What a part keeps and needs at work is said with the
part, in `mtjax.theory.parts`; here it is added up.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtjax.config.sizes import output_is_tied
from mtjax.theory.adapters import is_trainable
from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.counts import Counts, largest_part, largest_stack, layer_counts, stage_counts, trainable_counts
from mtjax.theory.counts import counts as counts_of
from mtjax.theory.parts.attention import ATTENTION_OUTPUT, PROBABILITIES, QUERY_KEY_VALUE
from mtjax.theory.parts.sublayer import NORM_INPUTS
from mtjax.theory.plan import Plan, Precision
from mtjax.theory.schedules import megatron_in_flight, slots
from mtjax.theory.stages import layers_in_chunk
from mtjax.theory.teacher_cost import forward_bytes, said_bytes, table_bytes, weight_bytes

LAYER_INPUTS = "layer inputs"
GRADIENTS_OUTSIDE = "gradients outside the layers, before they are scattered"
TURNED = "parameters turned round to be gathered"
COPIES = "parameters gathered, or in the compute type"
TAUGHT = "a teacher's hidden states"
TABLE = "a teacher's output table, gathered"
STAGE_INPUTS = "inputs of stages"
STAGE_OUTPUTS = "outputs of stages"


def bytes_per_parameter(precision: Precision, zero: int, data_ways: int) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer: w, g, k.

    ZeRO-1 divides k by the data ways d, ZeRO-2 also g, ZeRO-3 also w (arXiv 1910.02054, section 5); weights that are
    their own masters go with k, and what is gathered of them is not counted here.
    """
    w, g, k = precision.weights, precision.gradients, precision.optimizer
    d, first = data_ways, 1 if precision.are_masters else 3
    return (w / d if zero >= first else w, g / d if zero >= 2 else g, k / d if zero >= 1 else k)


def layer_activations(stack: Stack, plan: Plan) -> dict[str, float]:
    """What one layer keeps of one microbatch for its backward pass, by kind, where nothing is computed again.

    Megatron's fused kernels: `sbh (10 + 24/t + 5as/(ht))` in GPT-2; all of it over t with sequence parallelism; flash
    attention leaves out the last term (arXiv 2205.05198, equations 1 to 4). Masks have one byte, all else the compute
    type's. Gated MLPs keep one array more; key and value heads fewer than the ways are counted as if split.

    JAX: products, masks, attention's output and float32 probabilities, and the rest is computed again
    (`mtjax.models.recompute`): `sbh (6 + 16/t + 5as/(ht))` bytes; the stacks of the compiled scan.
    """
    kinds: Counter[str] = Counter()
    for part in stack.parts:
        kinds.update(part.saved_bytes(plan))  # pyright: ignore[reportArgumentType] - a Counter adds any numbers
    return dict(kinds)


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of a stage, at the fullest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: Mapping[str, float]
    """Of all layers and microbatches in flight, by kind."""
    working: float
    """The layer at work: what it computes again, gradients of its scores, the gathered weights of ZeRO-3; less what
    later stacks kept, which is free by then."""
    logits: float
    """Of the tokens that are alive at a time, with their gradients."""
    ahead: float = 0.0
    """Beside the logits: with ZeRO-3, parameters that mtjax gathers for the layers' backward pass."""
    finishing: float = 0.0
    """Behind the last microbatch, beside the gradients: on stages the sums over stages of what is outside the layers;
    where layers have no loop, the largest of the stacks that their gradients are put into, one after the other. This
    GPU's parts of ZeRO-1's sums are less than the parameters gathered before, which are gone by then."""
    later: float = 0.0
    """Of the gradients, what comes after the loss: layers', where there is one microbatch."""
    comes_as_activations_go: bool = False
    """Whether that takes their place: where layers have no loop."""
    teacher: float = 0.0
    """Beside the student's: a teacher's weights - of one that nobody has asked, the output table alone, which the step
    reads - and what it says of the batch."""
    teaching: float = 0.0
    """What the teacher's forward pass needs, before the step."""

    @property
    def total(self) -> float:
        """All of it; the logits are gone when the layers' backward pass begins, activations when sums are reduced, and
        there are no gradients while a teacher is at work."""
        working = self.working - (self.later if self.comes_as_activations_go else 0.0)
        most = self.gradients + max(self.kept + max(working, self.logits + self.ahead - self.later), self.finishing)
        return self.weights + self.optimizer + self.teacher + max(most, self.teaching)

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept(self) -> float:
        """All activations that wait for the backward pass."""
        return sum(self.activations.values())


def stage_memory(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Memory:
    """Bytes on a GPU of a stage by formula; mtjax's stages run one program, and all need the same."""
    mesh, counts, own = plan.mesh, stage_counts(anatomy, plan, stage), trainable_counts(anatomy, plan, stage)
    kept = Counter(_kept_on_stages(anatomy, plan) if plan.is_staged else _kept_in_flight(anatomy, plan, stage))
    for part in anatomy.embed:
        kept.update(part.saved_bytes(plan))  # pyright: ignore[reportArgumentType]
    if whole_gradients := _whole_outside(anatomy, plan):
        kept[GRADIENTS_OUTSIDE] = whole_gradients  # pyright: ignore[reportArgumentType]
    if plan.residuals == "jax" and counts.transposed:
        kept[TURNED] = plan.precision.weights * counts.transposed  # pyright: ignore[reportArgumentType]
    kept.update(_kept_of_teacher(anatomy, plan))  # pyright: ignore[reportArgumentType]
    if copies := _copied_once(counts, own, plan):
        kept[COPIES] = copies  # pyright: ignore[reportArgumentType]
    states = [_states(plan, counts.shared, own.shared, plan.zero_degree)]
    if counts.experts:
        experts = Counts(counts.experts, counts.replicated_experts)
        states.append(_states(plan, experts, experts, plan.expert_zero_degree))
    _, g, _ = bytes_per_parameter(plan.precision, plan.zero, plan.zero_degree)
    gradients = _gradient_bytes(plan, plan.zero_degree)
    head = max((part.backward_peak_bytes(plan) for part in anatomy.head), default=0.0)
    outside = g * _added_whole(plan, own)
    stacked = gradients * largest_stack(anatomy, plan) if plan.unrolled else 0.0
    comes_late = plan.residuals == "jax" and plan.microbatches == 1 and not plan.is_staged
    return Memory(
        weights=sum(state.weights for state in states),
        gradients=sum(state.gradients for state in states) + (0 if plan.is_staged else outside),
        optimizer=sum(state.optimizer for state in states),
        activations=dict(kept),
        working=_fullest_stack(anatomy, plan),
        logits=head if plan.is_staged or stage == mesh.stage - 1 else 0,
        ahead=_gathered_ahead(anatomy, plan),
        finishing=max(outside if plan.is_staged else 0.0, stacked),
        later=gradients * own.in_layers if comes_late else 0.0,
        comes_as_activations_go=plan.unrolled,
        teacher=(weight_bytes(plan) or table_bytes(anatomy, plan)) + said_bytes(anatomy, plan),
        teaching=forward_bytes(plan),
    )


def _kept_of_teacher(anatomy: Anatomy, plan: Plan) -> dict[str, float]:
    """What a step has of a teacher beside what it was given: its microbatch's part of that, and with ZeRO-3 the whole
    table; where a loop over microbatches reads it, as it was gathered and in the order in which it is read."""
    part = said_bytes(anatomy, plan) / plan.microbatches if plan.microbatches > 1 else 0.0
    copies = 2 if plan.microbatches > 1 else 1
    kept = {TAUGHT: part, TABLE: copies * table_bytes(anatomy, plan, gathered=True)}
    return {name: size for name, size in kept.items() if size}


@dataclass(frozen=True)
class _States:
    """Bytes of what a GPU has of parameters that ZeRO splits over as many ways."""

    weights: float
    gradients: float
    optimizer: float


def _states(plan: Plan, counts: Counts, own: Counts, ways: int) -> _States:
    """Of `counts` parameters, of which `own` are trained."""
    w, _, k = bytes_per_parameter(plan.precision, plan.zero, ways)
    # mtjax splits arrays along a dimension; Megatron's optimizer splits one buffer of all of them.
    whole, left = (held.replicated if plan.residuals == "jax" else 0 for held in (counts, own))
    learnt, full = own.all - left, plan.precision
    frozen = w if plan.zero == 3 else full.weights
    return _States(
        weights=w * learnt + frozen * (counts.all - whole - learnt) + full.weights * whole,
        gradients=_gradient_bytes(plan, ways) * learnt + full.gradients * left,
        optimizer=k * learnt + full.optimizer * left,
    )


def _gradient_bytes(plan: Plan, ways: int) -> float:
    """Of a parameter that ZeRO splits over as many ways, from its microbatch to the optimizer."""
    _, g, _ = bytes_per_parameter(plan.precision, plan.zero, ways)
    return g / ways if plan.zero == 1 and plan.reduces_in_backward else g


def _copied_once(counts: Counts, own: Counts, plan: Plan) -> float:
    """Of parameters, from the first microbatch to the last: those that ZeRO-1 and 2 gather, layers' matrices in the
    compute type; of layers without a loop so all matrices."""
    gathered = own if plan.gathers_per_step else Counts()
    matrices = gathered.layer_matrices + gathered.expert_matrices
    others = gathered.layer_vectors + gathered.outside_matrices + gathered.outside_vectors
    cast = counts.in_layers - gathered.layer_vectors if plan.unrolled else matrices
    return plan.element_bytes * cast + plan.precision.weights * others


def _kept_in_flight(anatomy: Anatomy, plan: Plan, stage: int) -> dict[str, float]:
    """What waits of the microbatches in flight; without stages, of one."""
    copies = megatron_in_flight(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, stage, plan.chunks)
    kept: Counter[str] = Counter()
    for stack in anatomy.stacks:
        for name, size in _kept(stack, plan).items():
            kept[name] += copies * size  # pyright: ignore[reportArgumentType]
    return dict(kept)


def _kept_on_stages(anatomy: Anatomy, plan: Plan) -> dict[str, float]:
    """What waits in the slots of a pipeline's stages, and what a chunk at work keeps.

    A slot has a chunk's input: a stream of every section. With full recompute the chunk at work keeps what a layer
    keeps where nothing is computed again; else every slot has that of a chunk of each section, and its output, and the
    chunk at work has a copy. One more slot takes what halves keep that do not count.
    """
    count = 1 + slots(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.sections))
    wire = sum(_stream_bytes(stack, plan) for stack, *_ in anatomy.sections)
    kept: Counter[str] = Counter({STAGE_INPUTS: count * wire})
    chunks = [_kept_in_chunk(section, plan) for section in anatomy.sections]
    at_work = max(chunks, key=lambda kinds: sum(kinds.values()))
    kept.update(at_work)  # pyright: ignore[reportArgumentType]
    if plan.recompute != "full":
        kept[STAGE_OUTPUTS] = count * wire * len(chunks)  # pyright: ignore[reportArgumentType]
        for kinds in chunks:
            kept.update({name: count * size for name, size in kinds.items()})  # pyright: ignore[reportArgumentType]
    return dict(kept)


def _kept_in_chunk(section: Sequence[Stack], plan: Plan) -> dict[str, float]:
    """What the backward half of a chunk reads: with full recompute, after the chunk has been computed again."""
    kept: Counter[str] = Counter()
    for stack in section:
        layers, kinds = layers_in_chunk(stack, plan), layer_activations(stack, plan)
        kept.update({name: layers * size for name, size in kinds.items()})  # pyright: ignore[reportArgumentType]
    return {name: size for name, size in kept.items() if plan.recompute != "selective" or name != PROBABILITIES}


def _fullest_stack(anatomy: Anatomy, plan: Plan) -> float:
    """What the layer at work needs, at the fullest moment: a decoder's, or an encoder's, which comes when the decoder's
    layers have given free what they kept. Of layers that take turns none has when the others work."""
    if plan.is_staged or anatomy.model.moe_every > 1:
        return max(_working(anatomy, stack, plan) for stack in anatomy.stacks)
    free, most = 0.0, 0.0
    for stack in reversed(anatomy.stacks):
        most = max(most, _working(anatomy, stack, plan) - free)
        free += sum(_kept(stack, plan).values())
    return most


def _kept(stack: Stack, plan: Plan) -> dict[str, float]:
    """What stays of a stage's layers of one microbatch between their passes."""
    layers, kinds = stack.layers // plan.mesh.stage, layer_activations(stack, plan)
    if plan.recompute != "full":
        return {n: layers * size for n, size in kinds.items() if plan.recompute == "none" or n != PROBABILITIES}
    again = plan.recomputed_layers(layers)
    inputs = 0 if plan.recompute_offload else _stream_bytes(stack, plan) * again / plan.recompute_group
    rest = kinds if again < layers else {}
    return {LAYER_INPUTS: inputs} | {name: (layers - again) * size for name, size in rest.items()}


def kept_in_turn(stack: Stack, plan: Plan) -> dict[str, float]:
    """What loops over a rank's layers of a stack keep of a microbatch, by kind; on stages those over a chunk's."""
    return _kept_in_chunk((stack,), plan) if plan.is_staged else _kept(stack, plan)


def _stream_bytes(stack: Stack, plan: Plan) -> float:
    """The residual stream of a microbatch, between sublayers."""
    return plan.element_bytes * plan.microbatch_size * _stream_elements(stack, plan)


def _stream_elements(stack: Stack, plan: Plan) -> float:
    return stack.tokens * stack.hidden / plan.mesh.context / (plan.mesh.model if plan.sequence_parallel else 1)


def _added_whole(plan: Plan, counts: Counts) -> float:
    """Parameters of which two gradients live at once: those outside the layers; not Megatron's.

    A microbatch's beside the sum; on stages, behind the last microbatch, the sum over stages beside a stage's own.
    """
    several = plan.microbatches > 1 or plan.is_staged
    return counts.all - counts.in_layers if plan.residuals == "jax" and several and plan.zero < 2 else 0


def _whole_outside(anatomy: Anatomy, plan: Plan) -> float:
    """Where ZeRO sums gradients as they come and keeps this GPU's part: those of the head, before that whole.

    XLA scatters them with the embedding's, which come last. Stages have not been looked at.
    """
    in_parts = plan.zero > 0 and plan.reduces_in_backward and plan.zero_degree > 1 and not plan.is_staged
    if not in_parts or plan.residuals != "jax":
        return 0.0
    table = anatomy.embed[0].weights if output_is_tied(anatomy.model) else []
    read = [*table, *(weight for part in anatomy.head for weight in part.weights)]
    learnt = [weight for weight in read if is_trainable(anatomy.model, weight.name)]
    return plan.precision.gradients * counts_of(learnt, plan.layout(anatomy.model), plan.mesh).all


def _working(anatomy: Anatomy, stack: Stack, plan: Plan) -> float:
    """Bytes that the layer at work needs beside what it kept."""
    kinds = layer_activations(stack, plan)
    gathered = _gathered(anatomy, stack, plan) if plan.zero == 3 else 0.0
    if plan.residuals == "megatron":
        held = {} if plan.recompute == "full" else _kept(stack, plan)
        return gathered + sum(size for name, size in kinds.items() if name not in held) + _group(plan, kinds)
    layout = plan.layout(anatomy.model)
    own = 0.0
    if plan.is_staged:  # gradients of a part's weights wait to be added to the sums
        own = plan.precision.gradients * largest_part(anatomy, stack, layout, plan.mesh)
    if plan.is_staged and plan.sequence_parallel:  # several gathers run at a time: attention's wait beside the MLP's
        own += 2 * plan.mesh.model * _stream_bytes(stack, plan)
    return gathered + own + _jax_working(stack, plan, kinds) + _group(plan, kinds)


def _gathered(anatomy: Anatomy, stack: Stack, plan: Plan) -> float:
    """With ZeRO-3, two layers' parameters: of that at work, and of the next; and the gradients of the one before, which
    mtjax sends while others compute."""
    waiting = plan.precision.gradients if plan.prefetches(anatomy.model) else 0
    return (2 * plan.element_bytes + waiting) * _in_layer(anatomy, stack, plan)


def _gathered_ahead(anatomy: Anatomy, plan: Plan) -> float:
    """With ZeRO-3, the parameters of the last two layers, while the loss is computed."""
    waits = plan.zero == 3 and plan.prefetches(anatomy.model)
    return 2 * plan.element_bytes * _in_layer(anatomy, anatomy.stacks[-1], plan) if waits else 0.0


def _in_layer(anatomy: Anatomy, stack: Stack, plan: Plan) -> float:
    """Parameters of a layer."""
    return layer_counts(stack, plan.layout(anatomy.model), plan.mesh).all


def _group(plan: Plan, kinds: Mapping[str, float]) -> float:
    """What the layers of a group keep for each other while their backward pass is at work."""
    is_grouped = plan.recompute == "full" and plan.recompute_group > 1
    return plan.recompute_group * sum(kinds.values()) if is_grouped else 0


def _jax_working(stack: Stack, plan: Plan, kinds: Mapping[str, float]) -> float:
    """The fullest moment of a layer's backward pass: in attention, or in the MLP before it.

    Whether a layer's arrays were kept or are computed again, each is written out beside the stacks of the loop, and
    where there is no loop and so no stack, they are what was kept: query, key, value and attention's output, the
    probabilities with their mask, the inputs of norms and, with full recompute, their results, and the stream's
    gradient with and without the mask of dropout. While the MLP is at work, the probabilities after dropout are there
    in the compute type; while attention is, what the MLP waits with. Outside the loop wait the embeddings with their
    mask, the last layer's output and its gradient.
    """
    c = plan.element_bytes
    pairs = (
        0
        if plan.flash_attention or plan.context_parallelism
        else sum(part.scores.pairs for part in stack.parts if part.scores)
    )
    scores = pairs * plan.microbatch_size / plan.mesh.model
    again = sum(kinds.get(name, 0) for name in (QUERY_KEY_VALUE, ATTENTION_OUTPUT, PROBABILITIES))
    again += (2 if plan.recompute == "full" else 1) * kinds.get(NORM_INPUTS, 0)
    again = 0 if plan.unrolled else again
    near = (2 + 3) * c + (1 if plan.dropout else 0)
    stream = near * plan.microbatch_size * _stream_elements(stack, plan)
    moments, waits = [], 0.0
    for part in reversed(stack.parts):
        moments.append(part.backward_peak_bytes(plan) + (waits if part.scores else c * scores))
        waits = max(waits, part.pending_bytes(plan))
    return again + stream + max(moments)


def peak_stage_memory(anatomy: Anatomy, plan: Plan) -> Memory:
    """The memory of the stage that needs most."""
    stages = range(1 if plan.is_staged else plan.mesh.stage)
    return max((stage_memory(anatomy, plan, i) for i in stages), key=lambda m: m.total)
