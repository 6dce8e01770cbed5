"""Cost of `--check-replicas`: CPU seconds of a check of a step, and of a state, relative to those of a step.

    python benchmarks/replicas.py [--rounds 5]

With the model and mesh of `save.py`, alternating: a step, a check of a step (which computes it twice, and compares), a
check of the state, as before each save. Measures CPU seconds of the process, as other programs may share the machine.
With `--check-replicas N` a run takes 1 + RATIO / N times as long. Results go to benchmarks/results/replicas-cpu.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import jax
from save import MESH, batch_of, model
from train_step import surroundings

from mtjax.config import replace
from mtjax.layout.mesh import parse_mesh
from mtjax.runtime.devices import attach_devices
from mtjax.train.observability.corruption_checks import CorruptionChecks
from mtjax.train.step import make_train_step


def cpu_seconds(do: Callable[[], object]) -> float:
    """Returns the CPU seconds of a call, until its results are ready."""
    begun = time.process_time()
    jax.block_until_ready(do())
    return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of a step and both checks")
    options = parser.parse_args()
    program = make_train_step(replace(model(), check_replicas=1), attach_devices(parse_mesh(MESH)))
    replicas, state = CorruptionChecks(program), program.initialize(0)
    seconds: dict[str, list[float]] = {"step": [], "check_of_a_step": [], "check_of_a_state": []}
    for number in range(options.rounds + 1):  # the first, which compiles, does not count
        batch = batch_of(program, number)

        def step(batch: dict[str, jax.Array] = batch) -> None:
            nonlocal state
            state, results = program.step(state, batch)
            jax.block_until_ready((state, results))

        row = [
            cpu_seconds(lambda n=number, b=batch: replicas.check_step(n, state, b)),
            cpu_seconds(lambda n=number: replicas.check_state(n, state)),
            cpu_seconds(step),
        ]
        for name, value in zip(("check_of_a_step", "check_of_a_state", "step"), row if number else (), strict=False):
            seconds[name].append(round(value, 3))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        **surroundings(),
        "jax": version("jax"),
        "mesh": MESH,
        "cpu_seconds": seconds,
        "check_of_a_step_against_a_step": round(medians["check_of_a_step"] / medians["step"], 2),
        "check_of_a_state_against_a_step": round(medians["check_of_a_state"] / medians["step"], 2),
    }
    path = Path(__file__).parent / "results" / "replicas-cpu.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
