"""Commands on the GPU and on the CPU: the same perplexity of a trained run, and the same greedy text."""

import json
import subprocess
import sys
from typing import Any

from gpu_kit.child import Child
from gpu_kit.resume import environment, last_line, train, write_inputs
from mtjax.errors import UserError

RELATIVE = 1e-4
"""Limit of the relative difference of perplexities in float32."""
_CPU = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
_EVALUATE = ("mtjax.evaluate", "--task", "perplexity", "--data", "text.txt", "--from", "run")
_GENERATE = ("mtjax.generate", "--from", "run", "--temperature", "0", "--max-tokens", "48", "abc def")
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "evaluate on the CPU": ((*_EVALUATE, "--compute-dtype", "float32", "--out", "evaluate on the CPU.json"), _CPU),
    "evaluate": ((*_EVALUATE, "--compute-dtype", "float32", "--out", "evaluate.json"), {}),
    "evaluate in bfloat16": ((*_EVALUATE, "--compute-dtype", "bfloat16", "--out", "evaluate in bfloat16.json"), {}),
    "generate on the CPU": ((*_GENERATE, "--dtype", "float32"), _CPU),
    "generate": ((*_GENERATE, "--dtype", "float32"), {}),
    "generate with weights in int8": ((*_GENERATE, "--weights-dtype", "int8"), {}),
}


def run(child: Child) -> dict[str, Any]:
    """Trains a small run, and runs the commands at the same time; returns what they found, and `ok`.

    Raises:
      UserError: training failed.
    """
    folder = child.folder / "runs"
    write_inputs(folder)
    if train(folder, "run", "--learning-rate", "0.01", "--warmup-steps", "5").wait():
        raise UserError(f"training failed: {last_line(folder / 'run.log')}")
    processes = {}
    for name, (arguments, platform) in COMMANDS.items():
        variables = environment() | {"JAX_DEFAULT_MATMUL_PRECISION": "highest"} | platform
        command = [sys.executable, "-m", *arguments]
        with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.log").open("w") as log:
            processes[name] = subprocess.Popen(command, cwd=folder, stdout=out, stderr=log, env=variables)
    failed = {name: last_line(folder / f"{name}.log") for name, process in processes.items() if process.wait()}
    perplexities = {
        name: json.loads(path.read_text())["results"]["perplexity"]
        for name in COMMANDS
        if (path := folder / f"{name}.json").exists()
    }
    texts = {name: (folder / f"{name}.out").read_text() for name in COMMANDS if name.startswith("generate")}
    found = {"failed": failed, "perplexities": perplexities, "texts": texts}
    child.answer(found)
    ours, reference = perplexities.get("evaluate", 0.0), perplexities.get("evaluate on the CPU", 1.0)
    equal = abs(ours / reference - 1) < RELATIVE and texts["generate"] == texts["generate on the CPU"]
    return found | {"ok": not failed and equal and bool(texts["generate"])}
