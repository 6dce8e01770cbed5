"""Time that a step waits for a save: 500 MB of state on 8 virtual CPU devices, for each checkpoint tier.

    python benchmarks/save.py [--between 20] [--rounds 6]

A save copies the arrays and returns; writing them overlaps with the following steps. So there are two numbers: the
seconds that `save` blocks, after the devices have finished their work, and the seconds by which the following steps are
slower than without a save, as writing shares the processor with them. Both are measured in one run, as fractions of the
time between saves. The result goes to benchmarks/results/save-cpu.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from train_step import surroundings

from mtjax.config import Config, replace
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.checkpoints.checkpoint import Checkpoints, fingerprints
from mtjax.runtime.checkpoints.local import LocalCheckpoints
from mtjax.runtime.devices import attach_devices
from mtjax.sharding.global_batch import global_batch
from mtjax.train.step import State, TrainStep, make_train_step

MESH = "2x4"


def model() -> Config:
    """Returns the config: 42M parameters, so 0.5 GB of float32 parameters and moments."""
    sizes = {"num_layers": 12, "hidden_size": 512, "num_heads": 8, "vocab_size": 8192, "sequence_length": 64}
    return replace(Config(), **sizes, global_batch_size=8, compute_dtype="float32", steps=100_000)


def batch_of(program: TrainStep, step: int) -> dict[str, jax.Array]:
    size, length = program.config.training.global_batch_size, program.config.model.sequence_length
    text = np.random.default_rng(step).integers(0, 8192, (size, length + 1)).astype(np.int32)
    host = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": np.ones((size, length), np.float32)}
    host["sample_index"] = np.arange(size, dtype=np.uint32)
    return global_batch(program.batch_sharding, host, size)


def timed_steps(program: TrainStep, state: State, count: int) -> tuple[State, list[float]]:
    """Runs steps, waiting for each; returns the state and the seconds of each step."""
    seconds = []
    for step in range(count):
        batch = batch_of(program, step)
        begun = time.perf_counter()
        state, _ = program.step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - begun)
    return state, seconds


def measure(
    program: TrainStep, state: State, tier: Checkpoints | LocalCheckpoints, between: int, rounds: int
) -> tuple[State, dict[str, Any]]:
    """Measures rounds of a save and `between` steps, without the first round, which compiles."""
    waited, worked, following, fingerprinted = [], [], [], []
    for number in range(rounds + 1):
        begun, cpu_begun = time.perf_counter(), time.thread_time()
        tier.save(state, program.config, 0)
        waited.append(time.perf_counter() - begun)
        worked.append(time.thread_time() - cpu_begun)
        state, seconds = timed_steps(program, state, between if number else 2)
        following.append(seconds)
        begun = time.perf_counter()
        fingerprints(state)
        fingerprinted.append(time.perf_counter() - begun)
    tier.close()
    waited, following = waited[1:], following[1:]
    usual = statistics.median(second for seconds in following for second in seconds[between // 2 :])
    shares = [wait / (wait + sum(seconds)) for wait, seconds in zip(waited, following, strict=True)]
    slower = [sum(seconds[: between // 2]) - usual * (between // 2) for seconds in following]
    return state, {
        "step_seconds": round(usual, 3),
        "seconds_between_saves": round(statistics.median(sum(seconds) for seconds in following), 1),
        "waited_seconds": [round(wait, 3) for wait in waited],
        "of_these_cpu_seconds_of_the_thread_that_waits": [round(work, 3) for work in worked[1:]],
        "waited_share": round(statistics.median(shares), 5),
        "waited_share_worst": round(max(shares), 5),
        "following_steps_longer_by_seconds": round(statistics.median(slower), 2),
        "fingerprints_if_waited_for_seconds": round(statistics.median(fingerprinted[1:]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--between", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=6, help="saves measured of each tier")
    options = parser.parse_args()
    shape = parse_mesh(MESH)
    program = make_train_step(model(), attach_devices(shape))
    state = program.initialize(0)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    state, _ = timed_steps(program, state, 2)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tiers = {
            "--out": Checkpoints(Path(folder) / "shared", keep_last=2),
            "--local-checkpoints": LocalCheckpoints(Path(folder) / "local", every=1, keep=2),
        }
        for name, tier in tiers.items():
            state, row = measure(program, state, tier, options.between, options.rounds)
            rows.append({"tier": name, "state_megabytes": round(size / 1e6), "steps_between": options.between, **row})
            print(json.dumps(rows[-1]), flush=True)
            write(rows)


def write(rows: list[dict[str, Any]]) -> None:
    result = {
        **surroundings(),
        "jax": version("jax"),
        "orbax": version("orbax-checkpoint"),
        "rows": rows,
    }
    path = Path(__file__).parent / "results" / "save-cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
