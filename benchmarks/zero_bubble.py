"""Cost of splitting the backward pass of a pipeline chunk in two, as zero-bubble schedules do.

    python benchmarks/zero_bubble.py [--turns 9] [--out FILE.json]

Zero-bubble schedules (arXiv 2401.10241) compute the gradient of a chunk's input first, which the previous stage waits
for, and that of its weights when the stage is idle. Each is then a separate program, and both need the cotangent of
every layer's output. This compiles them for one CPU device, counts the FLOPs of their matrix products, and times them,
next to the joint program: for a chunk that is recomputed from its input (full recompute), and for one with saved
residuals. Last, only the products of the weight gradients: the deferred work if all cotangents were saved as well. The
effect on a step follows from the formula of `schedules.lock_step`.

Programs alternate; CPU seconds are medians. The results, with hardware, versions and date, go to
benchmarks/results/zero_bubble-cpu.json.
"""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import NamedSharding
from rich.console import Console
from rich.table import Table
from schedules import Costs, lock_step
from train_step import processor

from mtjax import config
from mtjax.inspect import hlo
from mtjax.inspect.products import count_flops
from mtjax.layout.mesh import parse_mesh
from mtjax.models.layer_context import RESIDUAL, LayerContext
from mtjax.models.sharded_model import ShardedModel
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.axes import spec, use_rules

LAYERS, HIDDEN, SEQUENCE, BATCH = 2, 512, 512, 2
MODEL: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_heads": 8,
    "sequence_length": SEQUENCE,
    "vocab_size": 512,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "compute_dtype": "float32",
    "global_batch_size": BATCH,
    "recompute": "none",
}
COMPARED = ((4, 8), (8, 32), (8, 128), (16, 64))
"""Numbers of stages and microbatches."""

Tree = Any
Program = tuple[Any, tuple[Tree, ...]]
"""A compiled program and its arguments."""


def programs() -> dict[str, Program]:
    """Compiles all programs, by name."""
    placed = ShardedModel(config.replace(config.Config(), **MODEL), attach_devices(parse_mesh("1x1")))
    ((section,),) = placed.sections
    parameters = placed.on_mesh(jax.jit(placed.draw), jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 2)

    def chunk(layers: Tree, x: jax.Array) -> jax.Array:
        return placed.model({**parameters, section: layers}).sections[section].stack.over_layers(LayerContext())(x)[0]

    def both(layers: Tree, x: jax.Array, g: jax.Array) -> Tree:
        return jax.vjp(chunk, layers, x)[1](g)

    with jax.set_mesh(placed.mesh), use_rules(placed.layout.rules):
        sharding = NamedSharding(placed.mesh, spec(*RESIDUAL))
        x, g = (jax.device_put(jax.random.normal(key, (BATCH, SEQUENCE, HIDDEN)), sharding) for key in keys)
        layers_of_chunk = parameters[section]
        vjp_function = jax.jit(lambda layers, x: jax.vjp(chunk, layers, x)[1])(layers_of_chunk, x)
        apply_vjp: Callable[[Any, jax.Array], Tree] = lambda vjp_function, g: vjp_function(g)  # noqa: E731
        recomputed, saved = (layers_of_chunk, x, g), (vjp_function, g)
        functions: dict[str, tuple[Callable[..., Tree], tuple[Tree, ...]]] = {
            "forward": (chunk, (layers_of_chunk, x)),
            "recomputed: both": (both, recomputed),
            "recomputed: input": (lambda *a: both(*a)[1], recomputed),
            "recomputed: weights": (lambda *a: both(*a)[0], recomputed),
            "kept: both": (apply_vjp, saved),
            "kept: input": (lambda *a: apply_vjp(*a)[1], saved),
            "kept: weights": (lambda *a: apply_vjp(*a)[0], saved),
            "cotangents kept: weights": (weight_products, product_operands(np.asarray(x))),
        }
        return {name: (jax.jit(f).lower(*a).compile(), a) for name, (f, a) in functions.items()}


def product_operands(x: np.ndarray) -> tuple[Tree, Tree]:
    """Returns inputs and output cotangents of the four matrix products of all layers."""
    widths = {"qkv": (1, 3), "projection": (1, 1), "up": (1, 4), "down": (4, 1)}
    inputs = {name: np.stack([np.tile(x, (1, 1, before))] * LAYERS) for name, (before, _) in widths.items()}
    cotangents = {name: np.stack([np.tile(x, (1, 1, behind))] * LAYERS) for name, (_, behind) in widths.items()}
    return inputs, cotangents


def weight_products(inputs: Tree, cotangents: Tree) -> Tree:
    """Computes all weight gradients."""
    return jax.tree.map(lambda a, g: jnp.einsum("lbsi,lbso->lio", a, g), inputs, cotangents)


def measure(found: dict[str, Program], turns: int) -> dict[str, dict[str, float]]:
    """Returns FLOPs of matrix products, CPU seconds, and bytes of arguments of each program."""
    taken: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(turns + 1):
        for name, (program, arguments) in found.items():
            start = time.process_time()
            jax.block_until_ready(program(*arguments))
            taken[name].append(time.process_time() - start)
    return {
        name: {
            "flops": float(count_flops(hlo.parse(program.as_text()))),
            "cpu_seconds": statistics.median(taken[name][1:]),
            "argument_bytes": program.memory_analysis().argument_size_in_bytes,
        }
        for name, (program, _) in found.items()
    }


def costs_of(rows: dict[str, dict[str, float]], measure: str) -> dict[str, tuple[Costs, float]]:
    """Returns, for each kind of split, its costs and the joint backward pass's, in units of a forward pass."""
    unit = {name: row[measure] / rows["forward"][measure] for name, row in rows.items()}
    splits = {
        "recomputed twice": ("recomputed: both", "recomputed: input", "recomputed: weights"),
        "residuals kept": ("kept: both", "kept: input", "kept: weights"),
        "residuals and cotangents kept": ("kept: both", "kept: input", "cotangents kept: weights"),
    }
    return {
        name: (Costs(forward=1, input_gradient=unit[first], weights_alone=unit[second]), unit[joint])
        for name, (joint, first, second) in splits.items()
    }


def show(rows: dict[str, dict[str, float]], steps: list[dict[str, Any]], console: Console) -> None:
    """Prints both tables."""
    table = Table("program", "FLOPs / forward", "CPU s / forward", "MB of arguments")
    for name, row in rows.items():
        forward = rows["forward"]
        shares = [f"{row[key] / forward[key]:.2f}" for key in ("flops", "cpu_seconds")]
        table.add_row(name, *shares, f"{row['argument_bytes'] / 1e6:.1f}")
    console.print(table)
    table = Table("split", "counted in", "stages", "microbatches", "ZB-H1 in lockstep against 1F1B")
    for step in steps:
        what = (step["split"], step["measure"], str(step["stages"]), str(step["microbatches"]))
        table.add_row(*what, f"{step['change']:+.1%}")
    console.print(table)


def main(turns: int = 9, out: Path = Path(__file__).parent / "results" / "zero_bubble-cpu.json") -> None:
    """Measures, prints and writes."""
    console = Console(width=140)
    rows = measure(programs(), turns)
    steps = []
    for key in ("flops", "cpu_seconds"):
        for split, (costs, joint) in costs_of(rows, key).items():
            for stages, microbatches in COMPARED:
                base = (microbatches + stages - 1) * (costs.forward + joint)
                change = lock_step(stages, microbatches, costs) / base - 1
                row = {"split": split, "measure": key, "stages": stages, "microbatches": microbatches}
                steps.append({**row, "change": change})
    show(rows, steps, console)
    facts = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("jax", "jaxlib")},
        "model": MODEL,
        "turns": turns,
    }
    out.write_text(json.dumps({**facts, "programs": rows, "steps": steps}, indent=1) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    tyro.cli(main)
