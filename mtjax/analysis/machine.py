"""Times of kernels and collectives on a kind of server.

`Constants` come from public measurements of the parts, and one of them, `training`, from ten published training runs on
A100; they are the same for every GPU, model and mesh, and none is set to meet the published points that the planner
predicts.
"""

import math
from dataclasses import dataclass

from mtjax.analysis.hardware import Server
from mtjax.analysis.nccl import collective_seconds
from mtjax.analysis.traffic import Transfer


@dataclass(frozen=True)
class Constants:
    """Shares of nominal speeds that are sustained."""

    memory: float = 0.9
    """Of memory bandwidth: STREAM-like kernels reach 90-93% on V100, A100 and H100."""
    flash_attention: float = 0.5
    """Of the peak, counting causal FLOPs: FlashAttention-2/3 and cuDNN report 35-75% (arXiv 2307.08691, 2407.08608)."""
    own_attention: float = 0.35
    """Of the peak, of attention in Triton: FlashAttention-2 reaches 35% on H100 (arXiv 2407.08608)."""
    draws: float = 17.0
    """Integer instructions for a random number of 16 bits, by the machine code of a mask (docs/notes/kernels.md)."""
    integers: int = 64
    """Integer instructions that a multiprocessor executes in a clock, from compute capability 8.0 to 10.0."""
    link: float = 0.8
    """Of NVLink: nccl-tests reports 230-240 of 300 GB/s on A100 and 360-370 of 450 GB/s on H100 servers."""
    network: float = 0.9
    """Of InfiniBand, large messages."""
    launch: float = 5e-6
    """Least seconds of a kernel."""
    small_product: float = 13e-6
    """Overhead in seconds of a matmul with less than a wave of tiles: start, end, and the reduction over splits of k.
    The median over the 78 matmuls below 0.2 ms that DeepBench measured on a V100 in 16 bits
    (github.com/baidu-research/DeepBench, results/train/DeepBench_NV_V100.xlsx); larger ones show none."""
    contention: float = 0.189
    """Slowdown of computation that overlaps with a collective: the mean of arXiv 2507.03114 over A100, H100, MI210 and
    MI250, GPT and Llama."""
    training: float = 0.795
    """Speed of kernels in a training run, relative to kernels alone: clocks, launches, shapes that are not ideal."""
    tile: int = 128
    """Rows and columns of a matmul's output tile, which one multiprocessor computes."""


class Machine:
    """Times of kernels and collectives on a kind of server."""

    def __init__(self, server: Server, element_bytes: int = 2, constants: Constants | None = None) -> None:
        self.server, self.gpu, self.constants = server, server.gpu, constants or Constants()
        self.element_bytes = element_bytes
        half = "bfloat16" if "bfloat16" in self.gpu.peak else "float16"
        self.peak = self.gpu.peak_flops("float32" if element_bytes == 4 else half)

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between a GPU and its host's pinned memory, in one direction: of PCIe 3, 4 or 5 x16."""
        # 75 to 86% of the links' 16, 32 and 64 GB/s.
        capability = self.gpu.compute_capability
        return 12e9 if capability < (8, 0) else 24e9 if capability < (9, 0) else 55e9

    def product(
        self, m: float, k: float, n: float, batch: float = 1, *, is_float8: bool = False, is_float32: bool = False
    ) -> float:
        """Returns the seconds of `batch` matmuls [m,k] x [k,n], in 8 bits with a result in 16 if `is_float8`, computed
        in float32 from smaller numbers if `is_float32`.

        The last wave of tiles leaves multiprocessors idle; matmuls of less than one wave are split along k, and have an
        overhead.
        """
        c, waves = self.constants, self._waves(m, n, batch)
        fill = waves / math.ceil(waves) if waves >= 1 else 1.0
        peak = self.gpu.peak_flops("float32") if is_float32 else self.peak
        rate = self.float8_rate if is_float8 else peak * self.gpu.sustained_products
        computing = 2 * m * k * n * batch / (rate * fill)
        read = 1 if is_float8 else self.element_bytes
        moving = batch * (read * (m * k + k * n) + self.element_bytes * m * n)
        return self.overhead(m, n, batch) + max(computing / c.training, self.passes(moving), c.launch)

    def overhead(self, m: float, n: float, batch: float = 1) -> float:
        """Returns the seconds by which `batch` matmuls with outputs [m,n] are longer if they have less than a wave of
        tiles."""
        return self.constants.small_product if self._waves(m, n, batch) < 1 else 0.0

    def _waves(self, m: float, n: float, batch: float) -> float:
        tiles = math.ceil(m / self.constants.tile) * math.ceil(n / self.constants.tile) * batch
        return tiles / self.gpu.multiprocessors

    @property
    def float8_rate(self) -> float:
        """FLOP/s that the best large matmuls in 8-bit floats sustain.

        Raises:
          UserError: the GPU has none, or their rate is not known.
        """
        return self.gpu.peak_flops("float8") * self.gpu.sustained_float8

    def contention(self, hidden: float) -> float:
        """Returns the seconds that computation loses to collectives that overlap with it for `hidden` seconds."""
        # Computation that takes `hidden` seconds beside collectives would take hidden / (1 + contention) alone.
        return hidden * (1 - 1 / (1 + self.constants.contention))

    def passes(self, size: float) -> float:
        """Returns the seconds to move `size` bytes through memory."""
        return size / (self.gpu.bandwidth * self.constants.memory * self.constants.training)

    def kernel(self, size: float) -> float:
        """Returns the seconds of a memory-bound kernel that moves `size` bytes."""
        return max(self.passes(size), self.constants.launch)

    def flash(self, flops: float) -> float:
        """Returns the seconds of a flash-attention kernel that computes `flops`."""
        sustained = self.peak * self.constants.flash_attention * self.constants.training
        return max(flops / sustained, self.constants.launch)

    def own_attention(self, flops: float, draws: float) -> float:
        """Returns the seconds of a kernel of `pallas`, whose matmuls and random numbers take turns.

        Args:
          flops: that it computes.
          draws: random numbers of dropout.
        """
        c = self.constants
        return max(flops / (self.peak * c.own_attention * c.training) + self.drawn(draws), c.launch)

    def drawn(self, count: float) -> float:
        """Returns the seconds of the instructions that draw as many random numbers."""
        c = self.constants
        return count * c.draws / (self.gpu.multiprocessors * self.gpu.clock * 1e9 * c.integers * c.training)

    def transfer(self, entry: Transfer, inside: int) -> float:
        """Returns the seconds of all collectives of `entry` in a step; `inside` of a group's ranks share a server.

        Between servers the rings of a group use the network adapters of all its ranks in a server.
        """
        server, c = self.server, self.constants
        crosses = entry.group_size > inside
        bandwidth = server.link * c.link
        if crosses:
            bandwidth = min(bandwidth, inside * server.network * c.network)
        latencies = server.link_latency, server.network_latency
        each = collective_seconds(entry.operation, entry.size, entry.group_size, inside, bandwidth, *latencies)
        return entry.count * each
