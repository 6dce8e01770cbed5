"""Speed of generation, compared with Hugging Face's `generate` and llama.cpp's server on the same GPT-2 small.

    python benchmarks/generate.py --batches 1 8 32

llama.cpp's side, with its default of a float16 KV cache, runs if it is installed: `pip install xllamacpp gguf`. Weights
are random float32, and every text is generated greedily to the same length. Each side runs in a separate process,
alternating, on one core: spin-waiting threads and other work on the machine would distort anything but CPU seconds.
`first` is the time to the first token of the first text, `all` that of all texts including prefill, `step` that of a
decode step (a token of every text) after prefill. Results go to benchmarks/results/generate-cpu.json.
"""

import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import tyro

RESULT = Path(__file__).parent / "results" / "generate-cpu.json"
SIDES = {
    "mtjax": ("jax",),
    "huggingface": ("torch", "transformers"),
    "llamacpp": ("xllamacpp", "gguf"),
}
"""Packages that each side needs."""
VOCAB = 50257


@dataclass(frozen=True)
class Options:
    """Batches, lengths and sides to time."""

    batches: tuple[int, ...] = (1, 8, 32)
    """Batch sizes."""
    prompt: int = 128
    """Prompt tokens of each text."""
    tokens: int = 32
    """Generated tokens of each text."""
    repeats: int = 2
    """Runs of each side; the fastest counts."""
    side: str = ""
    """Internal: time this side only, in this process."""
    folder: str = ""
    """Internal: folder for that process's weights."""


def weights(shape: tuple[int, ...]) -> np.ndarray:
    block = 0.02 * np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    return np.resize(block, shape)


def prompts(options: Options, batch: int) -> np.ndarray:
    return np.random.default_rng(batch).integers(0, VOCAB, (batch, options.prompt))


def mtjax_side(options: Options) -> Callable[[int], dict[str, float]]:
    import jax
    import jax.numpy as jnp

    from mtjax import config as configs
    from mtjax.generate.decoder import GenerationPrograms
    from mtjax.generate.engine import Engine
    from mtjax.generate.request import Request, Sampling, Token
    from mtjax.layout.mesh import parse_mesh
    from mtjax.models.sharded_model import ShardedModel
    from mtjax.sharding.device_mesh import make_mesh

    small = configs.load("gpt2-small")
    config = configs.replace(small, compute_dtype="float32", mesh="1x1", vocab_size=VOCAB, microbatch_size=None)
    placed = ShardedModel(config, make_mesh(parse_mesh("1x1"), jax.devices()))
    parameters = jax.tree.map(lambda a: jnp.asarray(weights(a.shape)), placed.abstract_parameters)
    decoder = GenerationPrograms(placed, jax.device_put(parameters, placed.parameter_sharding))

    def write(batch: int) -> dict[str, float]:
        engine, start = Engine(decoder, batch), time.process_time()
        times: list[list[float]] = [[] for _ in range(batch)]

        def listener(text_times: list[float]) -> Callable[[Token], bool]:
            return lambda token: bool(text_times.append(time.process_time() - start))

        for ids, text_times in zip(prompts(options, batch), times, strict=True):
            engine.submit(Request(tuple(ids.tolist()), Sampling(options.tokens), on_token=listener(text_times)))
        engine.run()
        return latencies(times, options)

    return write


def latencies(times: list[list[float]], options: Options) -> dict[str, float]:
    """Summarizes the times at which the tokens of each text arrived."""
    first = min(times, key=lambda text_times: text_times[0])
    late = first[options.tokens // 2 : options.tokens]
    return {
        "first": first[0],
        "all": max(text_times[-1] for text_times in times),
        "step": (late[-1] - late[0]) / (len(late) - 1),
    }


def huggingface_side(options: Options) -> Callable[[int], dict[str, float]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    model: Any = GPT2LMHeadModel(GPT2Config()).eval()  # its types depend on the version

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
        first, all_tokens = seconds(batch, 1), seconds(batch, options.tokens)
        return {"first": first, "all": all_tokens, "step": (all_tokens - first) / (options.tokens - 1)}

    return write


def write_gguf(path: Path) -> None:
    """Writes GPT-2 small in llama.cpp's format, with placeholder tokens."""
    import gguf

    layers, width, context = 12, 768, 1024
    file = gguf.GGUFWriter(path, "gpt2")
    file.add_context_length(context)
    file.add_embedding_length(width)
    file.add_feed_forward_length(4 * width)
    file.add_block_count(layers)
    file.add_head_count(12)
    file.add_layer_norm_eps(1e-5)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([f"t{i}" for i in range(VOCAB)])
    file.add_token_types([1] * VOCAB)
    file.add_token_merges(["t 1"])
    file.add_eos_token_id(VOCAB - 1)
    shapes = {"token_embd.weight": (VOCAB, width), "position_embd.weight": (context, width)}
    norms = ["output_norm", *(f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm"))]
    shapes |= {f"{norm}.{kind}": (width,) for norm in norms for kind in ("weight", "bias")}
    sizes = {"attn_qkv": (3, 1), "attn_output": (1, 1), "ffn_up": (4, 1), "ffn_down": (1, 4)}
    for name, (out, into) in ((f"blk.{i}.{name}", size) for i in range(layers) for name, size in sizes.items()):
        shapes |= {f"{name}.weight": (out * width, into * width), f"{name}.bias": (out * width,)}
    for name, shape in shapes.items():
        file.add_tensor(name, weights(shape))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def llamacpp_side(options: Options) -> Callable[[int], dict[str, float]]:
    import xllamacpp

    path = Path(options.folder) / "gpt2-small.gguf"
    write_gguf(path)

    def write(batch: int) -> dict[str, float]:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = batch, batch * (options.prompt + options.tokens + 32)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.verbosity = False, -1
        server: Any = xllamacpp.Server(params)
        times: list[list[float]] = [[] for _ in range(batch)]

        def ask(ids: np.ndarray, text_times: list[float]) -> None:
            request = {"prompt": ids.tolist(), "n_predict": options.tokens, "temperature": 0.0, "stream": True}
            on_token = lambda _: bool(text_times.append(time.process_time() - start))  # noqa: E731
            server.handle_completions(request | {"ignore_eos": True, "cache_prompt": False}, on_token)

        clients = [threading.Thread(target=ask, args=each) for each in zip(prompts(options, batch), times, strict=True)]
        start = time.process_time()
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert all(len(text_times) >= options.tokens for text_times in times)
        return latencies(times, options)

    return write


def time_side(options: Options) -> None:
    """Prints the times of one side as JSON; the first run of each batch size is a warm-up."""
    sides = {"mtjax": mtjax_side, "huggingface": huggingface_side, "llamacpp": llamacpp_side}
    write = sides[options.side](options)
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
    sides = [side for side, packages in SIDES.items() if all(map(find_spec, packages))]
    best = {side: {} for side in sides}
    for _ in range(options.repeats):
        for side in sides:
            for batch, row in run_side(options, side).items():
                before = best[side].setdefault(batch, row)
                best[side][batch] = {name: min(row[name], before[name]) for name in row}
    show(options, best)
    packages = {name: version(name) for side in sides for name in SIDES[side]}
    about = {"date": f"{datetime.date.today()}", "machine": platform.processor() or platform.machine(), **packages}
    settings = {"prompt": options.prompt, "tokens": options.tokens, "load": os.getloadavg()[0]}
    RESULT.write_text(json.dumps({**about, **settings, "seconds": best}, indent=2) + "\n")


def run_side(options: Options, side: str) -> dict[str, dict[str, float]]:
    """What a process of a side measures, by batch."""
    words = [f"--{name}={getattr(options, name)}" for name in ("prompt", "tokens")]
    words += ["--batches", *map(str, options.batches)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--side", side, "--folder", folder, *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, preexec_fn=one_core)
    return json.loads(done.stdout.splitlines()[-1])


def show(options: Options, best: dict[str, dict[str, dict[str, float]]]) -> None:
    """Prints a table of CPU seconds, and tokens/s relative to the other sides."""
    sides = list(best)
    print(f"CPU seconds on one core: {', '.join(sides)}")
    for batch in map(str, options.batches):
        rows = [best[side][batch] for side in sides]
        numbers = "   ".join(f"{name} {' '.join(f'{row[name]:7.3f}' for row in rows)}" for name in rows[0])
        rate = int(batch) * options.tokens / rows[0]["all"]
        ratios = {side: best[side][batch]["all"] / rows[0]["all"] for side in sides if side != "mtjax"}
        others = ", ".join(f"{ratio:.2f}x {side}" for side, ratio in ratios.items())
        print(f"batch {batch:>3}   {numbers}   {rate:.1f} tokens/s: {others}")


if __name__ == "__main__":
    main()
