"""How long a collective takes: NCCL's own model, of latencies by step and of the bandwidth that its protocols reach.

A ring sends an array around in pieces, 2(n-1) steps for an all-reduce; a tree, for all-reduces alone, goes up and down
again. Each runs in a protocol: *simple* moves large arrays at all of the bandwidth but is slow to start, *LL128* loses
a fifteenth and starts sooner. NCCL takes what it thinks is the fastest, and so do we. Read off `src/graph/tuning.cc`
of NCCL 2.9 (github.com/NVIDIA/nccl), which its authors fitted to V100 and A100 servers.
"""

import math
from dataclasses import dataclass

from mtjax.theory.traffic import ring_factor


@dataclass(frozen=True)
class Way:
    """An algorithm in a protocol."""

    start: float
    """In steps of a simple ring over NVLink, 3.4 us, like the next."""
    link: float
    """A step over NVLink."""
    network: float
    """A step between servers, in those of a simple ring there, 9.6 us."""
    share: float
    """Of the bandwidth."""
    is_tree: bool = False


WAYS = (
    Way(8.4 / 3.4, 1.0, 1.0, 1.0),
    Way(10.0 / 3.4, 1.9 / 3.4, 4.0 / 9.6, 0.92),
    Way(4.4 / 3.4, 1.2 / 3.4, 8.5 / 9.6, 0.92 * 7 / 9 * 0.9, is_tree=True),
)
"""A ring in simple and in LL128, a tree in LL128. The tree's bandwidth on one server holds everywhere."""


def collective_seconds(
    operation: str, size: float, ways: int, inside: int, bandwidth: float, link_step: float, network_step: float
) -> float:
    """Seconds of one collective, or of a send.

    Args:
      operation: its kind; `send` and `collective-permute` go one step.
      size: bytes of the full array.
      ways: members of a group.
      inside: of them that share a server.
      bandwidth: bytes per second of a member, of the slowest link that it crosses.
      link_step: seconds of a step of a simple ring inside a server.
      network_step: the same between servers.
    """
    if ways <= 1:
        return 0.0
    moving = size * ring_factor(operation, ways) / bandwidth
    servers = math.ceil(ways / inside)
    if operation in ("send", "collective-permute"):
        return moving + (network_step if servers > 1 else link_step)
    rounds = 2 if operation == "all-reduce" else 1
    times = []
    for way in WAYS:
        if way.is_tree and operation != "all-reduce":
            continue
        between = math.ceil(math.log2(servers)) if way.is_tree else servers - 1
        near = inside - 1 if way.is_tree else ways - servers
        steps = near * way.link * link_step + between * way.network * network_step
        times.append(way.start * link_step + rounds * steps + moving / way.share)
    return min(times)
