"""Checks that a compiled step multiplies in 8 bits wherever its config says so."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mtjax.analysis.contract import LAYER_FORWARD, LAYER_PHASES
from mtjax.config.adapters import ADAPTER
from mtjax.config.float8 import PREDICTION, UNQUANTIZED, unfit_products
from mtjax.inspect.compiled import CompiledStep
from mtjax.inspect.hlo_walk import Site
from mtjax.inspect.phases import OTHER, locate
from mtjax.inspect.products import BatchedMatmul, executed_products

IN_16_BITS = (ADAPTER, "experts", "router", PREDICTION)
"""Scopes of matmuls of layers with weights that are not in 8 bits."""


@dataclass(frozen=True)
class Float8Products:
    """The matmuls of a step's layers with weights, by type."""

    found: int
    """Executions of those in 8 bits."""
    expected: int
    """Executions of all that should be."""
    share: float
    """Share of the step's FLOPs, attention and head included, in 8 bits."""
    missed: tuple[str, ...]
    """One sentence for each matmul in another type."""


def float8_products(step: CompiledStep) -> Float8Products | None:
    """Finds the matmuls of layers with weights in a program for GPUs; None if the config has none in 8 bits.

    XLA for CPUs has no 8-bit matmuls, and widens the operands.
    """
    if step.plan.fp8 == "none" or not step.target.is_gpu:
        return None
    sizes = unfit_products(step.config.model, step.plan.tensor_degree).values()
    # XLA: pads the sizes of 16-bit matmuls to multiples of 8.
    # Matmuls whose sizes do not fit 8 bits stay in 16; they are recognized by these sizes.
    left = [{size + -size % to for size in pair} for pair in sizes for to in (1, 8)]
    flops = eight = found = expected = 0
    missed: list[str] = []
    forward = {True: 0, False: 0}  # in 8 bits or not, executions in the forward pass
    for site, product in executed_products(step.module):
        flops += product.flops * site.count
        phase, is_eight = _phase(site), product.dtype.startswith("f8")
        if is_eight:
            eight += product.flops * site.count
            found, expected = found + site.count, expected + site.count
        elif phase not in LAYER_PHASES or not _has_weight(product, site) or _is_left(product, left):
            continue
        forward[is_eight] += site.count if phase == LAYER_FORWARD else 0
        if not is_eight and not _is_in(UNQUANTIZED, site):
            expected += site.count
            missed.append(
                f"{site.count} matmuls [{product.m},{product.k}] x [{product.k},{product.n}] in {phase} are of "
                f"{product.dtype} instead of 8-bit floats, from {site.instruction.op_name}"
            )
    missed += _wrong_ends(step, forward)
    return Float8Products(found, expected, eight / max(flops, 1), tuple(missed))


def _wrong_ends(step: CompiledStep, forward: Mapping[bool, int]) -> list[str]:
    """Says whether not as many layers as the config asks for are in 16 bits, by matmuls of their forward passes."""
    wide, layers = sum(step.plan.fp8_ends), step.config.model.num_layers
    # All layers have as many matmuls, so the two numbers relate like the numbers of layers; multiplied, because a
    # layer's number of matmuls is not known here.
    if not wide or forward[False] * (layers - wide) == forward[True] * wide:
        return []
    return [
        f"{wide} of {layers} layers should be in 16 bits, and {forward[False]} of "
        f"{sum(forward.values())} matmuls of the layers' forward passes are"
    ]


def _is_in(scope: str, site: Site) -> bool:
    """Returns whether an instruction, or a loop or fusion around it, is in a scope."""
    names = (s.instruction.op_name for s in (site, *site.callers))
    return any(scope in re.split(r"[/()]", name) for name in names)


def _has_weight(product: BatchedMatmul, site: Site) -> bool:
    """Returns whether it multiplies by a weight that may be in 8 bits: it is not a part of attention, which multiplies
    by samples and heads, and not in the scopes of others."""
    return not product.is_flash and product.batch == 1 and not any(_is_in(scope, site) for scope in IN_16_BITS)


def _is_left(product: BatchedMatmul, left: list[set[int]]) -> bool:
    """Returns whether it is one of the matrices whose sizes 8-bit matmuls do not support, or a gradient."""
    return any(sizes <= {product.m, product.k, product.n} for sizes in left)


def _phase(site: Site) -> str:
    """Returns the phase of an instruction, or of the innermost loop or fusion around it that has one."""
    call_chain = ((s.computation, s.instruction) for s in (site, *reversed(site.callers)))
    return next((phase for location in call_chain if (phase := locate(*location)[0]) != OTHER), OTHER)
