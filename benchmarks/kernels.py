"""Kernels of presets that do more than their bytes: compare-and-swap loops, spills, uncoalesced accesses, instructions.

Compiles each preset's step as shipped, on its own mesh, and runs nothing: what `mtjax inspect --kernels` says of each
kernel with a fault. A fault in a kernel of more than 1% of its step needs a reason in `EXPECTED`, or the script ends
with exit code 1.

    python benchmarks/kernels.py [--presets gpt2-355m bert-base] [--targets h100x8 a100x8] [--out FILE.json]

Needs no GPU, but the extra `aot-cudnn`. 15 to 60 CPU seconds for each preset and target; the results of presets that
are compiled again replace those in the file, the others stay.
"""

import json
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tyro

from mtjax import config
from mtjax.errors import UserError
from mtjax.inspect.kernels.audit import SWAPS, KernelReport
from mtjax.inspect.report import inspect
from mtjax.inspect.targets import find_target
from mtjax.inspect.write_files import write

TARGETS = ("h100x8", "h200x8", "b200x8", "a100x8")
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
    ): "4 bytes a thread of a Triton matmul on A100, whose tiles XLA guesses without a GPU",
    (
        "spills",
        "sharding/experts/dispatch.py",
    ): "8 bytes a thread of the sums that are the gradients of gates; the kernel takes as long as its bytes",
    (
        "spills",
        "train/step.py",
    ): "8 bytes a thread of Adam's update of an array of five dimensions (query, key and value of GPT-2 "
    "8.3B); the kernel takes as long as its bytes",
    (
        "slow",
        "models/dropout.py",
    ): "a mask that is kept is a byte an element, and the 20 rounds of Threefry that four share "
    "take 3 times as long as these bytes",
    ("slow", "models/mixers/mlp.py"): "BERT's exact GELU: the polynomials of erf",
    (
        SWAPS,
        "sharding/vocab_embedding.py",
    ): "gradients of the embedding, 0.1% of a step: of some shapes, and on A100, 16-bit numbers are added in a loop",
    (
        "slow",
        "",
    ): "gradients joined for one all-reduce: XLA looks for each element's array, and B200's memory is faster",
}
"""(fault, source file) -> the reason why it may take more than `MOST` of a step."""


@dataclass(frozen=True)
class Arguments:
    """What to compile."""

    presets: tuple[str, ...] = tuple(sorted(path.stem for path in config.shipped_folder().glob("*.toml")))
    targets: tuple[str, ...] = TARGETS
    out: Path = Path(__file__).parent / "results" / "kernels.json"


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


def row_of(kernels: KernelReport, seconds: float) -> dict[str, Any]:
    return {
        "step_seconds": kernels.step,
        "without_instructions": kernels.without,
        "kernels": len(kernels.rows),
        "launches": sum(row.count for row in kernels.rows),
        "seconds_to_inspect": round(seconds, 1),
        "faults": [
            {
                "kernel": row.machine.name,
                "source": row.source,
                "share": round(row.seconds / kernels.step, 5),
                "faults": row.faults,
            }
            for row in kernels.faulty
        ],
    }


def main(arguments: Arguments) -> int:
    path = arguments.out
    known = json.loads(path.read_text())["rows"] if path.is_file() else {}
    bad = 0
    for preset in arguments.presets:
        for target in arguments.targets:
            start, faults, says = time.process_time(), [], ""
            try:
                report = inspect(config.load(preset), find_target(target), kernels=True)
            except UserError as e:
                row, says = {"refused": str(e)}, str(e)
            else:
                assert report.time and report.time.kernels
                row = row_of(report.time.kernels, time.process_time() - start)
                faults, says = unexpected(row), f"{report.time.kernels.step * 1e3:.1f} ms"
            known[f"{preset} on {target}"] = row
            bad += len(faults)
            print(preset, target, says, *faults, sep="\n  ")
            about = {"date": date.today().isoformat(), "jax": version("jax"), "rows": known}
            write(path, json.dumps(about, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
