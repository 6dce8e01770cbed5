"""Memory per GPU by formula, in bytes: model states, activations by kind, logits; for each pipeline stage.

Sources: arXiv 2205.05198 (activations), 1910.02054 (ZeRO). `mtjax.analysis.parts` has the saved activations and
backward workspace of each component; this module adds them up.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtjax.analysis.anatomy import Anatomy, Predictors, StackParts
from mtjax.analysis.counts import Counts, largest_part, largest_stack, stage_counts, trainable_counts
from mtjax.analysis.counts import counts as counts_of
from mtjax.analysis.float8 import float8_state_bytes, float8_weight_bytes
from mtjax.analysis.model_states import bytes_per_parameter, gradient_bytes, model_states
from mtjax.analysis.optimizer import narrow_bytes, point_bytes, states_on_device, streamed_bytes, weight_copies
from mtjax.analysis.parts.attention import PROBABILITIES, STATISTICS
from mtjax.analysis.parts.prediction import INPUTS_AHEAD
from mtjax.analysis.parts.shared_block import BlockPart
from mtjax.analysis.parts.sublayer import NORM_INPUTS
from mtjax.analysis.pattern_memory import (
    block_copies,
    block_gradients,
    gathered_bytes,
    late_probabilities,
    prefetched_bytes,
    shared_states,
    waiting_bytes,
)
from mtjax.analysis.prediction import recomputed_predictors
from mtjax.analysis.prefetch_memory import COPIED, parts_peak, peak_in_pattern, sends_before_gathers
from mtjax.analysis.schedules import megatron_in_flight, slots
from mtjax.analysis.teacher_cost import forward_bytes, output_bytes, table_bytes, weight_bytes
from mtjax.config.adapters import is_trainable
from mtjax.config.sizes import output_is_tied
from mtjax.layout.plan import Plan
from mtjax.layout.stages import layers_in_chunk

LAYER_INPUTS = "layer inputs"
GRADIENTS_OUTSIDE = "gradients outside the layers, before the reduce-scatter"
TRANSPOSED = "parameters transposed for the all-gather"
COPIES = "parameters gathered, or in the compute dtype"
TAUGHT = "teacher's hidden states"
TABLE = "teacher's output table, gathered"
STAGE_INPUTS = "stage inputs"
STAGE_OUTPUTS = "stage outputs"


def layer_activations(stack: StackParts, plan: Plan) -> dict[str, float]:
    """Returns the activations that one layer saves of one microbatch without recompute, by kind, in bytes.

    Megatron's fused kernels: `sbh (10 + 24/t + 5as/(ht))` in GPT-2; all of it over t with sequence parallelism; flash
    attention has no last term (arXiv 2205.05198, equations 1 to 4). Masks have one byte per element, all else the
    compute dtype's. Gated MLPs save one more array; replicated key and value heads are counted as if sharded.

    JAX: outputs of matmuls, masks, attention's output and float32 probabilities; all else is recomputed
    (`mtjax.models.layer_loop`): `sbh (6 + 16/t + 5as/(ht))` bytes, the stacked residuals of the compiled scan.
    """
    kinds: Counter[str] = Counter()
    for part in stack.parts:
        kinds.update(part.saved_bytes(plan))  # pyright: ignore[reportArgumentType] - a Counter adds any numbers
    # A sublayer's input is the layer's input plus the outputs before: the last output is saved where a norm reads it,
    # and a parallel layer saves its input alone, with one dropout mask.
    arrays = int(stack.norms_outputs) if stack.parallel == "no" else 1 - len(stack.sublayers)
    kinds[NORM_INPUTS] += arrays * _stream_bytes(stack, plan)  # pyright: ignore[reportArgumentType]
    if stack.parallel != "no":
        kinds["dropout masks"] /= len(stack.sublayers)  # pyright: ignore[reportArgumentType]
    return dict(kinds)


@dataclass(frozen=True)
class Memory:
    """Peak bytes on one GPU of a stage."""

    weights: float
    gradients: float
    optimizer: float
    activations: Mapping[str, float]
    """Saved activations of all layers and microbatches in flight, by kind."""
    working: float
    """Workspace of one layer's backward pass: recomputed activations, gradients of scores, the gathered weights of
    ZeRO-3; less the saved activations of later stacks, which are free by then."""
    logits: float
    """Of a loss chunk, with their gradients."""
    ahead: float = 0.0
    """With ZeRO-3, parameters prefetched for the layers' backward pass while the logits are alive."""
    finishing: float = 0.0
    """After the last microbatch, in addition to the gradients: with pipeline parallelism the all-reduced gradients
    outside the layers; with unrolled layers the largest array in which their gradients are stacked. ZeRO-1's reduced
    shards need less than the gathered parameters, which are free by then."""
    later: float = 0.0
    """Gradients computed after the loss: the layers', with a single microbatch."""
    last: float = 0.0
    """Gradients computed after the layers' backward pass: of what is below the layers."""
    reused: float = 0.0
    """Bytes of saved activations that `later` reuses: of unrolled layers that save more than their input."""
    teacher: float = 0.0
    """The teacher's weights (of an unknown teacher only the output table, which the step reads) and its outputs for the
    batch."""
    teaching: float = 0.0
    """Workspace of the teacher's forward pass, before the step."""

    @property
    def total(self) -> float:
        """The peak."""
        # The moments that may be it: the loss, with parameters prefetched and the layers' gradients not there yet; a
        # layer's backward pass, without logits; the reduction after the layers, without activations; and the teacher's
        # forward pass, without gradients.
        working = self.working - min(self.later, self.reused)
        inside = self.kept + max(working, self.logits + self.ahead - self.later) - self.last
        most = self.gradients + max(inside, self.finishing)
        return self.weights + self.optimizer + self.teacher + max(most, self.teaching)

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept(self) -> float:
        """All saved activations."""
        return sum(self.activations.values())


def stage_memory(anatomy: Anatomy, plan: Plan, stage: int = 0) -> Memory:
    """Returns the peak bytes on a GPU of a stage by formula; mtjax's stages run one program, and all need the same."""
    mesh, counts, trainable = plan.mesh, stage_counts(anatomy, plan, stage), trainable_counts(anatomy, plan, stage)
    saved = Counter(_saved_in_slots(anatomy, plan) if plan.is_staged else _saved_in_flight(anatomy, plan, stage))
    for part in anatomy.embed:
        saved.update(part.saved_bytes(plan))  # pyright: ignore[reportArgumentType]
    if unreduced := _unreduced_gradients(anatomy, plan):
        saved[GRADIENTS_OUTSIDE] = unreduced  # pyright: ignore[reportArgumentType]
    if plan.residuals == "jax" and counts.transposed:
        saved[TRANSPOSED] = plan.precision.matrices * counts.transposed  # pyright: ignore[reportArgumentType]
    saved.update(_saved_of_teacher(anatomy, plan))  # pyright: ignore[reportArgumentType]
    hosted, copies = weight_copies(anatomy, plan, stage), _copied_once(counts, trainable, plan)
    if (
        copies := copies
        + hosted
        + block_copies(anatomy, plan)
        + point_bytes(anatomy, plan, stage)
        + float8_weight_bytes(anatomy, plan)
    ):
        saved[COPIES] = copies  # pyright: ignore[reportArgumentType]
    # Experts and all else are sharded over different numbers of ranks.
    states = shared_states(anatomy, plan, counts.shared, trainable.shared)
    if counts.experts:
        experts = Counts(counts.experts, counts.replicated_experts)
        trained = Counts(trainable.experts, trainable.replicated_experts)
        states.append(model_states(plan, experts, trained, plan.expert_zero_degree))
    _, g, _ = bytes_per_parameter(plan.precision, plan.zero, plan.zero_degree)
    gradients = gradient_bytes(plan, plan.zero_degree)
    head = max((part.backward_peak_bytes(plan) for part in anatomy.head), default=0.0)
    if anatomy.predictors is not None:
        head = _saved_ahead(anatomy.predictors, plan) + max(head, _workspace(anatomy, anatomy.predictors, plan))
    outside = g * _accumulated_outside(plan, trainable) + block_gradients(anatomy, plan)
    # Gradients of unrolled layers come one by one and are joined to stacks: the largest is there twice for a moment.
    stacked = gradients * largest_stack(anatomy, plan) if plan.unrolled else 0.0
    scales, found = float8_state_bytes(anatomy, plan)
    # With several microbatches the accumulated gradients are there from the beginning.
    comes_late = plan.residuals == "jax" and plan.microbatches == 1 and not plan.is_staged
    return Memory(
        weights=sum(state.weights for state in states) + scales - narrow_bytes(anatomy, plan, stage) - hosted,
        gradients=sum(state.gradients for state in states) + found + (0 if plan.is_staged else outside),
        optimizer=states_on_device(anatomy, plan, stage, sum(state.optimizer for state in states)),
        activations=dict(saved),
        working=_peak_workspace(anatomy, plan),
        logits=head if plan.is_staged or stage == mesh.stage - 1 else 0,
        ahead=prefetched_bytes(anatomy, plan),
        finishing=max(outside if plan.is_staged else 0.0, stacked, streamed_bytes(anatomy, plan)),
        later=gradients * trainable.in_layers if comes_late else 0.0,
        last=_gradients_below(anatomy, plan) if comes_late or (outside and not plan.is_staged) else 0.0,
        reused=sum(s for stack in anatomy.stacks for n, s in _saved(stack, plan).items() if n != LAYER_INPUTS)
        if plan.unrolled
        else 0.0,
        teacher=(weight_bytes(plan) or table_bytes(anatomy, plan)) + output_bytes(anatomy, plan),
        teaching=forward_bytes(plan),
    )


def _gradients_below(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of gradients that only the layers' backward pass leads to: of an output table's own embeddings,
    and of positions. A tied table has a gradient from the loss, and so have tables that multi-token prediction or a
    second stack reads; that of a shared block grows through the layers' backward pass."""
    if anatomy.predictors is not None or len(anatomy.sections) > 1:
        return 0.0
    tied = anatomy.embed[0].weights if output_is_tied(anatomy.model) else []
    parts = [part for part in anatomy.embed if not isinstance(part, BlockPart)]
    below = [w for part in parts for w in part.weights if w not in tied]
    trainable = [w for w in below if is_trainable(anatomy.model, w.name)]
    held, trained = (counts_of(weights, plan.layout(anatomy.model), plan.mesh) for weights in (below, trainable))
    return model_states(plan, held, trained, plan.zero_degree).gradients


def _saved_ahead(stack: Predictors, plan: Plan) -> float:
    """Returns the bytes that layers of multi-token prediction save of a microbatch, until the losses' backward pass."""
    kinds = layer_activations(stack, plan)
    if recomputed_predictors(stack, plan):
        kinds = {INPUTS_AHEAD: kinds[INPUTS_AHEAD]}
    return stack.layers * sum(kinds.values())


def _saved_of_teacher(anatomy: Anatomy, plan: Plan) -> dict[str, float]:
    """Returns the bytes of a teacher's arrays inside the step: a microbatch's hidden states, and with ZeRO-3 the
    gathered output table, of which a loop over microbatches holds a transposed copy too."""
    hidden = output_bytes(anatomy, plan) / plan.microbatches if plan.microbatches > 1 else 0.0
    copies = 2 if plan.microbatches > 1 else 1
    saved = {TAUGHT: hidden, TABLE: copies * table_bytes(anatomy, plan, gathered=True)}
    return {name: size for name, size in saved.items() if size}


def _copied_once(counts: Counts, trainable: Counts, plan: Plan) -> float:
    """Returns the bytes of copies of parameters that live through the step: those that ZeRO-1 and 2 all-gather, with
    the layers' matrices in the compute dtype, and tables in that of master weights; of unrolled layers all matrices in
    the compute dtype, with ZeRO-3 this rank's shards of them."""
    gathered = trainable if plan.gathers_per_step else Counts()
    matrices = gathered.layer_matrices + gathered.expert_matrices
    tables = gathered.outside_matrices
    others = gathered.layer_vectors + gathered.expert_vectors + gathered.outside_vectors
    if plan.unrolled and plan.zero == 3:
        sharded = counts.layer_matrices + counts.layer_vectors
        scales = counts.layer_matrices / plan.zero_degree if plan.fp8 == "none" else 0.0
        cast = counts.in_layers - sharded + scales
    else:
        cast = counts.in_layers - gathered.layer_vectors if plan.unrolled else matrices
    return plan.element_bytes * cast + plan.precision.weights * others + plan.precision.matrices * tables


def _saved_in_flight(anatomy: Anatomy, plan: Plan, stage: int) -> dict[str, float]:
    """Returns the bytes saved for all microbatches in flight, by kind; without pipeline parallelism for one."""
    copies = megatron_in_flight(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, stage, plan.chunks)
    saved: Counter[str] = Counter()
    for stack in anatomy.stacks:
        for name, size in _saved(stack, plan).items():
            saved[name] += copies * size  # pyright: ignore[reportArgumentType]
    return dict(saved)


def _saved_in_slots(anatomy: Anatomy, plan: Plan) -> dict[str, float]:
    """Returns the bytes saved in the slots of a pipeline stage and for the chunk in its backward half, by kind.

    A slot has a chunk's input: the stage-boundary activations of every section. With full recompute the current chunk
    saves its layers' activations without recompute; otherwise every slot has those of a chunk of each section, and its
    output, and the current chunk has a copy.
    """
    # One more slot receives the activations of halves in the bubble.
    count = 1 + slots(plan.pipeline_schedule, plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.sections))
    boundary = sum(_stream_bytes(stack, plan) for stack, *_ in anatomy.sections) * (1 + anatomy.sent_with_streams)
    saved: Counter[str] = Counter({STAGE_INPUTS: count * boundary})
    chunks = [_saved_in_chunk(section, plan) for section in anatomy.sections]
    # A tick works on one section's chunk: memory is that of the largest.
    largest = max(chunks, key=lambda kinds: sum(kinds.values()))
    saved.update(largest)  # pyright: ignore[reportArgumentType]
    if plan.recompute != "full":
        saved[STAGE_OUTPUTS] = count * boundary * len(chunks)  # pyright: ignore[reportArgumentType]
        for kinds in chunks:
            saved.update({name: count * size for name, size in kinds.items()})  # pyright: ignore[reportArgumentType]
    return dict(saved)


def _saved_in_chunk(section: Sequence[StackParts], plan: Plan) -> dict[str, float]:
    """Returns the bytes that a chunk's backward half reads, by kind; with full recompute, after its recompute."""
    saved: Counter[str] = Counter()
    for stack in section:
        layers, kinds = layers_in_chunk(stack, plan), layer_activations(stack, plan)
        saved.update({name: layers * size for name, size in kinds.items()})  # pyright: ignore[reportArgumentType]
    return {name: size for name, size in saved.items() if plan.recompute != "selective" or name != PROBABILITIES}


def _peak_workspace(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the workspace of a layer's backward pass at the peak, of a decoder's or, after it, an encoder's layer."""
    if sends_before_gathers(anatomy, plan):
        needed, saved = ({one.letter: of(one, plan) for one in anatomy.stacks} for of in (layer_activations, _saved))
        return peak_in_pattern(anatomy, plan, needed, saved)
    if plan.is_staged or not all(stack.has_own_loop for stack in anatomy.stacks):  # layers of a loop are freed together
        needs = (_workspace, waiting_bytes, late_probabilities)
        return max(sum(of(anatomy, stack, plan) for of in needs) for stack in anatomy.stacks)
    free, peak = 0.0, 0.0
    in_order = sorted(anatomy.stacks, key=lambda stack: stack.layer_numbers[0])
    # The decoder's backward pass comes first, and when the encoder is at work the decoder's activations are free.
    for stack in reversed(in_order):
        peak = max(peak, _workspace(anatomy, stack, plan) - free)
        free += sum(_saved(stack, plan).values())
    return peak


def _saved(stack: StackParts, plan: Plan) -> dict[str, float]:
    """Returns the bytes that a stage's layers save of one microbatch, by kind."""
    layers, kinds = stack.learning_layers(plan.mesh.stage), layer_activations(stack, plan)
    if plan.recompute != "full":
        return {n: layers * size for n, size in kinds.items() if plan.recompute == "none" or n != PROBABILITIES}
    recomputed = plan.recomputed_layers(layers)
    inputs = 0 if plan.recompute_offload else _stream_bytes(stack, plan) * recomputed / plan.recompute_group
    others = kinds if recomputed < layers else {}
    return {LAYER_INPUTS: inputs} | {name: (layers - recomputed) * size for name, size in others.items()}


def saved_per_loop(stack: StackParts, plan: Plan) -> dict[str, float]:
    """Returns the bytes that a loop over a stack's layers on a rank saves of a microbatch, by kind; with pipeline
    parallelism a loop over a chunk's."""
    return _saved_in_chunk((stack,), plan) if plan.is_staged else _saved(stack, plan)


def _stream_bytes(stack: StackParts, plan: Plan) -> float:
    """Returns the bytes of a microbatch's residual stream between sublayers."""
    return plan.element_bytes * plan.microbatch_size * _stream_elements(stack, plan)


def _stream_elements(stack: StackParts, plan: Plan) -> float:
    """Returns the elements of a sample's residual stream on a device, between sublayers."""
    return stack.tokens * stack.hidden / plan.mesh.context / (plan.mesh.model if plan.splits_stream else 1)


def _accumulated_outside(plan: Plan, counts: Counts) -> float:
    """Returns the parameters that have two gradients at once in JAX: those outside the layers.

    A microbatch's gradient and the accumulated one; with pipeline parallelism, after the last microbatch, a stage's
    gradient and the one all-reduced over stages.
    """
    accumulates = plan.microbatches > 1 or plan.is_staged
    return counts.all - counts.in_layers if plan.residuals == "jax" and accumulates and plan.zero < 2 else 0


def _unreduced_gradients(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of the head's full gradients where ZeRO reduce-scatters gradients in the backward pass."""
    # XLA: reduce-scatters them together with the embedding's, which come last. Not verified with pipeline parallelism.
    reduces = plan.zero > 0 and plan.reduces_in_backward and plan.zero_degree > 1 and not plan.is_staged
    if not reduces or plan.residuals != "jax":
        return 0.0
    table = anatomy.embed[0].weights if output_is_tied(anatomy.model) else []
    weights = [*table, *(weight for part in anatomy.head for weight in part.weights)]
    trainable = [weight for weight in weights if is_trainable(anatomy.model, weight.name)]
    return plan.precision.gradients * counts_of(trainable, plan.layout(anatomy.model), plan.mesh).all


def _workspace(anatomy: Anatomy, stack: StackParts, plan: Plan) -> float:
    """Returns the bytes that a layer's backward pass needs in addition to its saved activations."""
    kinds = layer_activations(stack, plan)
    gathered = gathered_bytes(anatomy, stack, plan) if plan.zero == 3 and plan.zero_degree > 1 else 0.0
    if plan.residuals == "megatron":
        saved = {} if plan.recompute == "full" else _saved(stack, plan)
        return gathered + sum(size for name, size in kinds.items() if name not in saved) + _group(plan, kinds)
    staged = 0.0
    if plan.is_staged:  # a component's weight gradients, before they are accumulated
        staged = plan.precision.gradients * largest_part(anatomy, stack, plan)
    if plan.is_staged and plan.sequence_parallel:  # attention's gathered input is alive together with the MLP's
        staged += 2 * plan.mesh.model * _stream_bytes(stack, plan)
    return gathered + staged + _jax_workspace(stack, plan, kinds) + _group(plan, kinds)


def _group(plan: Plan, kinds: Mapping[str, float]) -> float:
    """Returns the bytes that the layers of a recompute group save during the group's backward pass."""
    is_grouped = plan.recompute == "full" and plan.recompute_group > 1
    return plan.recompute_group * sum(kinds.values()) if is_grouped else 0


def _jax_workspace(stack: StackParts, plan: Plan, kinds: Mapping[str, float]) -> float:
    """Returns the peak bytes of a layer's backward pass in JAX: in attention's, or in the MLP's, which comes before."""
    c = plan.element_bytes
    # XLA: a loop over layers copies a layer's saved activations out of their stacks, or recomputes them; with full
    # recompute also the outputs of norms. Unrolled layers read them in place, and so does a single layer, as it removes
    # a loop of one iteration.
    in_place = _read_in_place(stack, plan)
    copied = sum(kinds.get(name, 0) for name in COPIED if name not in in_place)
    copied += kinds.get(NORM_INPUTS, 0) if plan.recompute == "full" else 0
    copied += kinds.get(STATISTICS, 0) if plan.packs_documents and STATISTICS not in in_place else 0
    copied = 0 if plan.unrolled else copied
    # 2: the gradient of the residual stream, with and without the dropout mask; 3: the arrays outside the loop, which
    # are the embeddings with their mask, the last layer's output and its gradient.
    stream_element = (2 + 3) * c + (1 if plan.dropout else 0)
    stream = stream_element * plan.microbatch_size * _stream_elements(stack, plan)
    return copied + stream + parts_peak(stack, plan)


def _read_in_place(stack: StackParts, plan: Plan) -> Mapping[str, float]:
    """Returns the saved activations, by kind, of a single layer, which no loop copies: {} where there are several, also
    as chunks of an interleaved pipeline, and without what is recomputed. Layers of multi-token prediction are single
    ones."""
    if isinstance(stack, Predictors):
        return {} if recomputed_predictors(stack, plan) else layer_activations(stack, plan)
    return saved_per_loop(stack, plan) if layers_in_chunk(stack, plan) == plan.chunks == 1 else {}


def peak_stage_memory(anatomy: Anatomy, plan: Plan) -> Memory:
    """Returns the memory of the stage that needs most."""
    stages = range(1 if plan.is_staged else plan.mesh.stage)
    return max((stage_memory(anatomy, plan, i) for i in stages), key=lambda m: m.total)
