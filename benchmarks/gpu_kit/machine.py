"""The machine, and the peak speed of its GPU: matrix products and copies."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from gpu_kit.child import Child
from gpu_kit.clock import seconds_of

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "flax", "optax", "torch", "triton", "numpy")
SIDES = (4096, 8192, 16384)
"""Sizes of square matrix products."""
_QUERY = "name,driver_version,memory.total,clocks.max.sm,power.limit"


def run(child: Child) -> dict[str, Any]:
    """Returns facts of the machine, TFLOP/s of the fastest matrix product by dtype, and GB/s of a copy.

    Raises:
      UserError: jax finds no GPU.
    """
    import jax

    from mtjax.analysis.hardware import by_device_kind
    from mtjax.errors import UserError

    device = jax.devices()[0]
    if device.platform == "cpu" and not child.rehearse:
        raise UserError(f"jax {version('jax')} finds no GPU: pip install 'jax[cuda13]=={version('jax')}'")
    gpu = by_device_kind(device.device_kind)
    stats = device.memory_stats() or {}
    found: dict[str, Any] = {
        "device": device.device_kind,
        "devices": len(jax.devices()),
        "memory": gpu.memory if gpu else stats.get("bytes_limit", 0),
        "target": gpu.name if gpu else None,
        "peak_tflops": gpu.peak_flops("bfloat16") / 1e12 if gpu else None,
        "bandwidth_gb": gpu.bandwidth / 1e9 if gpu else None,
        "sustained_assumed": gpu.sustained_products if gpu else None,
        "nvidia_smi": ask_driver(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": {name: v for name in PACKAGES if (v := _version(name))},
    }
    child.answer(found)
    found["products"] = {}
    for dtype in ("bfloat16", "float16", "float32"):
        sides = (64,) if child.rehearse else SIDES if dtype == "bfloat16" else SIDES[1:2]
        rates = {side: product_rate(side, dtype) for side in sides}
        found["products"][dtype] = {"best": max(rates.values()), "by_side": rates}
        child.answer(found)
    found["copy_gb"] = copy_rate(2**20 if child.rehearse else 2**32)
    return found


def product_rate(side: int, dtype: str) -> float:
    """Returns TFLOP/s of a square matrix product, accumulated in float32; for float32 with jax's default precision."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.dtype(dtype)) for i in range(2))
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(a.dtype))
    return 2 * side**3 / _seconds(multiply, a, b) / 1e12


def copy_rate(size: int) -> float:
    """Returns GB/s of reading and writing `size` bytes."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
    return 2 * size / _seconds(jax.jit(lambda a: a * 1.5), a) / 1e9


def _seconds(function: Any, *arrays: Any) -> float:
    result: list[Any] = [None]

    def do() -> None:
        result[0] = function(*arrays)

    return seconds_of(do, lambda: result[0].block_until_ready())["seconds"]


def ask_driver() -> list[str]:
    """Returns nvidia-smi's line for each GPU; an empty list without nvidia-smi."""
    try:
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"]
        return (
            subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip().splitlines()
        )
    except (OSError, subprocess.SubprocessError):
        return []


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
