"""Is it right, how fast is it, and was that foreseen: one command for a machine with NVIDIA GPUs.

    python benchmarks/gpu.py                              # under 8 minutes on one GPU, the most important first
    python benchmarks/gpu.py --only machine "speed *"     # some of it
    python benchmarks/gpu.py --rehearse                   # tiny shapes on the CPU, to the last line; keeps no number

Correctness: losses and gradients against float32 on the CPU, cuDNN's attention against XLA's, float16 with an
overflow, `--deterministic`, a run that is killed and resumed. Speed: GPT-2 small, medium and XL, the 1.2B of arXiv
1909.08053 and a Llama of a billion parameters, each beside a PyTorch model of the same shape (torch.compile, flash
attention) in the same run, beside this GPU's best product, and beside what `plan` and `inspect` predicted, by cause.
With several GPUs also NCCL's bandwidth, meshes and scaling.

It runs from a checkout with what `pip install '.[cuda]'` installs; PyTorch's side needs a torch with CUDA. Results
are written after every part, as JSON and as a page with hardware, versions and date: to benchmarks/results, or
to `--out FOLDER`.
"""

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def missing_packages() -> list[str]:
    """What mtjax needs and this Python lacks, as pip is to be told."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return [wanted for wanted in needed if not _is_installed(re.split(r"[^\w.-]", wanted)[0])]


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


if __name__ == "__main__":
    missing = missing_packages()
    if missing:
        words = " ".join(f"'{wanted}'" for wanted in missing)
        sys.exit(
            f"error: {len(missing)} packages that mtjax needs are not here: {sys.executable} -m pip install {words}"
        )
    sys.path.insert(0, str(ROOT))  # the checkout, installed or not
    from gpu_kit.main import main

    main(__doc__ or "")
