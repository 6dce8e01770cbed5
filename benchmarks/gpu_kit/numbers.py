"""Losses and gradients against float32 on the CPU, float16 with an overflow, and determinism of a step.

The rounding error of bfloat16 is measured, not assumed: the unit of most limits is the error of the same bfloat16
program on the CPU.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu_kit.child import Child, next_tokens
from mtjax import config as configs
from mtjax.config import Config
from mtjax.layout.mesh import parse_mesh
from mtjax.sharding.device_mesh import make_mesh
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import TrainStep, make_train_step

Tree = Any
FULL_PRECISION = 1e-4
"""Limit of the relative error of float32 gradients with full-precision matrix products."""
TWICE = 2.0
"""Limit of the error of bfloat16 on the GPU, relative to that of bfloat16 on the CPU."""
OVERFLOWING = 2.0**45
"""A loss scale at which float16 gradients overflow."""


@dataclass(frozen=True)
class Case:
    """A configuration to compute gradients on the GPU."""

    name: str
    fields: dict[str, Any]
    limit: float | None = None
    """Limit of the relative error; None is twice the error of bfloat16 on the CPU."""
    highest: bool = False
    """Whether float32 matrix products are computed in float32 instead of TF32."""
    families: tuple[str, ...] = ("gpt", "llama")


CASES = (
    Case("float32, full precision", {"compute_dtype": "float32"}, FULL_PRECISION, highest=True),
    Case("bfloat16, cuDNN's attention", {"compute_dtype": "bfloat16", "attention": "cudnn"}),
    Case("bfloat16, XLA's attention", {"compute_dtype": "bfloat16", "attention": "xla"}),
    Case("float32, TF32 products", {"compute_dtype": "float32"}, families=("gpt",)),
    Case("float16, loss scaled", {"compute_dtype": "float16", "attention": "cudnn"}, families=("gpt",)),
)
_GPT = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "sequence_length": 256, "vocab_size": 1000}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": _GPT,
    "llama": _GPT | {"family": "llama", "num_kv_heads": 2, "mlp_size": 512, "vocab_multiple": 128},
}
_SMALLER = {"hidden_size": 64, "sequence_length": 32}


def run(child: Child) -> dict[str, Any]:
    """Returns each case's relative error and limit, the two other checks, and `ok` if all hold."""
    smaller = _SMALLER if child.rehearse else {}
    families = {"gpt": FAMILIES["gpt"]} if child.rehearse else FAMILIES
    small = FAMILIES["gpt"] | smaller
    found: dict[str, Any] = {"cases": []}
    with ThreadPoolExecutor(1 if child.rehearse else 2 + len(families)) as pool:  # most of the time is compilation
        checks = {name: pool.submit(check, small) for name, check in _CHECKS.items()}
        for rows in pool.map(lambda item: compare(item[0], item[1] | smaller), families.items()):
            found["cases"] += rows
            child.answer(found)
        for name, check in checks.items():
            found[name] = check.result()
            child.answer(found)
    found["ok"] = all(each["ok"] for each in (*found["cases"], *(found[name] for name in checks)))
    return found


def config_of(fields: dict[str, Any]) -> Config:
    """Returns the config of a small model without dropout on one device."""
    settings = {
        "mesh": "1x1",
        "global_batch_size": 4,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "warmup_steps": 1,
    }
    return configs.replace(Config(), **(settings | fields))


def program_on(device: Any, config: Config) -> TrainStep:
    """Builds the program of a config on one device."""
    return make_train_step(config, make_mesh(parse_mesh("1x1"), [device]))


def gradients(program: TrainStep, parameters: Tree, scale: float | None = None) -> tuple[float, Tree]:
    """Computes loss and gradients of a batch, and copies them to the host."""
    size = program.config.training.global_batch_size
    batch = global_batch(program.batch_sharding, next_tokens(program.config, 0), size)
    on_device = jax.device_put(parameters, program.parameter_sharding)
    factor = None if scale is None else jnp.float32(scale)
    loss, _, found = program.on_mesh(jax.jit(lambda p, b: program.gradients(p, b, None, factor)), on_device, batch)
    return float(loss), jax.device_get(found)


def distance(ours: Tree, theirs: Tree) -> float:
    """Returns the norm of the difference over the norm of `theirs`, in float64; infinity if it is not finite."""
    pairs = list(zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True))
    difference = sum(float(np.sum((np.float64(a) - np.float64(b)) ** 2)) for a, b in pairs)
    reference = sum(float(np.sum(np.float64(b) ** 2)) for _, b in pairs)
    return float(np.sqrt(difference / reference)) if np.isfinite(difference) else float("inf")


def compare(family: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Compares all cases of a family with float32 on the CPU, and cuDNN's attention with XLA's."""
    cpu, gpu = jax.devices("cpu")[0], jax.devices()[0]
    reference = program_on(cpu, config_of(fields | {"compute_dtype": "float32"}))
    parameters = jax.device_get(reference.initialize(0).parameters)
    loss, exact = gradients(reference, parameters)
    rounded = program_on(cpu, config_of(fields | {"compute_dtype": "bfloat16"}))
    unit = distance(gradients(rounded, parameters)[1], exact)
    rows, of = [], {}
    for case in (c for c in CASES if family in c.families):
        with jax.default_matmul_precision("highest") if case.highest else nullcontext():
            program = program_on(gpu, config_of(fields | case.fields))
            scale = 4096.0 if case.fields["compute_dtype"] == "float16" else None
            their_loss, of[case.name] = gradients(program, parameters, scale)
        limit = TWICE * unit if case.limit is None else case.limit
        row = _row(family, case.name, distance(of[case.name], exact), limit)
        rows.append(row | {"loss": their_loss, "loss_on_the_cpu": loss, "attention": program.config.model.attention})
    difference = distance(of[CASES[1].name], of[CASES[2].name])
    rows.append(_row(family, "cuDNN's attention beside XLA's", difference, TWICE * unit))
    return rows


def _row(family: str, name: str, error: float, limit: float) -> dict[str, Any]:
    return {"family": family, "case": name, "error": error, "limit": limit, "ok": error <= limit}


def overflow(fields: dict[str, Any]) -> dict[str, Any]:
    """Trains float16 from a too large loss scale: overflowing steps must change nothing and halve it."""
    changes = {"compute_dtype": "float16", "initial_loss_scale": OVERFLOWING, "hysteresis": 1}
    program = program_on(jax.devices()[0], config_of(fields | changes))
    state = program.initialize(0)
    before = jax.device_get(state.parameters)
    batch = global_batch(program.batch_sharding, next_tokens(program.config, 0), 4)
    skipped, scale, losses, unchanged = 0, 0.0, [], True
    for _ in range(60):
        state, metrics = program.step(state, batch)
        scale = float(metrics["loss_scale"])
        if float(metrics["skipped"]):
            skipped += 1
            unchanged = unchanged and same(before, jax.device_get(state.parameters))
        else:
            losses.append(float(metrics["loss"]))
        if len(losses) == 6:
            break
    falls = len(losses) == 6 and losses[-1] < losses[0]
    halved = scale == OVERFLOWING / 2**skipped
    ok = skipped > 0 and unchanged and halved and falls
    return {"ok": ok, "skipped": skipped, "unchanged": unchanged, "scale": scale, "halved": halved, "losses": losses}


def deterministic(fields: dict[str, Any]) -> dict[str, Any]:
    """Runs three steps with dropout twice; with `deterministic`, the states must be bit-identical."""
    changes = {"deterministic": True, "hidden_dropout": 0.1, "attention_dropout": 0.1, "compute_dtype": "bfloat16"}
    program = program_on(jax.devices()[0], config_of(fields | changes))
    ends = []
    for _ in range(2):
        state = program.initialize(0)
        for number in range(3):
            batch = global_batch(program.batch_sharding, next_tokens(program.config, number), 4)
            state, _ = program.step(state, batch)
        ends.append(jax.device_get(state))
    return {"ok": same(*ends), "xla_options": program.xla.options}


def same(a: Tree, b: Tree) -> bool:
    """Returns whether two trees are bit-identical."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


_CHECKS = {"overflow": overflow, "deterministic": deterministic}
