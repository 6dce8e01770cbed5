"""The meshes that the planner proposes in place of one of data, pipeline and tensor parallelism."""

import math
from collections.abc import Iterator
from dataclasses import replace

from mtjax.config.sizes import divisors
from mtjax.layout.mesh import MeshShape

LEAST_SHARED = 4096
"""Least tokens of a sample per context parallel rank on meshes that mtjax proposes: fewer meshes to search, and enough
attention for ring steps to overlap with their communication."""


def meshes_within(mesh: MeshShape, experts: int, tokens: int) -> Iterator[MeshShape]:
    """Yields a mesh and the meshes that use some of its data parallelism for expert or context parallelism.

    Args:
      mesh: of data, pipeline and tensor parallelism.
      experts: of a layer; 0 allows no expert parallelism.
      tokens: of a sample; short ones allow no context parallelism.
    """
    for context in context_degrees(tokens):
        # Expert and context parallel ranks are taken from data parallelism: the number of devices stays.
        data, remainder = divmod(mesh.data, context)
        for degree in divisors(math.gcd(data, experts or 1)) if not remainder else ():
            yield replace(mesh, data=data // degree, context=context, expert=degree)


def with_groups(mesh: MeshShape, gpus: int, width: int) -> Iterator[MeshShape]:
    """Yields the meshes that use some of a mesh's data parallelism for sharding groups.

    Groups are servers of `gpus` GPUs, or where ZeRO would not divide a model of this width over all ranks, also twice,
    four times, ... as large.
    """
    inside, group = mesh.context * mesh.expert * mesh.model, gpus
    # Up to all ranks: a group of all of them divides nothing.
    while group < mesh.data * inside:
        shard, remainder = divmod(group, inside)
        if not remainder and shard > 1 and mesh.data % shard == 0:
            yield replace(mesh, data=mesh.data // shard, shard=shard)
        # Larger groups send as much over the network as no groups: they are for widths that ZeRO can't divide.
        if mesh.divides(width):
            return
        group *= 2


def context_degrees(tokens: int) -> list[int]:
    """Returns the context parallel degrees that mtjax proposes for samples of `tokens`; 1 first."""
    return divisors(tokens // LEAST_SHARED or 1)
