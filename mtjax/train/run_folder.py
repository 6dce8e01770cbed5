"""The folder of a run: which one it is, and what may be in it already."""

import re
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from mtjax.config import Output
from mtjax.errors import UserError

RUNS = Path("runs")


def choose_folder(output: Output, name: str) -> Path:
    """`--out`, or the next free runs/NAME-N, or with --resume the newest one there is.

    Raises:
      UserError: the folder holds a run and --resume is not given, or can't be one.
    """
    if output.out is None:
        last = _agree(max(_numbers(name), default=0))
        return RUNS / f"{name}-{last if output.resume and last else last + 1}"
    there = next((p for p in (output.out, *output.out.parents) if p.exists()), None)
    if there is not None and not there.is_dir():
        raise UserError(f"--out {output.out} can't be a folder: {there} is a file")
    if (output.out / "weights").exists():
        raise UserError(
            f"--out {output.out} holds converted weights: start from them with --init-from, and name another"
        )
    used = _agree(int((output.out / "metrics.jsonl").exists() or (output.out / "checkpoints").exists()))
    if used and not output.resume:
        raise UserError(
            f"--out {output.out} holds a run already: add --resume to go on with it, or name another folder"
        )
    return output.out


def _numbers(name: str) -> list[int]:
    matches = (re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name) for p in RUNS.glob(f"{name}-*"))
    return [int(m[1]) for m in matches if m]


def _agree(number: int) -> int:
    """Process 0's number, in all processes: another may have looked after the folder was made."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))
