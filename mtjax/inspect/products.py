"""Matmuls of a program, in any form that XLA gives them: their sizes and FLOPs."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mtjax.inspect.hlo import Array, Computation, Instruction, Module
from mtjax.inspect.hlo_walk import Site, walk
from mtjax.layout.attention_kernel import CAUSAL, FORWARD, KEYS_BACKWARD, QUERIES_BACKWARD, padded_width

_LIBRARY_PRODUCT = re.compile(r"__cublas\$(?:lt\$)?(?:gemm|matmul)|__triton_gemm|__onednn\$matmul|__cudnn\$conv")
_FLASH = re.compile(r"__cudnn\$fmha\w*", re.IGNORECASE)
_UNMASKED = re.compile(r'"mask_type":\s*"(?!\w*CAUSAL)')
"""In the configuration of cuDNN's attention where it is not causal: a ring's steps with the keys of other ranks."""
_WINDOW = re.compile(r'"sliding_window_length":\s*"?([1-9]\d*)')
"""Likewise, its sliding window, if any: 0 is none."""
_OWN = re.compile(rf"/(?P<kernel>{FORWARD}|{KEYS_BACKWARD}|{QUERIES_BACKWARD})(?P<causal>{CAUSAL})?/pallas_call")


class Own(NamedTuple):
    """What a kernel of `models/kernels/pallas.py` computes."""

    flops: float
    """Causal attention's half, with widths of powers of two."""
    draws: float
    """Random numbers of dropout."""


@dataclass(frozen=True)
class BatchedMatmul:
    """`batch` matmuls [m,k] x [k,n]."""

    m: int
    k: int
    n: int
    batch: int
    dtype: str
    """Dtype of the operands."""
    is_flash: bool = False
    """Whether it stands for all matmuls of a flash attention kernel, with their FLOPs."""
    computed_share: float = 1.0
    """Share of its FLOPs that a flash attention kernel computes: half of causal attention's, less with a window."""
    own_attention: Own | None = None
    """Where this is our own kernel."""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.k * self.n * self.batch

    @property
    def element_bytes(self) -> int:
        """Bytes of an operand's element."""
        return Array(self.dtype, ()).bytes


def product_of(computation: Computation, instruction: Instruction) -> BatchedMatmul | None:
    """Returns the matmul that an instruction computes itself, or None."""
    if instruction.opcode == "dot":
        return _dot(
            computation,
            instruction,
            instruction.dimensions("lhs_contracting_dims"),
            instruction.dimensions("lhs_batch_dims"),
        )
    if instruction.opcode != "custom-call":
        return None
    target = instruction.attribute("custom_call_target") or ""
    if _FLASH.search(target):
        return _flash(computation, instruction, target)
    if own_attention := _OWN.search(instruction.attributes):
        return _own(computation, instruction, own_attention["kernel"], is_causal=bool(own_attention["causal"]))
    if not _LIBRARY_PRODUCT.search(target):
        return None
    numbers = re.search(r'"dot_dimension_numbers":(\{[^}]*\})', instruction.attributes)
    # cuBLAS's calls name their dimensions in JSON. Where they don't, it is [m,k] x [k,n].
    named = json.loads(numbers[1]) if numbers else {}
    return _dot(
        computation,
        instruction,
        tuple(int(d) for d in named.get("lhs_contracting_dimensions", ["1"])),
        tuple(int(d) for d in named.get("lhs_batch_dimensions", [])),
    )


def _dot(
    computation: Computation, instruction: Instruction, contracting: tuple[int, ...], batch: tuple[int, ...]
) -> BatchedMatmul:
    left = computation.by_name[instruction.operands[0]].arrays[0]
    k = math.prod(left.dims[d] for d in contracting)
    # n follows from the result, so that the right operand's dimensions, which XLA may have merged, are not needed.
    batches = math.prod(left.dims[d] for d in batch)
    m = left.elements // max(k * batches, 1)
    n = instruction.arrays[0].elements // max(m * batches, 1)
    return BatchedMatmul(m, k, n, batches, left.dtype)


def _flash(computation: Computation, instruction: Instruction, target: str) -> BatchedMatmul:
    """Returns a kernel's matmuls as one: two forward, five backward, full attention; queries [b, s, heads, width]."""
    query, key, value = computation.operand_arrays(instruction)[:3]
    batch, queries, heads, width = query.dims
    # Scores, output; and backward scores, the gradients of probabilities, values, queries and keys.
    widths = 3 * width + 2 * value.dims[3] if "backward" in target.lower() else width + value.dims[3]
    share = _computed_share(instruction.attributes, key.dims[1])
    sizes = (queries, widths, key.dims[1], batch * heads)
    return BatchedMatmul(*sizes, query.dtype, is_flash=True, computed_share=share)


def _computed_share(attributes: str, keys: int) -> float:
    """Returns the share of the scores that cuDNN's kernel computes, without the rest of its blocks."""
    if _UNMASKED.search(attributes):
        return 1.0
    window = _WINDOW.search(attributes)
    share = min(int(window[1]) / keys, 1.0) if window else 1.0
    # Of s tokens with a window of w, all but the first w see w: w s - w^2 / 2 of s^2 pairs.
    return share - share * share / 2


def _own(computation: Computation, instruction: Instruction, kernel: str, *, is_causal: bool) -> BatchedMatmul:
    """Returns the matmuls of one of our own attention kernels as one: two forward, four and three backward."""
    operands = computation.operand_arrays(instruction)
    query, key, value = operands[:3]
    batch, queries, heads, width = query.dims
    # Scores, output; scores, gradients of probabilities, keys, values; scores, gradients of probabilities, queries.
    # Backward each of the two kernels computes scores and gradients of probabilities again, rather than store what has
    # the size of scores.
    of_keys, of_values = {FORWARD: (1, 1), KEYS_BACKWARD: (2, 2), QUERIES_BACKWARD: (2, 1)}[kernel]
    pairs = batch * heads * queries * key.dims[1] / (1 + is_causal)
    padded = of_keys * padded_width(width) + of_values * padded_width(value.dims[3])
    # Dropout's keys are the only unsigned integers among the operands.
    own_attention = Own(2 * pairs * padded, pairs * any(a.dtype == "u32" for a in operands))
    widths = of_keys * width + of_values * value.dims[3]
    return BatchedMatmul(
        queries, widths, key.dims[1], batch * heads, query.dtype, is_flash=True, own_attention=own_attention
    )


def is_own_attention(text: str) -> bool:
    """Returns whether a program's attention is our own kernel."""
    return _OWN.search(text) is not None


def products_of(module: Module, computation: Computation, instruction: Instruction) -> list[BatchedMatmul]:
    """Returns the matmuls of an operation, with those of computations that it fuses or calls, each once."""
    direct = product_of(computation, instruction)
    # Each once: callers do not ask about loops, and a fusion runs what is in it once.
    callees = ((callee, inner) for callee in module.callees(instruction) for inner in callee.instructions)
    return [*([direct] if direct else []), *(p for callee in callees for p in products_of(module, *callee))]


def executed_products(module: Module) -> Iterator[tuple[Site, BatchedMatmul]]:
    """Yields the matmuls that one device computes in a step, and where."""
    for site in walk(module):
        if (product := product_of(site.computation, site.instruction)) is not None:
            yield site, product


def count_flops(module: Module) -> int:
    """Returns the FLOPs of all matmuls that one device computes in a step."""
    return sum(product.flops * site.count for site, product in executed_products(module))
