"""Compiling for GPUs without assembling: kernels are generated and scheduled, but their PTX becomes no machine code.

XLA starts ptxas once per kernel, a third of the time in which a program of two layers is compiled. Nothing that tests
of such programs look at (operations, collectives, schedule, buffers) depends on what it returns. Commands in processes
of their own, and tests with the fixture `assembled`, use the real one.
"""

import hashlib
import shutil
import tempfile
from pathlib import Path

from jax._src import lib  # names the folder of CUDA's tools for XLA, over what XLA_FLAGS say

PTXAS = """#!/bin/sh
case "$*" in *--version*) exec '{real}' --version;; esac
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && {{ echo none > "$2"; exit 0; }}
  shift
done
exit 1
"""
REAL: str | None = getattr(lib, "cuda_path", None)
"""The installed tools; None where the extra aot is not installed."""


def leave_out(cache: Path) -> None:
    """Lets programs of this process be compiled without ptxas, by a folder of tools in `cache`."""
    if REAL and (Path(REAL) / "bin" / "ptxas").exists():
        lib.cuda_path = str(_tools(Path(REAL), cache))


def _tools(real: Path, cache: Path) -> Path:
    """Links to the installed tools, and a ptxas that assembles nothing; several processes may make it at once."""
    script = PTXAS.format(real=real / "bin" / "ptxas")
    folder = cache / f"cuda-{hashlib.sha256(script.encode()).hexdigest()[:16]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        (made / "bin").mkdir()
        for tool in [*real.iterdir(), *(real / "bin").iterdir()]:
            if tool.name not in ("bin", "ptxas"):
                (made / tool.relative_to(real)).symlink_to(tool)
        (made / "bin" / "ptxas").write_text(script)
        (made / "bin" / "ptxas").chmod(0o755)
        try:
            made.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder
