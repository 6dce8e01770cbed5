"""How fast texts are written, compared with Hugging Face's `generate`: the same GPT-2 small and prompts in one run.

    python benchmarks/generate.py --batches 1 8 32

Weights are random, float32, and every text is written to the same length, greedily. Each side runs in a process of its
own, in turn, on one core: two threads that wait for each other may spin, and on a machine that does other work only CPU
seconds say something. `first` is the time until the first token of the first text, `all` that of entire texts with
their prompts, `step` that of a token of every text once all prompts are read. Results go to
benchmarks/results/generate-cpu.json.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tyro

RESULT = Path(__file__).parent / "results" / "generate-cpu.json"
SIDES = ("mtjax", "huggingface")
VOCAB = 50257


@dataclass(frozen=True)
class Options:
    """What to time."""

    batches: tuple[int, ...] = (1, 8, 32)
    """Texts that are written at a time."""
    prompt: int = 128
    """Tokens of each prompt."""
    tokens: int = 32
    """Tokens that are written after each."""
    repeats: int = 2
    """Turns of each side; the least time counts."""
    side: str = ""
    """Time this side only, in this process: what the benchmark starts."""


def prompts(options: Options, batch: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(0, VOCAB, (batch, options.prompt))


def mtjax_side(options: Options) -> Callable[[int], dict[str, float]]:
    import jax
    import jax.numpy as jnp

    from mtjax import config as configs
    from mtjax.generate.decoder import Decoder
    from mtjax.generate.engine import Engine
    from mtjax.generate.request import Request, Sampling, Token
    from mtjax.models.placed import Placed
    from mtjax.sharding.mesh import make_mesh
    from mtjax.theory.mesh import parse_mesh

    small = configs.load("gpt2-small")
    config = configs.replace(small, compute_dtype="float32", mesh="1x1", vocab_size=VOCAB, microbatch_size=None)
    placed = Placed(config, make_mesh(parse_mesh("1x1"), jax.devices()))
    block = 0.02 * np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    parameters = jax.tree.map(lambda a: jnp.asarray(np.resize(block, a.shape)), placed.abstract_parameters)
    decoder = Decoder(placed, jax.device_put(parameters, placed.parameter_sharding))

    def write(batch: int) -> dict[str, float]:
        engine, start = Engine(decoder, batch), time.process_time()
        times: list[list[float]] = [[] for _ in range(batch)]

        def heard(own: list[float]) -> Callable[[Token], bool]:
            return lambda token: bool(own.append(time.process_time() - start))

        for ids, own in zip(prompts(options, batch), times, strict=True):
            engine.submit(Request(tuple(ids.tolist()), Sampling(options.tokens), on_token=heard(own)))
        engine.run()
        steps = sorted(times[0][-options.tokens // 2 :])
        return {
            "first": times[0][0],
            "all": max(own[-1] for own in times),
            "step": (steps[-1] - steps[0]) / (len(steps) - 1),
        }

    return write


def huggingface_side(options: Options) -> Callable[[int], dict[str, float]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    model: Any = GPT2LMHeadModel(GPT2Config()).eval()  # of types that checkers do not follow

    def seconds(batch: int, tokens: int) -> float:
        ids, start = torch.tensor(prompts(options, batch)), time.process_time()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return time.process_time() - start

    def write(batch: int) -> dict[str, float]:
        first, everything = seconds(batch, 1), seconds(batch, options.tokens)
        return {"first": first, "all": everything, "step": (everything - first) / (options.tokens - 1)}

    return write


def time_side(options: Options) -> None:
    """Prints the times of this side as JSON; the first turn, which compiles, does not count."""
    write = {"mtjax": mtjax_side, "huggingface": huggingface_side}[options.side](options)
    rows = {}
    for batch in options.batches:
        write(batch)
        rows[str(batch)] = write(batch)
    print(json.dumps(rows))


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.side:
        time_side(options)
        return
    best: dict[str, dict[str, dict[str, float]]] = {side: {} for side in SIDES}
    words = [f"--{name}={getattr(options, name)}" for name in ("prompt", "tokens")]
    words += ["--batches", *map(str, options.batches)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    for _ in range(options.repeats):
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, *words]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, preexec_fn=one_core)
            for batch, row in json.loads(done.stdout.splitlines()[-1]).items():
                before = best[side].setdefault(batch, row)
                best[side][batch] = {name: min(row[name], before[name]) for name in row}
    ours, theirs = (best[side] for side in SIDES)
    print("CPU seconds on one core    first: mtjax, hf      all: mtjax, hf       step: mtjax, hf   tokens/s of all")
    for batch, row in ours.items():
        other = theirs[batch]
        numbers = "   ".join(f"{row[name]:8.3f} {other[name]:8.3f}" for name in row)
        rates = [int(batch) * options.tokens / side["all"] for side in (row, other)]
        print(f"batch {batch:>3}              {numbers}   {rates[0]:.1f} {rates[1]:.1f} ({rates[0] / rates[1]:.2f}x)")
    packages = {name: version(name) for name in ("jax", "torch", "transformers")}
    about = {"date": f"{datetime.date.today()}", "machine": platform.processor() or platform.machine(), **packages}
    settings = {"prompt": options.prompt, "tokens": options.tokens, "load": os.getloadavg()[0]}
    RESULT.write_text(json.dumps({**about, **settings, "seconds": best}, indent=2) + "\n")


if __name__ == "__main__":
    main()
