"""What experts' products cost beyond their FLOPs: mtjax computes them in a loop over blocks of one expert's tokens.

A block (`mtjax.models.kernels.grouped`) has R rows of tokens of width h, and an expert with an inner width of f on a
rank. c are the bytes of the compute type, U and D the elements of its matrices into and out of the inner width. Kernels
were read off programs compiled for H100, as those of `mtjax.analysis.copies`; none is fitted. Bytes of a block:

- Where a rank has several experts, their matrices are sliced out of the stack, forward and backward: 2c (U + D) each.
- Gradients are added to float32 sums: (8 + c) U, and 12 D; with one expert on a rank the product adds D's itself, 4 D.
- Tokens are gathered and added up again: 16 h R forward and 20 h R backward.
- The activation's backward pass, beyond what `mtjax.analysis.kernels` counts: 18 f R.
- Kernels that take no longer than a launch: 7; with several experts 19, and a binary search for the block's expert of 4
  in each step, forward and backward.

Once for each layer and microbatch: tokens' sums are zeros, in float32, and cast, 20 h bytes for each token that a rank
reads; and sums of matrices' gradients are zeros, 4 (U + D) for each of its experts.
"""

import math
from typing import NamedTuple

from mtjax.analysis.anatomy import Stack
from mtjax.analysis.copies import Copy
from mtjax.analysis.parts.experts import Experts
from mtjax.config import Model
from mtjax.config.sizes import expert_capacity
from mtjax.layout.plan import Plan

BLOCKS = "blocks of experts"
LONGEST, SHORTEST, BLOCKS_OF_AN_EXPERT = 1024, 8, 8
"""Those of `mtjax.models.kernels.grouped`."""


class ExpertBlocks(NamedTuple):
    """Of a layer and microbatch, on a rank whose load is the mean."""

    rows: int
    number: int


def expert_blocks(model: Model, plan: Plan) -> ExpertBlocks:
    """Returns the blocks of experts' products if all experts are chosen equally often."""
    ways, length = plan.mesh.expert, model.sequence_length
    capacity, tokens = expert_capacity(model, length), int(plan.local_tokens(length))
    pairs = ways * tokens * model.experts_top_k
    each, places = pairs / model.num_experts, pairs
    if capacity is not None:
        each = min(each, ways * plan.local_tokens(capacity))
        places = model.num_experts * min(plan.microbatch_size * capacity, tokens) if ways > 1 else pairs
    return blocks_of(places, model.num_experts, ways, each)


def blocks_of(places: int, experts: int, ways: int, each: float | None = None) -> ExpertBlocks:
    """Returns a rank's blocks of an equal load.

    Args:
      places: for pairs of a token and an expert that all ranks with the experts of a layer read.
      experts: of a layer.
      ways: expert parallel degree.
      each: pairs of an expert; its share of the places when None.
    """
    # A power of two, as `Blocks.rows` of the kernel: the formula must not have blocks that the program does not.
    share = places // (experts * BLOCKS_OF_AN_EXPERT)
    rows = min(max(1 << max(share.bit_length() - 1, 0), SHORTEST), LONGEST)
    return ExpertBlocks(rows, experts // ways * math.ceil((places / experts if each is None else each) / rows))


def block_copies(stack: Stack, model: Model, plan: Plan) -> list[Copy]:
    """Returns what the blocks of one layer and microbatch copy, forward and backward, on the rank with most."""
    part = next((part for part in stack.parts if isinstance(part, Experts)), None)
    if part is None:
        return []
    blocks, c, here = expert_blocks(model, plan), plan.element_bytes, part.count // plan.mesh.expert
    # All ranks wait for the one with the most blocks.
    times, inner = plan.expert_imbalance * blocks.number, part.inner / plan.mesh.model
    up, down = part.hidden * part.inputs * inner, inner * part.hidden
    read = plan.mesh.expert * plan.local_tokens(part.tokens) * part.hidden
    several, small = here > 1, 7
    found = []
    if several:
        found += [Copy(BLOCKS, 2 * c * up, 2 * times), Copy(BLOCKS, 2 * c * down, 2 * times)]
        small = 19 + 2 * 4 * here.bit_length()
    return [
        *found,
        Copy(BLOCKS, (8 + c) * up, times),
        Copy(BLOCKS, (12 if several else 4) * down, times),
        Copy(BLOCKS, 9 * part.hidden * blocks.rows, 4 * times),
        Copy(BLOCKS, 18 * inner * blocks.rows, times),
        Copy(BLOCKS, 0, small * times),
        Copy(BLOCKS, 5 * read, 4),
        Copy(BLOCKS, 4 * here * (up + down)),
    ]
