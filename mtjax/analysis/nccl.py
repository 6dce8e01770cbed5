"""Time of a collective: NCCL's tuning model, of latencies per step and the bandwidth of its protocols.

A ring needs 2(n-1) steps for an all-reduce; a tree, used for all-reduces only, reduces upwards and broadcasts
downwards. Each runs in a protocol: *simple* has the full bandwidth and a high latency, *LL128* a fifteenth less
bandwidth and a lower latency. As NCCL does, the model chooses the fastest. From `src/graph/tuning.cc` of NCCL 2.9
(github.com/NVIDIA/nccl), fitted by its authors to V100 and A100 servers.
"""

import math
from dataclasses import dataclass

from mtjax.analysis.traffic import RING_PASSES, ring_factor


@dataclass(frozen=True)
class Algorithm:
    """A ring or a tree in a protocol."""

    start: float
    """Latency of its start, in steps of a simple ring over NVLink (3.4 us)."""
    link: float
    """Latency of a step over NVLink, in the same unit."""
    network: float
    """Latency of a step between servers, in steps of a simple ring there (9.6 us)."""
    share: float
    """Share of the bandwidth."""
    is_tree: bool = False


ALGORITHMS = (
    Algorithm(8.4 / 3.4, 1.0, 1.0, 1.0),
    Algorithm(10.0 / 3.4, 1.9 / 3.4, 4.0 / 9.6, 0.92),
    Algorithm(4.4 / 3.4, 1.2 / 3.4, 8.5 / 9.6, 0.92 * 7 / 9 * 0.9, is_tree=True),
)
"""A ring in simple and in LL128, a tree in LL128. The tree's bandwidth is that inside one server."""


def collective_seconds(
    operation: str, size: float, ranks: int, inside: int, bandwidth: float, link_step: float, network_step: float
) -> float:
    """Returns the seconds of one collective or send.

    Args:
      operation: its kind; one that is point to point has one step.
      size: bytes of the full array.
      ranks: of a group.
      inside: ranks of a group that share a server.
      bandwidth: bytes per second of a rank, over the slowest link that it crosses.
      link_step: seconds of a step of a simple ring inside a server.
      network_step: seconds of a step of a simple ring between servers.
    """
    if ranks <= 1:
        return 0.0
    moving = size * ring_factor(operation, ranks) / bandwidth
    servers = math.ceil(ranks / inside)
    passes = RING_PASSES.get(operation, 0)
    if not passes:
        return moving + (network_step if servers > 1 else link_step)
    times = []
    for algorithm in ALGORITHMS:
        if algorithm.is_tree and operation != "all-reduce":
            continue
        network_steps = math.ceil(math.log2(servers)) if algorithm.is_tree else servers - 1
        link_steps = inside - 1 if algorithm.is_tree else ranks - servers
        steps = link_steps * algorithm.link * link_step + network_steps * algorithm.network * network_step
        times.append(algorithm.start * link_step + passes * steps + moving / algorithm.share)
    return min(times)
