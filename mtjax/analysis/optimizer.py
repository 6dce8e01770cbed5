"""What an optimizer needs in addition to the model: bytes of its states, FLOPs and collectives of its update.

AdamW has two moments of each parameter, and no products and no collectives: only other optimizers are counted here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial

from mtjax.analysis.anatomy import Anatomy
from mtjax.analysis.contract import GRADIENTS, JOINED, OPTIMIZER, Dtype, Expectation, phase_over
from mtjax.analysis.counts import stage_weights, zero_axes
from mtjax.analysis.parts.part import Weight
from mtjax.config.adapters import is_trainable
from mtjax.layout.host_order import exposed_elements
from mtjax.layout.layouts import LAYERS, Layout, gathers_in_compute_dtype, sharded_dimension
from mtjax.layout.mesh import MeshShape
from mtjax.layout.optimizer_states import ITERATIONS, MatrixDims, factored_dimensions, kept_arrays, matrices_of
from mtjax.layout.plan import Plan
from mtjax.layout.rules import MANUAL, MODEL, Axes
from mtjax.layout.stages import layers_of_stage

FLOAT32 = 4


@dataclass(frozen=True)
class Shard:
    """A trained parameter as a device stores it between steps."""

    weight: Weight
    axes: tuple[Axes, ...]
    """The mesh axes that shard each dimension, of degrees above 1."""
    sizes: tuple[int, ...]
    """Of the dimensions on a device."""

    def elements(self, dims: tuple[int, ...]) -> int:
        """Returns the elements of an array that has these dimensions of the parameter."""
        return math.prod(self.sizes[i] for i in dims)


@dataclass(frozen=True)
class Exchange:
    """Matrices of a parameter on a device, which ranks exchange for entire ones."""

    rows: int
    columns: int
    entire: int
    """Matrices that a rank orthogonalizes, zeros for even shares included."""
    elements: int
    """On a rank, of each all-to-all."""
    axes: tuple[Axes, ...]
    """Of the all-to-alls."""

    @property
    def flops(self) -> float:
        """FLOPs of a rank: in each iteration two products m x m x n and one m x m x m, where m is the smaller size."""
        # Newton-Schulz multiplies the matrix with its transpose, on the smaller side.
        small, large = sorted((self.rows, self.columns))
        return self.entire * ITERATIONS * (4 * small**2 * large + 2 * small**3)


def state_bytes(anatomy: Anatomy, plan: Plan, stage: int = 0) -> float:
    """Returns the bytes of an optimizer's arrays on a device, by `mtjax.layout.optimizer_states`."""
    return sum(
        FLOAT32 * shard.elements(dims)
        for shard in _shards_of(anatomy, plan, stage)
        for dims in kept_arrays(plan.optimizer, shard.weight.names, shard.weight.shape).values()
    )


def states_on_device(anatomy: Anatomy, plan: Plan, stage: int, adam: float) -> float:
    """Returns the bytes of the optimizer's states on a device.

    Args:
      anatomy: of the model.
      plan: of the run.
      stage: of the pipeline.
      adam: bytes of AdamW's states, with master weights where weights are narrower.
    """
    if plan.offloads_optimizer:
        return 0.0
    is_adam = plan.residuals != "jax" or plan.optimizer.name == "adamw"
    return adam if is_adam else state_bytes(anatomy, plan, stage)


def host_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of a device's states in the host's memory, which a step also writes."""
    return state_bytes(anatomy, plan) + _master_bytes(anatomy, plan) if plan.offloads_optimizer else 0.0


def host_reads(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes that a step reads from the host's memory: all that is there, and master weights twice, for the
    copies in the compute dtype and for the update."""
    return host_bytes(anatomy, plan) + _master_bytes(anatomy, plan)


def exposed_host_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes for which a step waits: those that it reads or writes while none cross in the other direction,
    and the larger number of two that cross at once. Nothing hides the reads for copies in the compute dtype."""
    if not plan.offloads_optimizer:
        return 0.0
    elements, stacks = 0, defaultdict[tuple[int, int], list[int]](list)
    for shard in _shards_of(anatomy, plan):
        layers = shard.sizes[0]
        if shard.weight.names[0] == LAYERS:
            stacks[shard.weight.shape[0] // layers, layers].append(math.prod(shard.sizes[1:]))
        else:
            # Outside the layers a read is over before its write begins, and nothing crosses meanwhile.
            elements += 2 * math.prod(shard.sizes)
    elements += sum(exposed_elements(sizes, layers) for (_, layers), sizes in stacks.items())
    arrays = 3 if plan.offloads_parameters else 2
    return arrays * FLOAT32 * elements + _master_bytes(anatomy, plan)


def _master_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of a device's master weights in the host's memory."""
    return FLOAT32 * sum(math.prod(shard.sizes) for shard in _offloaded(anatomy, plan))


def weight_copies(anatomy: Anatomy, plan: Plan, stage: int = 0) -> float:
    """Returns the bytes of the copies on a device of master weights in the host's memory."""
    sizes = {True: plan.precision.matrices, False: FLOAT32}
    shards = _offloaded(anatomy, plan, stage)
    return sum(sizes[gathers_in_compute_dtype(shard.weight.names)] * math.prod(shard.sizes) for shard in shards)


def _offloaded(anatomy: Anatomy, plan: Plan, stage: int = 0) -> tuple[Shard, ...]:
    return _shards_of(anatomy, plan, stage) if plan.offloads_parameters else ()


def narrow_bytes(anatomy: Anatomy, plan: Plan, stage: int = 0) -> float:
    """Returns the bytes that a device saves by stored matrices in a type of less than 4 bytes."""
    if not plan.precision.are_masters or plan.precision.matrices == FLOAT32:
        return 0.0
    shards = (shard for shard in _shards_of(anatomy, plan, stage) if gathers_in_compute_dtype(shard.weight.names))
    return (FLOAT32 - plan.precision.matrices) * sum(math.prod(shard.sizes) for shard in shards)


def point_bytes(anatomy: Anatomy, plan: Plan, stage: int = 0) -> float:
    """Returns the bytes of the point at which Schedule-Free takes gradients, where the step keeps it: ZeRO-1 and 2 only
    keep what they gather of it."""
    if plan.optimizer.name != "schedule-free" or plan.gathers_per_step or plan.residuals != "jax":
        return 0.0
    return FLOAT32 * sum(math.prod(shard.sizes) for shard in _shards_of(anatomy, plan, stage))


def streamed_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of offloaded states that are on a device during the update: those outside the layers, and one
    layer's."""
    if not plan.offloads_optimizer:
        return 0.0
    arrays = 3 if plan.offloads_parameters else 2
    sizes = ((shard.weight.names[0] == LAYERS, shard.sizes) for shard in _shards_of(anatomy, plan))
    return arrays * FLOAT32 * sum(math.prod(size[1:] if is_stacked else size) for is_stacked, size in sizes)


def update_flops(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the FLOPs of the products of a step's update, of all devices together."""
    return plan.mesh.size * sum(exchange.flops for exchange in exchanges(anatomy, plan))


def exchanges(anatomy: Anatomy, plan: Plan) -> list[Exchange]:
    """Returns what Muon orthogonalizes; of other optimizers nothing."""
    if plan.optimizer.name != "muon":
        return []
    found = []
    for shard in _shards_of(anatomy, plan):
        matrices = matrices_of(shard.weight.names)
        if matrices is not None:
            found.append(_exchange(shard, matrices, plan.mesh))
    return found


def _exchange(shard: Shard, matrices: MatrixDims, mesh: MeshShape) -> Exchange:
    inside = (*matrices.rows, *matrices.columns)
    axes = tuple(shard.axes[dim] for dim in inside if shard.axes[dim])
    ranks = math.prod(mesh.degree(one) for one in axes)
    entire = math.ceil(shard.elements(matrices.stacked) / ranks)
    _, rows, columns = matrices.sizes(shard.weight.shape)
    return Exchange(rows, columns, entire, entire * ranks * shard.elements(inside), axes)


def update_lines(anatomy: Anatomy, plan: Plan) -> tuple[Expectation, ...]:
    """Returns the collectives of a step's update."""
    comm_dtype: Dtype = "compute" if plan.optimizer.newton_schulz == "bfloat16" else "float32"
    kinds = {
        "muon": ("all-to-all", "2", comm_dtype, "matrices' shards for entire matrices of some layers, and back"),
        "adafactor": ("all-reduce", "1", "float32", "averages of rows and columns that ranks share"),
    }
    observed = _observed_lines(anatomy, plan) if plan.optimizer.clips_scores else ()
    if plan.optimizer.name not in kinds:
        return observed
    kind, count, dtype, why = kinds[plan.optimizer.name]
    # XLA: combines Adafactor's sums over ranks with those of gradients.
    phase = lambda axes: (phase_over(kind, axes) if kind == "all-reduce" else None) or OPTIMIZER  # noqa: E731
    return observed + tuple(
        Expectation(phase(axes), kind, JOINED.join(axes), count, _symbol(axes), dtype, pooled=True, why=why)  # pyright: ignore[reportArgumentType]
        for axes in _sent(anatomy, plan)
    )


def update_symbols(anatomy: Anatomy, plan: Plan) -> dict[str, int]:
    """Returns the symbols of `update_lines`."""
    symbols = {_symbol(axes): elements for axes, elements in _sent(anatomy, plan).items()}
    if plan.optimizer.clips_scores:
        layers = sum(layers_of_stage(stack, plan) for stack in anatomy.stacks)
        symbols["all_scores"] = layers * anatomy.model.num_heads
        symbols["observed_scores"] = symbols["all_scores"] // plan.mesh.model
    return symbols


def _observed_lines(anatomy: Anatomy, plan: Plan) -> tuple[Expectation, ...]:
    """Returns the collectives of the largest scores: over ranks with other samples, and over those with other heads."""
    shared = plan.layout(anatomy.model).rules.token_axes
    ranks = JOINED.join(axis for axis in MANUAL if axis in shared)
    why = "largest attention scores of heads, for QK-clip"
    line = partial(Expectation, dtype="float32", pooled=True, why=why)
    return (
        line(GRADIENTS, "all-reduce", ranks, "1", "observed_scores"),
        line(OPTIMIZER, "all-gather", MODEL, "1", "all_scores"),
    )


def _symbol(axes: Axes) -> str:
    return f"updates_over_{'_'.join(axes)}"


def _sent(anatomy: Anatomy, plan: Plan) -> Counter[Axes]:
    """Returns the elements that a device sends in the update once, by mesh axes."""
    sent: Counter[Axes] = Counter()
    for exchange in exchanges(anatomy, plan):
        for axes in exchange.axes:
            sent[axes] += exchange.elements
    if plan.optimizer.name == "adafactor":
        for shard in _shards_of(anatomy, plan):
            for axes, elements in _averaged(shard):
                sent[axes] += elements
    return sent


def _averaged(shard: Shard) -> Iterator[tuple[Axes, int]]:
    """Yields the sums over ranks of one parameter's averages: of rows, of columns, and of the averages of rows."""
    factored = factored_dimensions(shard.weight.names, shard.weight.shape)
    if factored is None:
        return
    second, largest = factored
    others = tuple(i for i in range(len(shard.sizes)) if i not in factored)
    if axes := shard.axes[largest]:
        yield axes, shard.elements((*others, second))
    if axes := shard.axes[second]:
        yield axes, shard.elements((*others, largest))
        yield axes, shard.elements(others)


def _shards_of(anatomy: Anatomy, plan: Plan, stage: int = 0) -> tuple[Shard, ...]:
    weights = (w for w in stage_weights(anatomy, plan, stage) if is_trainable(anatomy.model, w.name))
    return _shards(tuple(weights), plan.layout(anatomy.model), plan.mesh)


@cache
def _shards(weights: tuple[Weight, ...], layout: Layout, mesh: MeshShape) -> tuple[Shard, ...]:
    shards = []
    for weight in weights:
        axes = [layout.rules.mesh_axes(name) for name in weight.names]
        over = zero_axes(layout, weight.names)
        dim = sharded_dimension(weight.names, weight.shape, layout, mesh, mesh.degree(over))
        if dim >= 0:
            axes[dim] = (*axes[dim], *over)
        used = tuple(tuple(axis for axis in one if mesh.degree((axis,)) > 1) for one in axes)
        sizes = tuple(n // mesh.degree(one) for n, one in zip(weight.shape, used, strict=True))
        shards.append(Shard(weight, used, sizes))
    return tuple(shards)
