"""Memory per GPU by formula: model states, activations by kind, logits; stage by stage.

Symbols as in `mtjax.plan.formulas`; bytes. Sources: arXiv 2205.05198 (activations), 1910.02054 (ZeRO).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.plan.formulas import (
    Recompute,
    Shape,
    layer_parameters_per_rank,
    parameters_per_rank,
    whole_outside_layers,
)
from mtjax.plan.plans import Plan, Precision, Residuals
from mtjax.plan.schedules import in_flight


def bytes_per_parameter(precision: Precision, zero: int, data_ways: int) -> tuple[float, float, float]:
    """Bytes per parameter of weights, gradients and optimizer: w, g, k.

    ZeRO-1 divides k by the data ways d, ZeRO-2 also g, ZeRO-3 also w (arXiv 1910.02054, section 5).
    """
    w, g, k = precision.weights, precision.gradients, precision.optimizer
    d = data_ways
    return (w / d if zero >= 3 else w, g / d if zero >= 2 else g, k / d if zero >= 1 else k)


def layer_activations(
    shape: Shape,
    microbatch: int,
    model_ways: int,
    *,
    sequence_parallel: bool = False,
    flash_attention: bool = False,
    dropout: bool = True,
    element_bytes: int = 2,
    residuals: Residuals = "megatron",
) -> dict[str, float]:
    """What one layer keeps of one microbatch for its backward pass, by kind.

    Megatron's fused kernels: sums to `sbh (10 + 24/t + 5as/(ht))`; all of it over t with sequence parallelism; flash
    attention leaves out the last term (arXiv 2205.05198, equations 1 to 4). Masks have one byte, all else
    `element_bytes`, c.

    Gated MLPs keep one array more; key and value heads fewer than the ways are counted as if split.

    JAX: products, masks, attention's output and float32 probabilities, and the rest is computed again
    (`mtjax.models.recompute`): `sbh (6 + 16/t + 5as/(ht))` bytes; the stacks of the compiled scan.
    """
    s, b, h, t, c = shape.sequence_length, microbatch, shape.hidden_size, model_ways, element_bytes
    outside = s * b * h / (t if sequence_parallel else 1)
    inside = s * b * h / t
    masks = 1 if dropout else 0
    is_jax = residuals == "jax"
    kinds = {
        "norm inputs": 2 * c * outside,
        "inputs of column-parallel products": 0 if is_jax else 2 * c * outside,
        "dropout masks": 2 * masks * outside,
        "query, key, value": c * inside * (shape.query_size + 2 * shape.kv_size) / h,
        "attention output": c * inside * shape.query_size / h,
        "attention probabilities": 0.0,
        "MLP": (shape.mlp_inputs + (0 if is_jax else 1)) * c * inside * shape.mlp_size / h,
    }
    if not flash_attention:
        per_score = (4 + masks) if is_jax else (2 * c + masks if dropout else c)
        kinds["attention probabilities"] = per_score * shape.num_heads * s * s * b / t
    return kinds


def kept_by(kinds: Mapping[str, float], recompute: Recompute, layer_input: float) -> dict[str, float]:
    """What stays of a layer between its passes: all of it, all but the probabilities, or its input alone."""
    if recompute == "full":
        return {"layer inputs": layer_input}
    return {k: v for k, v in kinds.items() if recompute == "none" or k != "attention probabilities"}


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU of a stage, at the fullest moment of a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: Mapping[str, float]
    """Of all layers and microbatches in flight, by kind."""
    working: float
    """The layer at work: what it computes again, its scores' gradients, and the gathered weights of ZeRO-3."""
    logits: float

    @property
    def total(self) -> float:
        """All of it; the logits are gone when the layers' backward pass begins."""
        return self.states + self.kept + max(self.working, self.logits)

    @property
    def states(self) -> float:
        """Weights, gradients and optimizer."""
        return self.weights + self.gradients + self.optimizer

    @property
    def kept(self) -> float:
        """All activations that wait for the backward pass."""
        return sum(self.activations.values())


def stage_parameters(shape: Shape, plan: Plan, stage: int) -> float:
    """Parameters on a GPU of a stage.

    The first stage has the embeddings, the last the output table (a copy when tied) and the final norm.
    """
    ways = plan.ways
    if ways.stage == 1:
        return parameters_per_rank(shape, ways.model)
    layers = shape.num_layers // ways.stage * layer_parameters_per_rank(shape, ways.model)
    table = shape.padded_vocab_size * shape.hidden_size / ways.model
    norm = shape.norm_vectors * shape.hidden_size
    first = table + whole_outside_layers(shape) - norm if stage == 0 else 0
    last = table + norm if stage == ways.stage - 1 else 0
    return layers + first + last


def stage_memory(shape: Shape, plan: Plan, stage: int = 0) -> Memory:
    """Bytes on a GPU of a stage by formula."""
    ways, b, c = plan.ways, plan.microbatch_size, plan.element_bytes
    parameters = stage_parameters(shape, plan, stage)
    w, g, k = bytes_per_parameter(plan.precision, plan.zero, ways.data)
    kinds = layer_activations(
        shape,
        b,
        ways.model,
        sequence_parallel=plan.sequence_parallel,
        flash_attention=plan.flash_attention,
        dropout=plan.dropout,
        element_bytes=c,
        residuals=plan.residuals,
    )
    residual = c * shape.sequence_length * b * shape.hidden_size / (ways.model if plan.sequence_parallel else 1)
    kept = kept_by(kinds, plan.recompute, residual)
    layers = shape.num_layers // ways.stage
    copies = in_flight(plan.schedule, ways.stage, plan.microbatches, stage, plan.chunks)
    return Memory(
        weights=w * parameters,
        gradients=g * parameters / (ways.data if plan.zero == 1 and plan.reduces_at_once else 1)
        + g * _added_whole(plan, parameters - layers * layer_parameters_per_rank(shape, ways.model)),
        optimizer=k * parameters,
        activations={name: copies * size for name, size in _kept_by_layers(plan, kinds, residual, layers).items()},
        working=_working(shape, plan, kinds, kept) + _group_at_work(plan, kinds),
        logits=_logits(shape, plan) if stage == ways.stage - 1 else 0,
    )


def _kept_by_layers(plan: Plan, kinds: Mapping[str, float], layer_input: float, layers: int) -> dict[str, float]:
    """What stays of a stage's layers between their passes."""
    if plan.recompute != "full":
        return {name: layers * size for name, size in kept_by(kinds, plan.recompute, layer_input).items()}
    again = layers if plan.recompute_first is None else min(plan.recompute_first, layers)
    inputs = 0 if plan.recompute_offload else layer_input * again / plan.recompute_group
    rest = kinds if again < layers else {}
    return {"layer inputs": inputs} | {name: (layers - again) * size for name, size in rest.items()}


def _group_at_work(plan: Plan, kinds: Mapping[str, float]) -> float:
    """What the layers of a group keep for each other while their backward pass is at work."""
    is_grouped = plan.recompute == "full" and plan.recompute_group > 1
    return plan.recompute_group * sum(kinds.values()) if is_grouped else 0


def _added_whole(plan: Plan, outside: float) -> float:
    """Parameters of which a microbatch's gradients live beside the sum: those outside the layers; not Megatron's."""
    return outside if plan.residuals == "jax" and plan.microbatches > 1 and plan.zero < 2 else 0


def _working(shape: Shape, plan: Plan, kinds: Mapping[str, float], kept: Mapping[str, float]) -> float:
    """Bytes that the layer at work needs beside what it kept."""
    layer, c = layer_parameters_per_rank(shape, plan.ways.model), plan.element_bytes
    gathered = 2 * c * layer if plan.zero == 3 else 0
    if plan.residuals == "megatron":
        return gathered + sum(kinds.values()) - sum(v for name, v in kept.items() if name in kinds)
    return gathered + _jax_working(shape, plan, kinds)


def _jax_working(shape: Shape, plan: Plan, kinds: Mapping[str, float]) -> float:
    """The fuller of two moments of a layer's backward pass: in attention, and in the MLP before it."""
    c, t, rows = plan.element_bytes, plan.ways.model, plan.microbatch_size * shape.sequence_length
    pairs = 0 if plan.flash_attention else rows * shape.sequence_length * shape.num_heads / t
    # Scores read or computed again, then their float32 gradients; float32 programs hoist two constants of that shape.
    attention = kinds["attention probabilities"] + 4 * pairs
    hoisted = 8 * pairs if c == 4 else 0
    # Norms and activations are computed again whatever is kept. One norm's three arrays, the residual stream's float32
    # gradient, two arrays in the compute type, two masks.
    split = t if plan.sequence_parallel else 1
    near = (3 * 4 + 4 + 2 * c + (2 if plan.dropout else 0)) * rows * shape.hidden_size / split
    # GELU's derivative has six arrays where one is kept.
    return hoisted + near + max(attention, kinds["attention probabilities"] + 6 * kinds["MLP"] / shape.mlp_inputs)


def _logits(shape: Shape, plan: Plan) -> float:
    """float32 logits of the tokens that are alive at a time, with their gradients.

    Megatron's are float32. JAX's gradients have the compute type and, of a single chunk, the logits' place; beside them
    lies the table in the compute type.
    """
    rows = shape.sequence_length * plan.microbatch_size
    tokens = min(rows, plan.loss_chunk or rows)
    columns = shape.padded_vocab_size / plan.ways.model
    if plan.residuals == "megatron":
        return 2 * 4 * tokens * columns
    gradients = plan.element_bytes * tokens * columns if tokens < rows else 0
    return 4 * tokens * columns + gradients + plan.element_bytes * columns * shape.hidden_size


def fullest_stage(shape: Shape, plan: Plan) -> Memory:
    """The memory of the stage that needs most."""
    return max((stage_memory(shape, plan, i) for i in range(plan.ways.stage)), key=lambda m: m.total)
