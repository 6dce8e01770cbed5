"""What experts' products cost beyond their FLOPs: mtjax computes them in a loop over blocks of one expert's tokens.

The kernels of a block (`mtjax.models.kernels.grouped`) were read off programs compiled for H100, as those of
`mtjax.analysis.copies`; none is fitted.
"""

import math
from typing import NamedTuple

from mtjax.analysis.anatomy import StackParts
from mtjax.analysis.copies import Copy
from mtjax.analysis.parts.experts import ExpertsPart
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
    # A rank's experts get the tokens of all expert parallel ranks, and with equal loads each expert the same number.
    pairs = ways * tokens * model.experts_top_k
    each, rows_of_pairs = pairs / model.num_experts, pairs
    if capacity is not None:
        each = min(each, ways * plan.local_tokens(capacity))
        rows_of_pairs = model.num_experts * min(plan.microbatch_size * capacity, tokens) if ways > 1 else pairs
    return blocks_of(rows_of_pairs, model.num_experts, ways, each)


def blocks_of(rows_of_pairs: int, experts: int, ways: int, each: float | None = None) -> ExpertBlocks:
    """Returns a rank's blocks of an equal load.

    Args:
      rows_of_pairs: rows for pairs of a token and an expert that all ranks with the experts of a layer read.
      experts: of a layer.
      ways: expert parallel degree.
      each: pairs of an expert; its share of the rows when None.
    """
    # A power of two, as `Blocks.rows` of the kernel: the formula must not have blocks that the program does not.
    share = rows_of_pairs // (experts * BLOCKS_OF_AN_EXPERT)
    rows = min(max(1 << max(share.bit_length() - 1, 0), SHORTEST), LONGEST)
    return ExpertBlocks(rows, experts // ways * math.ceil((rows_of_pairs / experts if each is None else each) / rows))


def block_copies(stack: StackParts, model: Model, plan: Plan) -> list[Copy]:
    """Returns what the blocks of one layer and microbatch copy, forward and backward, on the rank with most."""
    part = next((part for part in stack.parts if isinstance(part, ExpertsPart)), None)
    if part is None:
        return []
    blocks, c, here = expert_blocks(model, plan), plan.element_bytes, part.count // plan.mesh.expert
    # All ranks wait for the one with the most blocks.
    times, inner = plan.expert_imbalance * blocks.number, part.inner / plan.mesh.model
    # Elements of an expert's matrices into and out of the inner width, and of the tokens that a rank reads.
    up, down = part.hidden * part.inputs * inner, inner * part.hidden
    read = plan.mesh.expert * plan.local_tokens(part.tokens) * part.hidden
    several, small = here > 1, 7
    found = []
    if several:
        # Matrices of the block's expert are sliced out of the stack, forward and backward; a binary search, of 4
        # kernels in each step, finds the expert.
        found += [Copy(BLOCKS, 2 * c * up, 2 * times), Copy(BLOCKS, 2 * c * down, 2 * times)]
        small = 19 + 2 * 4 * here.bit_length()
    return [
        *found,
        # Gradients are added to sums in float32, 8 bytes; the product adds those of the second matrix of a single
        # expert itself.
        Copy(BLOCKS, (8 + c) * up, times),
        Copy(BLOCKS, (12 if several else 4) * down, times),
        # Tokens are gathered and added up again: 16 bytes an element forward and 20 backward.
        Copy(BLOCKS, 9 * part.hidden * blocks.rows, 4 * times),
        # The activation's backward pass, beyond what `mtjax.analysis.kernels` counts.
        Copy(BLOCKS, 18 * inner * blocks.rows, times),
        # Kernels that take no longer than a launch.
        Copy(BLOCKS, 0, small * times),
        # Once for all blocks: sums of tokens are zeros in float32, and cast, and sums of gradients are zeros.
        Copy(BLOCKS, 5 * read, 4),
        Copy(BLOCKS, 4 * here * (up + down)),
    ]
