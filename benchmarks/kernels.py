"""Kernels of presets that do more than their bytes: compare-and-swap loops, spills, uncoalesced accesses, instructions.

Compiles each preset's step as shipped, on its own mesh, and runs nothing: what `mtjax inspect --kernels` says of each
kernel with a fault. A fault in a kernel of more than 1% of its step needs a reason in `EXPECTED`, or the script ends
with exit code 1; tests/inspect/test_kernels.py reads the file.

    python benchmarks/kernels.py [--presets gpt2-355m bert-base] [--targets h100x8 a100x8] [--out FILE.json] [--again]

Needs no GPU, but the extra `aot-cudnn`. 6 to 174 CPU seconds (median 32) for each preset and target. It can be stopped
and started again: what the file has from the same version of jax is left out, unless `--again` is given.
"""

import gc
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import tyro

from mtjax import config
from mtjax.config.vocabulary import with_vocabulary
from mtjax.errors import UserError
from mtjax.inspect.kernels.audit import SWAPS, KernelReport
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write

TARGETS = ("h100x8", "h200x8", "b200x8", "a100x8")
LEAST = 0.001
"""Share of a step from which a kernel's faults are in the file."""
MOST = 0.01
"""Share of a step up to which a kernel may have faults."""
EXPECTED: dict[tuple[str, str], str] = {
    (
        "spills",
        "models/kernels/xla.py",
    ): "Triton's softmax of written-out scores has rows of 1,024 in registers: 96 to 128 "
    "bytes a thread go to local memory, and the kernel still takes as long as its bytes",
    (
        "spills",
        "models/project.py",
    ): "4 bytes a thread on A100, 16 on B200, of Triton matmuls, whose tiles XLA guesses without a GPU",
    (
        "spills",
        "sharding/experts/dispatch.py",
    ): "8 bytes a thread, 16 on B200, of the sums that are gradients of gates; the kernel takes as long as its bytes",
    (
        "spills",
        "models/mixers/latent_attention.py",
    ): "4 bytes a thread of the norm of latents, 0.1% of a step",
    (
        "spills",
        "models/head_norm.py",
    ): "8 bytes a thread of the sums over rows that are the gradient of query's and key's norm, 0.1% of a step",
    (
        "slow",
        "sharding/experts/dispatch.py",
    ): "the tokens of a block of rows are gathered by one element a thread, and its index takes 3 times as long "
    "as its 2 bytes (1.6% of a step of qwen3-30b-a3b on H100, 2.4% and less on H200, 4.2% and less on B200)",
    (
        "spills",
        "train/step.py",
    ): "8 bytes a thread of Adam's update of an array of five dimensions (query, key and value of GPT-2 "
    "8.3B); the kernel takes as long as its bytes",
    (
        "slow",
        "models/ops.py",
    ): "a mask that is kept is a byte an element, and the 20 rounds of Threefry that four share "
    "take 3 times as long as these bytes; gradients of norms: XLA's sum over tokens is limited by the exchange of "
    "sectors (1.1% of a step of gpt2-xl)",
    (
        "slow",
        "models/gated_activations.py",
    ): "the gradients of gate and up are written into one array: XLA computes each element behind a branch, from loads "
    "of 2 bytes, so that sectors take 2.3 times as long as bytes on B200 (1.7% of a step of llama3-8b)",
    (
        "slow",
        "models/mixers/mamba.py",
    ): "the backward pass's convolution and SiLU: XLA writes two arrays in different layouts in one kernel, and "
    "computes each element for both (2.2 times its bytes on H200, 3.2 on B200: 2.1% and 2.9% of a step of "
    "mamba2-2.7b)",
    (
        "slow",
        "models/mixers/recurrent.py",
    ): "the forward pass's convolution and SiLU, computed for two arrays as above: 168 instructions for an element "
    "(2.7 times its bytes on H200, 3.8 on B200: 1.9% and 2.7% of a step of mamba2-2.7b)",
    (
        "slow",
        "models/kernels/ssd.py",
    ): "the decay between each two tokens of a chunk: an exponential and 28 instructions for an element of 2 bytes "
    "(2.8 times its bytes on B200, 1.1% of a step of mamba2-2.7b)",
    (
        "spills",
        "sharding/vocab.py",
    ): "4 bytes a thread on B200, 8 on A100, of Triton matmuls of the loss's backward pass, whose tiles XLA guesses "
    "without a GPU (0.7% and 1.2% of a step of llama3-8b)",
    (
        "spills",
        "models/rms_norm.py",
    ): "8 bytes a thread of the sums over rows that are a norm's gradient, outside of the layers (0.03% of a step of "
    "llama3-8b on B200)",
    (
        "slow",
        "models/kernels/convolution.py",
    ): "the backward pass's convolution and SiLU, computed for two arrays as above (2.3 times its bytes on B200, 1.1% "
    "of a step of zamba2-1.2b)",
    (
        "spills",
        "models/kernels/convolution.py",
    ): "8 bytes a thread of the convolution's gradients on A100, 0.1% of a step",
    (
        "spills",
        "models/heads.py",
    ): "32 bytes a thread of a sum of gradients of BERT's head on B200, less than 0.1% of a step",
    (
        "spills",
        "sharding/prefetch/scan.py",
    ): "12 bytes a thread on A100, 8 on B200, in the backward loop over layers (0.3% of a step of t5-small, less of "
    "deepseek-v3)",
    (
        "slow",
        "models/mixers/transformer.py",
    ): "exact GELU, of BERT, Falcon, Pythia and Mamba-2 hybrids: the polynomials of erf (up to 5.8% of a step, of "
    "falcon-7b on B200)",
    (
        "spills",
        "models/ops.py",
    ): "56 bytes a thread of a sum of a norm's gradients (0.7% of a step of 3 ms, of default)",
    (
        "slow",
        "models/project.py",
    ): "gradients of biases: XLA's sum over tokens is limited by the exchange of sectors (1.1% of a step of gpt2-xl)",
    (
        "slow",
        "models/mixers/grouped_qkv.py",
    ): "the gradients of query, key and value are added, transposed and concatenated in one kernel, which finds each "
    "element's array by comparisons (2.6% of a step of gemma2-9b)",
    (
        SWAPS,
        "sharding/experts/dispatch.py",
    ): "on A100, XLA adds tokens' rows in a loop where the sums have 16 bits (0.4% of a step of deepseek-v2-lite)",
    (
        SWAPS,
        "sharding/vocab.py",
    ): "up to 0.2% of a step (of gpt2-tiny): for some shapes, and on A100, 16-bit gradients of embeddings are added in "
    "a loop",
    (
        "slow",
        "",
    ): "gradients joined for one all-reduce: XLA finds each element's array by comparisons (1.1% and 1.3% of steps of "
    "3 ms, of default and llama-tiny; 2.1% of one of gpt2-1.2b on B200, whose memory is faster than H100's)",
}
"""(fault, source file) -> the reason why it may take more than `MOST` of a step."""
PRESETS = tuple(sorted(path.stem for path in config.shipped_folder().glob("*.toml")))


@dataclass(frozen=True)
class Arguments:
    """What to compile."""

    presets: tuple[str, ...] = PRESETS
    targets: tuple[str, ...] = TARGETS
    out: Path = Path(__file__).parent / "results" / "kernels.json"
    again: bool = False
    """Compile again what the file has."""


def unexpected(row: dict[str, Any]) -> list[str]:
    """Returns faults of kernels of more than `MOST` of the step, and those that none may have, without a reason.

    Args:
      row: of the file.
    """
    return [
        f"{kernel['kernel']} ({kernel['source']}, {kernel['share']:.1%} of the step): {sentence}"
        for kernel in row.get("faults", ())
        for fault, sentence in kernel["faults"].items()
        if (kernel["share"] > MOST or fault in (SWAPS, "spills"))
        and (fault, kernel["source"].split(":")[0]) not in EXPECTED
    ]


def row_of(kernels: KernelReport) -> dict[str, Any]:
    """Returns a row of the file: faults of kernels of `LEAST` of the step, and those that none may have."""
    faults = [
        {
            "kernel": row.machine.name,
            "source": row.source,
            "share": round(row.seconds / kernels.step, 5),
            "faults": row.faults,
        }
        for row in kernels.faulty
        if row.seconds >= LEAST * kernels.step or {SWAPS, "spills"} & set(row.faults)
    ]
    return {
        "step_seconds": kernels.step,
        "without_instructions": kernels.without,
        "kernels": len(kernels.rows),
        "launches": sum(row.count for row in kernels.rows),
        "faults": faults,
    }


def audited(preset: str, target: str) -> dict[str, Any]:
    """Compiles a preset for a target, and returns its row."""
    start = cpu_seconds()
    try:
        run = with_vocabulary(config.load(preset), lambda _: None)
        report = inspect(run, find_target(target), kernels=True)
    except UserError as e:
        row = {"refused": str(e)}
    else:
        assert report.time and report.time.kernels
        row = row_of(report.time.kernels)
    about = {"date": date.today().isoformat(), "jax": version("jax"), "cpu_seconds": round(cpu_seconds() - start, 1)}
    return about | row


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and of its children: ptxas and nvdisasm."""
    return sum(os.times()[:4])


def save(path: Path, rows: Mapping[str, Any]) -> None:
    """Writes the file, a row a line."""
    lines = (f" {json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows))
    write(path, '{"rows": {\n' + ",\n".join(lines) + "\n}}\n")


def main(arguments: Arguments) -> int:
    path, bad = arguments.out, 0
    rows = json.loads(path.read_text())["rows"] if path.is_file() else {}
    for target in arguments.targets:
        for preset in arguments.presets:
            name = f"{preset} on {target}"
            if name not in rows or rows[name]["jax"] != version("jax") or arguments.again:
                rows[name] = audited(preset, target)
                save(path, rows)
                jax.clear_caches()
                gc.collect()
            row = rows[name]
            faults = unexpected(row)
            bad += len(faults)
            says = row.get("refused") or f"{row['step_seconds'] * 1e3:.1f} ms, {row['cpu_seconds']} CPU seconds"
            print(preset, target, says, *faults, sep="\n  ", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
