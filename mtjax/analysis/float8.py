"""Formulas of training in 8-bit floats: which matmuls, their additional kernels, and their collectives."""

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from mtjax.analysis.anatomy import Anatomy, StackParts
from mtjax.analysis.contract import (
    GRADIENTS,
    JOINED,
    LAYER_BACKWARD,
    LAYER_FORWARD,
    LAYER_PHASES,
    LAYER_RECOMPUTE,
    OPTIMIZER,
    PARAMETERS,
    Contract,
    Dtype,
    Expectation,
    sum_expectations,
)
from mtjax.analysis.counts import Counts, counts, layer_counts, stage_weights
from mtjax.analysis.parts.part import Product, Weight, over_model
from mtjax.config import Model
from mtjax.config.float8 import MULTIPLE, float8_products, num_scales, quantizes_once, unfit_products
from mtjax.layout.layouts import LAYERS
from mtjax.layout.plan import Plan
from mtjax.layout.rules import MANUAL, MODEL
from mtjax.layout.stages import layers_of_stage


def is_float8(product: Product, plan: Plan) -> bool:
    """Returns whether a layer's matmul is computed in 8 bits."""
    fits = product.inner % MULTIPLE == product.outer % MULTIPLE == 0
    return plan.fp8 != "none" and fits and not (product.is_adapter or product.experts or product.is_wide)


def float8_bytes(product: Product, rows: float, plan: Plan) -> float:
    """Returns the bytes that kernels move around a matmul in 8 bits, beyond those of one in 16: all passes of a layer.

    As XLA compiles them for H100 (jax 0.10.2).
    """
    if not is_float8(product, plan):
        return 0.0
    # The weight is cast forward and again backward, where it is also transposed. The gradient is read for its largest
    # value, and cast in both orders; the input is read for its own. Tensorwise scaling reads inputs and weights before
    # each cast, too. Rowwise scaling rounds each operand for each matmul that reads it, and multiplies results by
    # scales.
    weight, inputs, outputs = {"delayed": (8, 2, 6), "tensorwise": (12, 8, 6), "rowwise": (19, 16, 18)}[plan.fp8]
    if plan.fp8 == "rowwise" and plan.fp8_digits > 1:  # results are written and read in float32
        weight, inputs, outputs = weight + 4, inputs + 4, outputs + 4
    # Quantized once a step, it is only transposed, forward and in the recompute.
    weight = 4 if quantizes_once(plan.fp8, plan.fp8_ends, 0) else weight
    return weight * product.inner * product.outer + rows * (outputs * product.outer + inputs * product.inner)


def products_in_8_bits(stack: StackParts, model: Model, plan: Plan) -> list[str]:
    """Returns the matmuls of a stack's layer in 8 bits, by the paths of their weights."""
    names = [f"{w.name}." for part in stack.parts for w in part.weights]
    every = float8_products(model, plan.mesh.model)
    return [path for path in every if any(name.startswith(f"{path}.") for name in names)]


def with_float8(contract: Contract, anatomy: Anatomy, plan: Plan) -> Contract:
    """Returns a contract with the collectives that scales of 8-bit products need in addition; itself without these."""
    if plan.fp8 == "none":
        return contract
    lines = _delayed(anatomy, plan) if plan.fp8 == "delayed" else _tensorwise(anatomy, plan)
    lines += [each for line in contract.lines for each in _by_ends(line, plan)]
    if _quantizes_once(anatomy.model, plan):
        lines = [each for line in lines for each in _gathered_in_8_bits(line, plan)]
    return replace(contract, name=f"{contract.name} + FP8 {plan.fp8}", lines=sum_expectations(lines))


def gathered_types(model: Model, plan: Plan) -> tuple[Dtype, Dtype]:
    """Returns the types in which sequences are gathered for matmuls of layers, and for those of gradients."""
    in_16_bits = model.lora_rank or unfit_products(model, plan.mesh.model)
    if plan.fp8 != "delayed" or not plan.sequence_parallel or in_16_bits:
        return "compute", "compute"
    # Only where all products of a sequence are in 8 bits: one in 16 would need the sequence gathered in 16.
    return "float8_e4m3fn", "float8_e5m2" if plan.fp8_format == "hybrid" else "float8_e4m3fn"


def _by_ends(line: Expectation, plan: Plan) -> list[Expectation]:
    """Returns a line as two, if it gathers sequences in 8 bits and some layers are in 16."""
    if line.phase not in LAYER_PHASES or not line.dtype.startswith("float8") or not any(plan.fp8_ends):
        return [line]
    unquantized = replace(line, count=f"({line.count})*unquantized_layers/layers", dtype="compute")
    return [replace(line, count=_of_float8(line.count, plan)), unquantized]


def _of_float8(count: str, plan: Plan) -> str:
    """Returns a formula for all layers as one for those with matmuls in 8 bits."""
    return f"({count})*(layers - unquantized_layers)/layers" if any(plan.fp8_ends) else count


def _quantizes_once(model: Model, plan: Plan) -> bool:
    return quantizes_once(plan.fp8, plan.fp8_ends, model.lora_rank)


def _gathered_in_8_bits(line: Expectation, plan: Plan) -> list[Expectation]:
    """Returns a line as two, if it gathers matrices of layers: of those in 8 bits, and of the others."""
    matrices = re.search(r"\b(layer|split)_matrices\b", line.elements)
    if line.phase != PARAMETERS or line.dtype != "compute" or matrices is None:
        return [line]
    others = line.elements.replace(matrices[0], f"{matrices[0]} - float8_matrices")
    why = "matrices that layers multiply by in 8 bits, quantized once a step"
    return [
        replace(line, elements=others),
        replace(line, elements="float8_matrices", dtype="float8_e4m3fn", why=why),
    ]


@cache
def _counts_in_8_bits(weights: tuple[Weight, ...], model: Model, plan: Plan) -> Counts:
    paths = tuple(f".{name}." for name in float8_products(model, plan.mesh.model))
    chosen = [w for w in weights if w.name.endswith(".weight") and any(path in f".{w.name}" for path in paths)]
    return counts(chosen, plan.layout(model), plan.mesh)


def counts_in_8_bits(weights: Iterable[Weight], model: Model, plan: Plan) -> Counts:
    """Counts the elements on a device of those of some weights that are quantized once a step."""
    return _counts_in_8_bits(tuple(weights), model, plan) if _quantizes_once(model, plan) else Counts()


def layer_bytes(stack: StackParts, model: Model, plan: Plan) -> float:
    """Returns the bytes of a layer's parameters on a device, gathered by ZeRO-3."""
    eight = counts_in_8_bits([w for part in stack.parts for w in part.weights], model, plan).all
    return plan.element_bytes * (layer_counts(stack, plan.layout(model), plan.mesh).all - eight) + eight


def float8_weight_bytes(anatomy: Anatomy, plan: Plan) -> float:
    """Returns the bytes of the weights in 8 bits that live through the step: this rank's shards of those that ZeRO-3
    gathers; of others all, less the copies in the compute type that ZeRO-1 and 2, and unrolled layers, need without."""
    if plan.fp8 == "none":
        return 0.0
    held, whole_copies = _held_in_8_bits(anatomy, plan), plan.element_bytes if plan.unrolled else 0
    whole = (1 - whole_copies) * (held.all - held.layer_matrices)
    if plan.zero == 3:
        return whole + held.layer_matrices / plan.zero_degree
    return whole + (1 - plan.element_bytes if plan.zero else 1) * held.layer_matrices


def _held_in_8_bits(anatomy: Anatomy, plan: Plan) -> Counts:
    """Counts the elements on a device of the stacks' matrices that are quantized once a step."""
    stacked = [weight for weight in stage_weights(anatomy, plan) if weight.names[0] == LAYERS]
    return counts_in_8_bits(stacked, anatomy.model, plan)


def _delayed(anatomy: Anatomy, plan: Plan) -> list[Expectation]:
    """Returns the collectives of counts, which are parameters' gradients, and of the scales' update; none in layers."""
    shared = plan.layout(anatomy.model).rules.token_axes
    ranks = JOINED.join(axis for axis in MANUAL if axis in shared)
    why = "counts of the largest values of activations and gradients, which determine 8-bit scales"
    comm_dtype = plan.grad_reduce_dtype
    over_ranks = Expectation(GRADIENTS, "all-reduce", ranks, "1", "float8_counts", comm_dtype, pooled=True, why=why)
    why = "the largest over the tensor parallel ranks, and its age"
    pair = "2*float8_scales"
    return [over_ranks, Expectation(OPTIMIZER, "all-reduce", MODEL, "1", pair, "float32", pooled=True, why=why)]


def _tensorwise(anatomy: Anatomy, plan: Plan) -> list[Expectation]:
    """Returns the maxima over tensor parallel ranks, a number each, of operands that these shard."""
    return [line for stack in anatomy.stacks for line in _tensorwise_of(stack, anatomy, plan)]


def _tensorwise_of(stack: StackParts, anatomy: Anatomy, plan: Plan) -> list[Expectation]:
    """Returns the lines of `_tensorwise` of one stack."""
    products = products_in_8_bits(stack, anatomy.model, plan)
    columns = sum(path.endswith((".qkv", ".up")) for path in products)
    # Weights, and the inputs of row-parallel matmuls; backward, the gradients of column-parallel ones' outputs.
    operands = len(products) + len(products) - columns
    # No gradient of a frozen matrix reads its input: that of a last matmul, which is not recomputed, needs no scale.
    unread = [w.name for part in stack.unread for w in part.weights] if anatomy.model.lora_rank else []
    dropped = [p for p in products if p.endswith((".output", ".down")) and any(n.startswith(f"{p}.") for n in unread)]
    turns = "ticks" if plan.is_staged else "microbatches"
    ahead = f"2*{turns}" if plan.is_staged and plan.recompute == "full" else turns
    layers = f"{stack.side}layers"
    counts = {
        LAYER_FORWARD: (f"{layers}*{ahead}", operands),
        # 8-bit operands are never saved.
        LAYER_RECOMPUTE: (f"({layers} + {stack.side}grouped_layers)*{turns}", operands - len(dropped)),
        LAYER_BACKWARD: (f"{layers}*{turns}", columns),
    }
    return [
        over_model(
            phase,
            "all-reduce",
            _of_float8(times, plan),
            str(number),
            "largest values of operands, for 8-bit scales",
            pooled=True,
        )
        for phase, (times, number) in counts.items()
        if number
    ]


def float8_state_bytes(anatomy: Anatomy, plan: Plan) -> tuple[float, float]:
    """Returns the bytes of delayed scaling's states on a rank, float32, and of the gradients that count for them."""
    symbols = float8_symbols(anatomy, plan)
    ages = symbols.get("float8_counts", 0)
    scales = 3 * symbols.get("float8_scales", 0) // (2 * num_scales(plan.fp8_digits))
    return 4.0 * (ages + scales), 4.0 * ages


def float8_symbols(anatomy: Anatomy, plan: Plan) -> dict[str, int]:
    """Returns the symbols of the formulas above, of a rank."""
    ends = {"unquantized_layers": sum(plan.fp8_ends)} if any(plan.fp8_ends) else {}
    if plan.fp8 != "delayed":
        return ends
    model = anatomy.model
    products = sum(layers_of_stage(s, plan) * len(products_in_8_bits(s, model, plan)) for s in anatomy.stacks)
    # Each product has two: of activations and of gradients. Scales of weights are computed from the weights.
    scales = products * 2 * num_scales(plan.fp8_digits)
    symbols = {"float8_scales": scales, "float8_counts": scales * model.num_heads // plan.mesh.model}
    if _quantizes_once(model, plan):
        held = _held_in_8_bits(anatomy, plan).layer_matrices
        symbols["float8_matrices"] = held // plan.chunks if plan.is_staged and plan.zero == 3 else held
    return ends | symbols
