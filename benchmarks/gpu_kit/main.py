"""The command line of benchmarks/gpu.py."""

import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from gpu_kit.child import Child
from gpu_kit.options import RESULTS, Options
from gpu_kit.page import page
from gpu_kit.parts import chosen, work
from gpu_kit.runner import CHILD, REHEARSE, run_parts
from mtjax.errors import UserError
from mtjax.runtime.devices import has_gpu


def main(description: str) -> None:
    """Runs the selected parts; exit code 1 if a part failed or a check does not hold, 2 for invalid options."""
    if sys.argv[1:2] == [CHILD]:
        run_child(Child(sys.argv[2], Path(sys.argv[3]), REHEARSE in sys.argv[4:]))
        return
    options = tyro.cli(Options, description=description)
    try:
        code = run(options)
    except UserError as e:
        sys.exit(_print_error(e))
    sys.exit(code)


def _print_error(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


def run(options: Options) -> int:
    """Runs the selected parts; returns the exit code.

    Raises:
      UserError: there is no GPU, or no such part.
    """
    parts = chosen(options.only, rehearse=options.rehearse)
    if not has_gpu() and not options.rehearse:
        raise UserError("this machine has no NVIDIA GPU: use --rehearse to run all parts with tiny shapes on the CPU")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-kit-") as name:
        out = Path(name) / "results" if options.rehearse else options.out or RESULTS
        out.mkdir(parents=True, exist_ok=True)

        def save(found: Mapping[str, dict[str, Any]]) -> None:
            write(out, found, time.monotonic() - start, rehearse=options.rehearse)

        found = run_parts(parts, Path(name), 60 * options.minutes, save, _say, rehearse=options.rehearse)
        if options.rehearse:
            _say(f"rehearsed in {time.monotonic() - start:.0f} s; no results are written")
        else:
            _say(f"written to {out} after {time.monotonic() - start:.0f} s")
    return 0 if all(is_right(answer) for answer in found.values()) else 1


def is_right(answer: Mapping[str, Any]) -> bool:
    """Returns whether a part succeeded or was skipped."""
    return answer["state"] not in ("failed", "cut short") and answer.get("ok", True)


def write(out: Path, found: Mapping[str, dict[str, Any]], seconds: float, *, rehearse: bool) -> None:
    """Writes the results so far, as JSON and as a Markdown page."""
    machine = found.get("machine", {})
    document = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "seconds": seconds,
        "host": platform.machine(),
        "parts": dict(found),
    }
    name = f"gpu-{str(machine.get('device', 'unknown')).replace(' ', '-')}"
    count = machine.get("devices", 1)
    name += f"-x{count}" if count > 1 else ""
    for suffix, text in ((".json", json.dumps(document, indent=1) + "\n"), (".md", page(document))):
        (out / (name + suffix)).write_text(text)
    assert not rehearse or out != RESULTS


def run_child(child: Child) -> None:
    """Runs a process of a part: results go to its folder, an error to its log."""
    known = child.folder.parent / "machine.json"
    machine = json.loads(known.read_text()) if known.exists() else {}
    _cache_compiled(child.folder.parent / "compiled")
    try:
        child.answer(work(child, machine))
    except UserError as e:
        sys.exit(_print_error(e))


def _cache_compiled(folder: Path) -> None:
    """Enables jax's compilation cache: programs compiled for inspection are not compiled again to run."""
    import jax

    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _say(text: str) -> None:
    print(text, flush=True)
