"""Which stacks of layers run without a loop.

A loop over layers is compiled once for all of them, and pays for it in every step: what a layer keeps for its backward
pass is written into a stack, and copied out of it again. Without a loop that is gone; the program is as many times as
long, and so is its compilation.
"""

from mtjax.config import Config
from mtjax.config.setting import LAYERS
from mtjax.theory.counts import stage_counts
from mtjax.theory.families.registry import anatomy_of
from mtjax.theory.memory import stage_memory
from mtjax.theory.mesh import MeshShape
from mtjax.theory.plans import Plan

MOST = 64
"""Layers of a stack that `auto` compiles one by one."""
APART_BYTES = 2 + 4
"""Bytes per parameter of the layers that a step without loops needs beside those of one with loops: matrices in the
compute type, and gradients layer by layer while they are put together."""


def unrolled_layers(config: Config, mesh: MeshShape, platform: str) -> int:
    """The most layers of a stack that run without a loop; 0 where all stacks have loops.

    `auto` unrolls on GPUs, where the loop's copies take a good part of a step, stacks of up to `MOST` layers. But not
    where that would need more memory: what the layers keep is gone when their gradients are put together, and where it
    is less than these need - with full recompute - the loop stays.

    Whatever is asked, loops stay on the stages of a pipeline, where what a layer keeps waits in slots, and in models of
    two stacks with split sequences, where XLA would merge sums of an embedding and of the first layer.
    """
    asked, anatomy = config.training.unroll_layers, anatomy_of(config.model)
    several = config.parallel.sequence_parallel and len(anatomy.stacks) > 1
    if mesh.has_stages or several or asked == "none":
        return 0
    if asked != "auto":
        return LAYERS if asked == "all" else int(asked)
    if platform not in ("gpu", "cuda"):
        return 0
    plan = Plan.of(config, mesh)
    kept, apart = stage_memory(anatomy, plan).kept, APART_BYTES * stage_counts(anatomy, plan).in_layers
    return MOST if kept >= apart else 0
