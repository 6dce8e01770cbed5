"""The folder of a run: which one it is, and what it may already hold."""

import re
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtjax.config import Output
from mtjax.errors import UserError

RUNS = Path("runs")


def choose_folder(output: Output, name: str) -> Path:
    """`--out`, or the next free runs/NAME-N, or with --resume the newest of these.

    Raises:
      UserError: the folder holds a run and --resume is not given, or the path can't be a folder.
    """
    if output.out is None:
        last = _agree(max(_numbers(name), default=0))
        return RUNS / f"{name}-{last if output.resume and last else last + 1}"
    existing = next((p for p in (output.out, *output.out.parents) if p.exists()), None)
    if existing is not None and not existing.is_dir():
        raise UserError(f"--out {output.out} can't be a folder: {existing} is a file")
    if (output.out / "weights").exists():
        raise UserError(
            f"--out {output.out} holds converted weights: start from them with --init-from, and name another folder"
        )
    used = _agree(int((output.out / "metrics.jsonl").exists() or (output.out / "checkpoints").exists()))
    if used and not output.resume:
        raise UserError(f"--out {output.out} holds a run already: add --resume to continue it, or name another folder")
    return output.out


def _numbers(name: str) -> list[int]:
    matches = (re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name) for p in RUNS.glob(f"{name}-*"))
    return [int(m[1]) for m in matches if m]


def _agree(number: int) -> int:
    """Process 0's number, in all processes: another may have looked after the folder was made."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
