"""Cost of dropout: the fused Threefry generator against `jax.random.bernoulli`, on the arrays of a GPT-2 layer.

    python benchmarks/dropout.py

Measures CPU seconds rather than wall-clock time, which depends on other load on the machine. The result, with hardware,
versions and date, goes to benchmarks/results/dropout-DEVICE.json.
"""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import Array
from train_step import processor

from mtjax.layout.layouts import TENSOR
from mtjax.layout.mesh import parse_mesh
from mtjax.models.ops import dropout
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.axes import use_rules

RATE = 0.1
REPEATS = 9
ARRAYS = {
    "scores": ((4, 12, 256, 256), ("batch", "heads", "seq", "seq")),
    "stream": ((4, 256, 768), ("batch", "act_seq", "embed")),
}


def ours(x: Array, keys: Array, names: tuple[str, ...]) -> Array:
    with use_rules(TENSOR.rules):
        return dropout(x, RATE, keys, 0, names)


def theirs(x: Array, keys: Array, names: tuple[str, ...]) -> Array:
    del names
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - RATE, x.shape[1:]))(keys)
    return jnp.where(keep, x / (1 - RATE), 0)


def cpu_seconds(function: Callable[[], Array]) -> float:
    """Returns the median CPU seconds over repeats, after a warm-up call that compiles."""
    function().block_until_ready()
    taken = []
    for _ in range(REPEATS):
        start = time.process_time()
        function().block_until_ready()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    rows = []
    with jax.set_mesh(attach_devices(parse_mesh("1x1"))):
        for name, (shape, names) in ARRAYS.items():
            x, keys = jnp.ones(shape), jax.random.split(jax.random.key(0), shape[0])
            for side in (ours, theirs):
                compiled = jax.jit(side, static_argnums=2)
                seconds = cpu_seconds(lambda compiled=compiled, x=x, keys=keys, names=names: compiled(x, keys, names))
                rows.append({"array": name, "side": side.__name__, "nanoseconds_per_element": seconds * 1e9 / x.size})
                print(rows[-1])
    device = jax.devices()[0].device_kind
    about = {"date": datetime.date.today().isoformat(), "processor": processor(), "python": platform.python_version()}
    path = Path(__file__).parent / "results" / f"dropout-{device.replace(' ', '-')}.json"
    path.write_text(json.dumps({**about, "jax": version("jax"), "rows": rows}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
