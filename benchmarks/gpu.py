"""Correctness and speed on a machine with NVIDIA GPUs, compared with predictions, in one command.

    python benchmarks/gpu.py                              # at most 15 minutes, the most important parts first
    python benchmarks/gpu.py --only machine "speed *"     # selected parts
    python benchmarks/gpu.py --rehearse                   # all parts with tiny shapes on the CPU; writes no results

Correctness: losses and gradients against float32 on the CPU, cuDNN's attention against XLA's, float16 with an
overflow, `--deterministic`, a run that is killed and resumed. Speed: GPT-2 small, medium and XL, the 1.2B of arXiv
1909.08053 and a Llama of a billion parameters, each compared with a PyTorch model of the same shape (torch.compile,
flash attention), with this GPU's fastest matrix product, and with the predictions of `plan` and `inspect`, by cause.
With multiple GPUs also NCCL's bandwidth, meshes and scaling.

It runs from a checkout, with the packages that `pip install '.[cuda]'` installs; PyTorch's side needs a torch with
CUDA. Results are written after every part, as JSON and as a Markdown page with hardware, versions and date, to
benchmarks/results or to `--out FOLDER`.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def missing_packages() -> list[str]:
    """Returns the missing dependencies of mtjax, as arguments for pip."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [each for each in dependencies if not _is_installed(re.split(r"[^\w.-]", each)[0])]


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    missing = missing_packages()
    if missing:
        packages = " ".join(f"'{package}'" for package in missing)
        sys.exit(
            f"error: {len(missing)} dependencies of mtjax are not installed: {sys.executable} -m pip install {packages}"
        )
    sys.path.insert(0, str(ROOT))  # use the checkout, even if mtjax is installed
    from gpu_kit.main import main

    main(__doc__ or "")
