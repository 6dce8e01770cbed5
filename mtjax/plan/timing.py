"""How long a step takes: a walk over a layer's kernels, collectives on the links they cross, and the bubble.

Each kernel takes the longer of its FLOPs at the sustained rate and its bytes at the memory's; each collective follows
the alpha-beta model of a ring. `Constants` come from public measurements of the parts, and one of them, `training`,
from ten published training runs on A100; they are the same for every GPU, model and mesh, and none is set to meet the
points that `mtjax.plan.published` predicts.
"""

import math
from dataclasses import dataclass, field

from mtjax.plan.formulas import Shape
from mtjax.plan.hardware import Server
from mtjax.plan.kernels import CORE, FUSED, UNFUSED, ElementWise, Traffic
from mtjax.plan.memory import stage_parameters
from mtjax.plan.plans import Plan
from mtjax.plan.schedules import bubble
from mtjax.plan.traffic import Axis, Collective, collectives, ring_factor


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
    """Seconds below which no kernel gets."""
    training: float = 0.79
    """Of the speed of kernels alone, in a training run: clocks, launches, shapes that are not the best ones."""
    tile: int = 128
    """Rows and columns of a product that one multiprocessor computes at a time."""


@dataclass(frozen=True)
class Software:
    """What the program does with the hardware; facts of a code base, not of a run."""

    name: str
    kernels: ElementWise
    overlaps_model_axis: bool = False
    """Collectives inside a layer run beside the products that use them, in t pieces."""
    overlaps_data_axis: bool = False
    """Gradients are reduced during the backward pass, parameters gathered during the forward pass."""
    drops_last_reduction: bool = True
    recomputes_logits: bool = False


MTJAX = Software("mtjax", FUSED, recomputes_logits=True)
"""XLA fuses element-wise work; one reduction of the gradients after the last microbatch."""
MEGATRON_2019 = Software("Megatron-LM of 2019", UNFUSED, drops_last_reduction=False)
"""PyTorch kernels one by one; gradients all-reduced after the backward pass (`USE_TORCH_DDP = False`)."""
MEGATRON_2021 = Software("Megatron-LM of 2021", FUSED, drops_last_reduction=False)
"""Fused bias, GELU, dropout, softmax; scores written out; gradients all-reduced at the end (arXiv 2104.04473)."""
MEGATRON_CORE = Software("Megatron-Core", FUSED, overlaps_model_axis=True, overlaps_data_axis=True)
"""`--tp-comm-overlap --overlap-grad-reduce --overlap-param-gather`, as its published runs used."""


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
    hidden: dict[Axis, float] = field(default_factory=dict)
    """Communication that runs beside computation."""

    @property
    def compute(self) -> float:
        """All but communication, bubble and optimizer."""
        return self.products + self.attention + self.element_wise + self.logits

    @property
    def total(self) -> float:
        """The step."""
        return self.compute + self.model_axis + self.stage_axis + self.bubble + self.data_axis + self.optimizer


class Machine:
    """Times of kernels and collectives on a kind of server."""

    def __init__(self, server: Server, element_bytes: int = 2, constants: Constants | None = None) -> None:
        self.server, self.gpu, self.constants = server, server.gpu, constants or Constants()
        self.element_bytes = element_bytes
        half = "bfloat16" if "bfloat16" in self.gpu.peak else "float16"
        self.peak = self.gpu.peak_flops("float32" if element_bytes == 4 else half)

    def product(self, m: float, k: float, n: float, batch: float = 1) -> float:
        """Seconds of `batch` products [m,k] x [k,n].

        The last wave of tiles leaves multiprocessors idle; products too small for one wave run as long as a full one,
        split along k.
        """
        c = self.constants
        tiles = math.ceil(m / c.tile) * math.ceil(n / c.tile) * batch
        waves = tiles / self.gpu.multiprocessors
        fill = waves / math.ceil(waves) if waves >= 1 else 1.0
        computing = 2 * m * k * n * batch / (self.peak * self.gpu.sustained_products * fill)
        moving = self.element_bytes * batch * (m * k + k * n + m * n)
        return max(computing / c.training, self.passes(moving), c.launch)

    def passes(self, size: float) -> float:
        """Seconds to move `size` bytes through memory."""
        return size / (self.gpu.bandwidth * self.constants.memory * self.constants.training)

    def flash(self, flops: float) -> float:
        """Seconds of a flash-attention kernel that computes `flops`."""
        sustained = self.peak * self.constants.flash_attention * self.constants.training
        return max(flops / sustained, self.constants.launch)

    def collective(self, entry: Collective, inside: int) -> float:
        """Seconds of all of a step's `entry`; `inside` of its ways share a server.

        Between servers the rings of one group have the adapters of all its members in a server together.
        """
        server, c = self.server, self.constants
        crosses = entry.ways > inside
        bandwidth = server.link * c.link
        if crosses:
            bandwidth = min(bandwidth, inside * server.network * c.network)
        latency = server.network_latency if crosses else server.link_latency
        steps = 1 if entry.operation == "send" else 2 * math.log2(entry.ways) if entry.ways > 1 else 0
        return entry.count * (entry.size * ring_factor(entry.operation, entry.ways) / bandwidth + steps * latency)


def members_inside(plan: Plan, axis: Axis, server: Server) -> int:
    """How many ranks of one group of `axis` sit in the same server, model ways fastest, then stages, then data."""
    ways = plan.ways
    stride = {Axis.MODEL: 1, Axis.STAGE: ways.model, Axis.DATA: ways.model * ways.stage}[axis]
    size = {Axis.MODEL: ways.model, Axis.STAGE: ways.stage, Axis.DATA: ways.data}[axis]
    return max(1, min(size, server.gpus // stride))


def step_time(
    shape: Shape, plan: Plan, server: Server, software: Software = MTJAX, constants: Constants | None = None
) -> StepTime:
    """Seconds of one optimizer step, by cause."""
    machine = Machine(server, plan.element_bytes, constants)
    layers = shape.num_layers // plan.ways.stage
    m = plan.microbatches
    products, attention, element_wise = (m * layers * x for x in _layer(shape, plan, machine, software))
    logits = m * _logits(shape, plan, machine, software)
    entries = collectives(shape, plan, drops_last_reduction=software.drops_last_reduction)
    spent = dict.fromkeys(Axis, 0.0)
    for entry in entries:
        spent[entry.axis] += machine.collective(entry, members_inside(plan, entry.axis, server))
    exposed = _exposed(spent, plan, software, products, products + attention + element_wise)
    per_step = products + attention + element_wise + logits + exposed[Axis.MODEL] + exposed[Axis.STAGE]
    return StepTime(
        products=products,
        attention=attention,
        element_wise=element_wise,
        logits=logits,
        model_axis=exposed[Axis.MODEL],
        stage_axis=exposed[Axis.STAGE],
        bubble=per_step * bubble(plan.schedule, plan.ways.stage, m, plan.chunks),
        data_axis=exposed[Axis.DATA],
        optimizer=_optimizer(shape, plan, machine, software),
        hidden={axis: spent[axis] - exposed[axis] for axis in Axis},
    )


def _exposed(
    spent: dict[Axis, float], plan: Plan, software: Software, products: float, compute: float
) -> dict[Axis, float]:
    """The part of each axis' communication that nothing hides."""
    exposed = dict(spent)
    if software.overlaps_model_axis and plan.sequence_parallel:
        first = spent[Axis.MODEL] / plan.ways.model
        exposed[Axis.MODEL] = first + max(0.0, spent[Axis.MODEL] - first - products)
    if software.overlaps_data_axis:
        # Gradients of a layer can't leave before its last backward pass, nor parameters arrive after its first use.
        exposed[Axis.DATA] = max(0.0, spent[Axis.DATA] - compute / plan.microbatches)
    if plan.schedule == "interleaved":
        exposed[Axis.STAGE] = 0.0
    return exposed


def _layer(shape: Shape, plan: Plan, machine: Machine, software: Software) -> tuple[float, float, float]:
    """Seconds of one layer and microbatch, forward, recomputed and backward: products, attention, element-wise."""
    t, b, s, h, f = plan.ways.model, plan.microbatch_size, shape.sequence_length, shape.hidden_size, shape.mlp_size
    rows, q, k, g = b * s, shape.query_size, shape.kv_size, shape.mlp_inputs
    sizes = [(h, (q + 2 * k) / t), (q / t, h), (h, g * f / t), (f / t, h)]
    forward = [machine.product(rows, k, n) for k, n in sizes]
    backward = sum(machine.product(rows, n, k) + machine.product(k, rows, n) for k, n in sizes)
    again = 0.0
    if plan.recompute == "full":
        again = sum(forward) - (forward[-1] if software.drops_last_reduction else 0)
    core_forward, core_backward = _attention_core(shape, plan, machine, software.kernels)
    core_again = core_forward if plan.recompute != "none" else 0.0
    moves = software.kernels
    outside = rows * h / (t if plan.sequence_parallel else 1)
    once = machine.passes(_bytes(moves.forward, outside, rows * h / t, f / h, plan.element_bytes))
    back = machine.passes(_bytes(moves.backward, outside, rows * h / t, f / h, plan.element_bytes))
    passes = once * (2 if plan.recompute == "full" else 1) + back
    return sum(forward) + again + backward, core_forward + core_again + core_backward, passes


def _bytes(traffic: Traffic, outside: float, inside: float, ratio: float, element: int) -> float:
    """Bytes of a pass: elements outside and inside the split regions, times what the kernels move of each."""
    return outside * traffic.outside(element) + inside * (traffic.inside(element) + ratio * traffic.mlp(element))


def _attention_core(shape: Shape, plan: Plan, machine: Machine, kernels: ElementWise) -> tuple[float, float]:
    """Seconds of scores, softmax and context of a layer, forward and backward."""
    s, heads = shape.sequence_length, shape.num_heads / plan.ways.model * plan.microbatch_size
    width = shape.query_size / shape.num_heads
    if plan.flash_attention:
        causal_half = 2 * s * s * width * heads
        return machine.flash(causal_half), machine.flash(2.5 * causal_half)
    scores = heads * s * s
    both = machine.product(s, width, s, heads) + machine.product(s, s, width, heads)
    core = CORE[kernels.name]
    element = plan.element_bytes
    return (
        both + machine.passes(scores * core.forward(element, plan.dropout)),
        2 * both + machine.passes(scores * core.backward(element, plan.dropout)),
    )


def _logits(shape: Shape, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds of output projection and loss of a microbatch; on stages the last one's, shared over none."""
    rows, h, columns = (
        plan.microbatch_size * shape.sequence_length,
        shape.hidden_size,
        shape.padded_vocab_size / plan.ways.model,
    )
    forward = machine.product(rows, h, columns)
    backward = machine.product(rows, columns, h) + machine.product(h, rows, columns)
    again = forward if software.recomputes_logits else 0
    return forward + backward + again + machine.passes(rows * columns * software.kernels.logits)


def _optimizer(shape: Shape, plan: Plan, machine: Machine, software: Software) -> float:
    """Seconds to read and write what Adam updates on this GPU, and to read the gradients once more for their norm."""
    precision, shards = plan.precision, plan.ways.data if plan.zero else 1
    states = 2 * (precision.weights + precision.optimizer) + 2 * precision.gradients
    parameters = max(stage_parameters(shape, plan, i) for i in range(plan.ways.stage))
    return machine.passes(parameters / shards * (states + software.kernels.optimizer_extra))
