"""How many warps of a kernel an SM holds at a time: limited by registers, shared memory, and the GPU's own limits.

Source: CUDA C++ Programming Guide 13, table "Technical Specifications per Compute Capability", columns 8.0, 9.0 and
10.0; registers are allocated to warps in units of 256.
"""

from mtjax.analysis.hardware import Gpu

WARPS, BLOCKS, REGISTERS = 64, 32, 65_536
_UNIT, _RESERVED = 256, 1024
"""Registers that are allocated together; bytes of shared memory that the system takes of each block."""


def blocks_at_a_time(gpu: Gpu, threads: int, registers: int, shared: int) -> int:
    """Returns the blocks that an SM holds at a time, at least 1.

    Args:
      gpu: the GPU.
      threads: of a block.
      registers: of a thread.
      shared: bytes of shared memory of a block.
    """
    warps = -(-threads // 32)
    of_warp = -(-max(registers, 1) * 32 // _UNIT) * _UNIT
    by_registers = REGISTERS // of_warp // warps
    by_memory = gpu.shared_memory // (shared + _RESERVED)
    return max(1, min(WARPS // warps, BLOCKS, by_registers, by_memory))


def occupancy(gpu: Gpu, threads: int, registers: int, shared: int) -> float:
    """Returns the share of an SM's warps that are in use."""
    return blocks_at_a_time(gpu, threads, registers, shared) * -(-threads // 32) / WARPS
