"""How long a step takes: a walk over a layer's kernels, collectives on the links they cross, and the bubble.

On stages it is the number of ticks of the timetable times what a tick takes; of Megatron's runs, the published bubble.

Each kernel takes the longer of its FLOPs at the sustained rate and its bytes at the memory's; each collective follows
the alpha-beta model of a ring. `Constants` come from public measurements of the parts, and one of them, `training`,
from ten published training runs on A100; they are the same for every GPU, model and mesh, and none is set to meet the
published points that the planner predicts.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache

from mtjax.theory.anatomy import Anatomy, Stack
from mtjax.theory.contract import EMBEDDING_BACKWARD, EMBEDDING_FORWARD, GRADIENTS, LOSS_BACKWARD, LOSS_FORWARD
from mtjax.theory.counts import fullest_counts
from mtjax.theory.hardware import Server
from mtjax.theory.kernels import CORE, ElementWise, Traffic
from mtjax.theory.mesh import AXES, MeshShape
from mtjax.theory.nccl import collective_seconds
from mtjax.theory.parts.part import Product, Scores, Touched
from mtjax.theory.plans import Plan
from mtjax.theory.rules import DATA, MODEL, STAGE
from mtjax.theory.schedules import full_ticks, megatron_bubble
from mtjax.theory.software import MTJAX, Software
from mtjax.theory.stages import layers_in_chunk
from mtjax.theory.timetable import num_ticks
from mtjax.theory.traffic import Transfer, transfers


@dataclass(frozen=True)
class Constants:
    """What parts of a machine sustain of their nominal speed."""

    memory: float = 0.9
    """Of memory bandwidth: STREAM-like kernels reach 90-93% on V100, A100 and H100."""
    flash_attention: float = 0.5
    """Of the peak, on the causal half: FlashAttention-2/3 and cuDNN report 35-75% (arXiv 2307.08691, 2407.08608)."""
    link: float = 0.8
    """Of NVLink: nccl-tests reports 230-240 of 300 GB/s on A100 and 360-370 of 450 GB/s on H100 servers."""
    network: float = 0.9
    """Of InfiniBand, large messages."""
    launch: float = 5e-6
    """The fewest seconds that a kernel takes."""
    small_product: float = 13e-6
    """Seconds that a product of less than a wave of tiles takes beyond its FLOPs and bytes: start, end, and parts that
    are added up. The median over the 78 products below 0.2 ms that DeepBench measured on a V100 in 16 bits
    (github.com/baidu-research/DeepBench, results/train/DeepBench_NV_V100.xlsx); of larger ones it shows none."""
    contention: float = 0.189
    """How much longer computing takes while a collective runs beside it: the mean of arXiv 2507.03114 over A100, H100,
    MI210 and MI250, GPT and Llama."""
    training: float = 0.795
    """Of the speed of kernels alone, in a training run: clocks, launches, shapes that are not ideal."""
    tile: int = 128
    """Rows and columns of a product that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on the busiest GPU, by cause; communication counts only where nothing hides it."""

    products: float
    attention: float
    element_wise: float
    logits: float
    model_axis: float
    stage_axis: float
    bubble: float
    data_axis: float
    optimizer: float
    contention: float = 0.0
    """What computing takes longer because collectives run beside it."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication that computation hides, by mesh axis."""

    @property
    def compute(self) -> float:
        """All but communication, bubble and optimizer."""
        return self.products + self.attention + self.element_wise + self.logits

    @property
    def total(self) -> float:
        """The step."""
        sent = self.model_axis + self.stage_axis + self.data_axis + self.contention
        return self.compute + sent + self.bubble + self.optimizer


class Machine:
    """Times of kernels and collectives on a kind of server."""

    def __init__(self, server: Server, element_bytes: int = 2, constants: Constants | None = None) -> None:
        self.server, self.gpu, self.constants = server, server.gpu, constants or Constants()
        self.element_bytes = element_bytes
        half = "bfloat16" if "bfloat16" in self.gpu.peak else "float16"
        self.peak = self.gpu.peak_flops("float32" if element_bytes == 4 else half)

    def product(self, m: float, k: float, n: float, batch: float = 1) -> float:
        """Seconds of `batch` products [m,k] x [k,n].

        The last wave of tiles leaves multiprocessors idle; products too small for one wave are split along k, and take
        a little longer.
        """
        c = self.constants
        tiles = math.ceil(m / c.tile) * math.ceil(n / c.tile) * batch
        waves = tiles / self.gpu.multiprocessors
        fill = waves / math.ceil(waves) if waves >= 1 else 1.0
        computing = 2 * m * k * n * batch / (self.peak * self.gpu.sustained_products * fill)
        moving = self.element_bytes * batch * (m * k + k * n + m * n)
        start = c.small_product if waves < 1 else 0.0
        return start + max(computing / c.training, self.passes(moving), c.launch)

    def contention(self, hidden: float) -> float:
        """Seconds that computing loses to collectives which run beside it for `hidden` seconds."""
        return hidden * (1 - 1 / (1 + self.constants.contention))

    def passes(self, size: float) -> float:
        """Seconds to move `size` bytes through memory."""
        return size / (self.gpu.bandwidth * self.constants.memory * self.constants.training)

    def flash(self, flops: float) -> float:
        """Seconds of a flash-attention kernel that computes `flops`."""
        sustained = self.peak * self.constants.flash_attention * self.constants.training
        return max(flops / sustained, self.constants.launch)

    def transfer(self, entry: Transfer, inside: int) -> float:
        """Seconds of all of a step's `entry`; `inside` of its ways share a server.

        Between servers the rings of one group have the adapters of all its members in a server together.
        """
        server, c = self.server, self.constants
        crosses = entry.ways > inside
        bandwidth = server.link * c.link
        if crosses:
            bandwidth = min(bandwidth, inside * server.network * c.network)
        latencies = server.link_latency, server.network_latency
        each = collective_seconds(entry.operation, entry.size, entry.ways, inside, bandwidth, *latencies)
        return entry.count * each


_machine = cache(Machine)


def members_inside(plan: Plan, axis: str, server: Server) -> int:
    """How many ranks of one group of a mesh axis sit in the same server: inner axes vary fastest."""
    stride = plan.mesh.ways(AXES[AXES.index(axis) + 1 :])
    return max(1, min(plan.mesh.ways((axis,)), server.gpus // stride))


def step_time(
    anatomy: Anatomy, plan: Plan, server: Server, software: Software = MTJAX, constants: Constants | None = None
) -> StepTime:
    """Seconds of one optimizer step, by cause."""
    machine = _machine(server, plan.element_bytes, constants)
    if plan.is_staged:
        return _lock_step_time(anatomy, plan, machine, software)
    plan = replace(plan, drops_last_reduction=software.drops_last_reduction)
    m = plan.microbatches
    products, attention, element_wise = (m * x for x in _layers(anatomy, plan, machine, software))
    head = m * _head(anatomy, _alike(plan), machine, software)
    spent: dict[str, float] = dict.fromkeys((DATA, STAGE, MODEL), 0.0)
    for entry in transfers(anatomy, plan):
        spent[entry.axis] += machine.transfer(entry, members_inside(plan, entry.axis, server))
    exposed = _exposed(spent, plan, software, products, products + attention + element_wise)
    hidden = {axis: spent[axis] - exposed[axis] for axis in spent}
    slowed = machine.contention(sum(hidden.values()))
    per_step = products + attention + element_wise + head + exposed[MODEL] + exposed[STAGE] + slowed
    return StepTime(
        products=products,
        attention=attention,
        element_wise=element_wise,
        logits=head,
        model_axis=exposed[MODEL],
        stage_axis=exposed[STAGE],
        bubble=per_step * megatron_bubble(plan.schedule, plan.mesh.stage, m, plan.chunks),
        data_axis=exposed[DATA],
        optimizer=_optimizer(anatomy, plan, machine, software),
        contention=slowed,
        hidden=hidden,
    )


def _lock_step_time(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> StepTime:
    """Seconds of a step on stages that go through a timetable tick by tick, idle or not.

    A tick lasts as long as the chunk of the stage with most work, and the bubble is what all ticks take beyond the
    work that counts. The losses stand in the ticks in which the last stage works on its last chunk. With full recompute
    it leaves out that chunk's forward half, in the same tick but in GPipe: the losses add what they take beyond it.
    """
    stacks, m = len(anatomy.stacks), plan.microbatches
    ticks = num_ticks(plan.mesh.stage, m, plan.chunks * stacks)
    alike, layers = _alike(plan), [layers_in_chunk(stack.layers, plan) for stack in anatomy.stacks]
    each = [_layer(stack, alike, machine, software) for stack in anatomy.stacks]
    chunks = [[n * seconds for seconds in layer] for n, layer in zip(layers, each, strict=True)]
    products, attention, element_wise = (m * plan.chunks * sum(chunk[i] for chunk in chunks) for i in range(3))
    work = products + attention + element_wise
    longest = max(sum(chunk) for chunk in chunks)
    ahead = layers[-1] * _layer_forward(anatomy.stacks[-1], alike, machine, software)
    skipped = ahead if plan.recompute == "full" and plan.schedule != "gpipe" else 0.0
    spent = _spent(anatomy, plan, machine)
    on_layers, counts = spent[MODEL] / stacks, m * plan.chunks * stacks / ticks
    sent = _exposed_sends(anatomy, plan, spent[STAGE] / ticks, ahead, longest - ahead)
    return StepTime(
        products=products,
        attention=attention,
        element_wise=element_wise,
        logits=m * max(0.0, _head(anatomy, alike, machine, software) - skipped),
        model_axis=on_layers * counts + m / ticks * spent[LOSS_FORWARD],
        stage_axis=sent + spent[GRADIENTS],
        bubble=ticks * longest - work + on_layers * (1 - counts),
        data_axis=spent[DATA],
        optimizer=_optimizer(anatomy, plan, machine, software),
        contention=machine.contention(spent[STAGE] - sent),
        hidden={STAGE: spent[STAGE] - sent, DATA: 0.0, MODEL: 0.0},
    )


def _spent(anatomy: Anatomy, plan: Plan, machine: Machine) -> dict[str, float]:
    """Seconds of a step's collectives on stages: of layers by axis; of the losses, and of gradients over the stages.

    Those of the embedding, which only the first stage has, pass behind the losses of the last.
    """
    spent: dict[str, float] = dict.fromkeys((DATA, STAGE, MODEL, LOSS_FORWARD, GRADIENTS), 0.0)
    inside = {axis: members_inside(plan, axis, machine.server) for axis in (DATA, STAGE, MODEL)}
    for entry in transfers(anatomy, plan):
        kind = entry.axis
        if kind == MODEL and entry.phase in (LOSS_FORWARD, LOSS_BACKWARD):
            kind = LOSS_FORWARD
        elif kind == STAGE and entry.phase == GRADIENTS:
            kind = GRADIENTS
        if entry.phase not in (EMBEDDING_FORWARD, EMBEDDING_BACKWARD):
            spent[kind] += machine.transfer(entry, inside[entry.axis])
    return spent


def _exposed_sends(anatomy: Anatomy, plan: Plan, both: float, ahead: float, back: float) -> float:
    """Seconds of what stages send each other that no half tick hides.

    Gradients travel behind the forward half of a tick, activations behind the backward half; where a tick has one half
    only, nothing hides what it sends.

    Args:
      anatomy: of the model.
      plan: on stages.
      both: seconds of a tick's two permutes.
      ahead: seconds of a forward half.
      back: seconds of a backward half.
    """
    counts = (plan.mesh.stage, plan.microbatches, plan.chunks * len(anatomy.stacks))
    ticks, full, one = num_ticks(*counts), full_ticks(plan.schedule, *counts), both / 2
    return (ticks - full) * both + full * (max(0.0, one - ahead) + max(0.0, one - back))


def _exposed(
    spent: dict[str, float], plan: Plan, software: Software, products: float, compute: float
) -> dict[str, float]:
    """The part of each axis' communication that nothing hides."""
    exposed = dict(spent)
    if software.overlaps_model_axis and plan.sequence_parallel:
        first = spent[MODEL] / plan.mesh.model
        exposed[MODEL] = first + max(0.0, spent[MODEL] - first - products)
    if software.overlaps_data_axis:
        # Gradients of a layer can't leave before its last backward pass, nor parameters arrive after its first use.
        # Parameters in parts are gathered in each microbatch.
        exposed[DATA] = max(0.0, spent[DATA] - (compute if plan.zero == 3 else compute / plan.microbatches))
    if plan.schedule == "interleaved":
        exposed[STAGE] = 0.0
    return exposed


def _layers(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> tuple[float, float, float]:
    """Seconds of a stage's layers and one microbatch, all passes: products, attention, element-wise."""
    alike = _alike(plan)
    each = [(stack.layers // plan.mesh.stage, _layer(stack, alike, machine, software)) for stack in anatomy.stacks]
    products, attention, element_wise = (sum(n * times[i] for n, times in each) for i in range(3))
    return products, attention, element_wise


def _alike(plan: Plan) -> Plan:
    """The plan as far as computing a microbatch depends on it: plans that differ in the rest share its time."""
    mesh = MeshShape(stage=min(plan.mesh.stage, 2), model=plan.mesh.model)
    return replace(plan, mesh=mesh, global_batch_size=1, zero=0, schedule="1f1b", chunks=1, layers_per_stage=None)


@cache
def _layer(stack: Stack, plan: Plan, machine: Machine, software: Software) -> tuple[float, float, float]:
    """Seconds of one layer and microbatch, forward, recomputed and backward: products, attention, element-wise."""
    products = _layer_products(stack, plan)
    forward = [_forward(product, plan, machine) for product in products]
    backward = sum(_backward(product, plan, machine) for product in products)
    again = 0.0
    if plan.recompute == "full":
        # What comes out of a layer is not needed again, but by a post-norm, or where the next one of a chunk reads it.
        drops_last = software.drops_last_reduction and not stack.is_post_norm and not plan.is_staged
        again = sum(forward) - (forward[-1] if drops_last else 0)
    cores = _layer_cores(stack, plan, machine, software)
    times = 1 if plan.recompute == "none" else 2
    core = sum(times * core_forward + core_backward for core_forward, core_backward in cores)
    moves, touched = software.kernels, [part.touched for part in stack.parts]
    once, back = (machine.passes(_bytes(traffic, touched, plan)) for traffic in (moves.forward, moves.backward))
    return sum(forward) + again + backward, core, once * (2 if plan.recompute == "full" else 1) + back


@cache
def _layer_forward(stack: Stack, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds of one layer and microbatch, forward."""
    products = sum(_forward(product, plan, machine) for product in _layer_products(stack, plan))
    cores = sum(forward for forward, _ in _layer_cores(stack, plan, machine, software))
    moved = _bytes(software.kernels.forward, [part.touched for part in stack.parts], plan)
    return products + cores + machine.passes(moved)


def _layer_products(stack: Stack, plan: Plan) -> list[Product]:
    return [product for part in stack.parts for product in part.products(plan.mesh.model)]


def _layer_cores(stack: Stack, plan: Plan, machine: Machine, software: Software) -> list[tuple[float, float]]:
    """Seconds of the core of each attention, forward and backward."""
    return [_core(part.scores, plan, machine, software.kernels) for part in stack.parts if part.scores]


def _forward(product: Product, plan: Plan, machine: Machine) -> float:
    return machine.product(plan.microbatch_size * product.tokens, product.inner, product.outer)


def _backward(product: Product, plan: Plan, machine: Machine) -> float:
    """The gradients of what it reads and of its weights."""
    rows = plan.microbatch_size * product.tokens
    return machine.product(rows, product.outer, product.inner) + machine.product(product.inner, rows, product.outer)


def _bytes(traffic: Traffic, touched: list[Touched], plan: Plan) -> float:
    """Bytes of a pass over a layer: elements outside and inside the split regions, times what the kernels move."""
    c, ways = plan.element_bytes, plan.mesh.model
    outside = sum(t.stream for t in touched) / (ways if plan.sequence_parallel else 1)
    inside, mlp = (sum(getattr(t, name) for t in touched) / ways for name in ("inside", "mlp"))
    moved = outside * traffic.sublayer(c) + inside * traffic.inside(c) + mlp * traffic.mlp(c)
    return plan.microbatch_size * moved


def _core(scores: Scores, plan: Plan, machine: Machine, kernels: ElementWise) -> tuple[float, float]:
    """Seconds of scores, softmax and context of a layer, forward and backward."""
    heads = scores.heads / plan.mesh.model * plan.microbatch_size
    queries, keys, width = scores.queries, scores.keys, scores.width
    if plan.flash_attention:
        causal_half = 2 * queries * keys * width * heads
        return machine.flash(causal_half), machine.flash(2.5 * causal_half)
    pairs = heads * queries * keys
    both = machine.product(queries, width, keys, heads) + machine.product(queries, keys, width, heads)
    core = CORE[kernels.name]
    element = plan.element_bytes
    return (
        both + machine.passes(pairs * core.forward(element, plan.drops_probabilities)),
        2 * both + machine.passes(pairs * core.backward(element, plan.drops_probabilities)),
    )


@cache
def _head(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds of output projection and loss of a microbatch; with stages, on the last one only."""
    sizes = [product for part in anatomy.head for product in part.products(plan.mesh.model)]
    seconds = sum(_forward(product, plan, machine) + _backward(product, plan, machine) for product in sizes)
    logits = max(sizes, key=lambda product: product.flops)
    again = _forward(logits, plan, machine) if software.recomputes_logits else 0
    columns = plan.microbatch_size * logits.tokens * logits.outer
    return seconds + again + machine.passes(columns * software.kernels.logits)


def _optimizer(anatomy: Anatomy, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds to read and write what Adam updates on this GPU, and to read the gradients once more for their norm."""
    precision, shards = plan.precision, plan.mesh.data if plan.zero else 1
    states = 2 * (precision.weights + precision.optimizer) + 2 * precision.gradients
    parameters = fullest_counts(anatomy, plan).all
    return machine.passes(parameters / shards * (states + software.kernels.optimizer_extra))
