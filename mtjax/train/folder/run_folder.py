"""The folder of a run: which one it is, and what it may already contain."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mtjax.config import Output
from mtjax.config.place import MEGATRON_TRACKER, holds_run
from mtjax.errors import UserError, disk_reason, first_line
from mtjax.runtime.checkpoints.corruption import read_on_all_processes
from mtjax.runtime.processes.coordination import all_gather_text
from mtjax.storage import is_file, shown, url_of
from mtjax.train.folder.lock import lock_folder
from mtjax.train.folder.remote import RemoteFolder

RUNS = Path("runs")
ADVICE = "add --resume to continue it, or name another folder"


def choose_folder(output: Output, name: str) -> Path:
    """Returns `--out`, or the next free runs/NAME-N, or with --resume the newest of these.

    Raises:
      UserError: the folder holds a run and --resume is not given, or the path can't be a folder.
    """
    if output.out is None:
        last = _agree(max(_numbers(name), default=0))
        return RUNS / f"{name}-{last if output.resume and last else last + 1}"
    if url_of(output.out):
        return _unless_used(output, output.out)
    existing = next((p for p in (output.out, *output.out.parents) if p.exists()), None)
    if existing is not None and not existing.is_dir():
        raise UserError(f"--out {output.out} can't be a folder: {existing} is a file")
    if (output.out / "weights").exists():
        raise UserError(
            f"--out {output.out} holds converted weights: start from them with --init-from, and name another folder"
        )
    return _unless_used(output, output.out)


def _unless_used(output: Output, folder: Path) -> Path:
    is_megatrons = not holds_run(folder) and is_file(f"{url_of(folder) or folder}/{MEGATRON_TRACKER}")
    used = _agree(2 if is_megatrons else int(holds_run(folder)))
    if used == 2:
        raise UserError(
            f"--out {shown(folder)} holds checkpoints of Megatron-LM ({MEGATRON_TRACKER}): go on from the last one with"
            f" `mtjax convert --from {shown(folder)} --to mtjax:runs/NAME --with-optimizer`, then `mtjax train --config"
            " runs/NAME/config.toml --resume`, or name another folder"
        )
    if used and not output.resume:
        raise UserError(f"--out {shown(folder)} holds a run already: {ADVICE}")
    return folder


def claim_folder(
    folder: Path, *, resume: bool, say: Callable[[str], object], remote: RemoteFolder | None = None
) -> Callable[[], object]:
    """Locks the run's folder, for all of its processes; returns the function that releases it.

    For a `remote` folder, `folder` is its copy on this machine.

    Raises:
      UserError: another run holds the lock or started there after the folder was chosen, or it can't be written to.
    """

    def claim() -> Callable[[], object]:
        # One lock for all processes, held by the first.
        if jax.process_index() != 0:
            return lambda: None
        if remote is not None:
            remote.claim(say)
            # Checked again while the lock is held: two starts may both have found the folder free.
            if not resume and holds_run(Path(remote.url)):
                remote.release()
                raise UserError(f"another run began in {remote.url}: {ADVICE}")
            return remote.release
        lock = lock_folder(folder, say)
        if not resume and holds_run(folder):
            lock.release()
            raise UserError(f"another run began in {folder}: {ADVICE}")
        return lock.release

    return read_on_all_processes(f"the lock of {remote.url if remote else folder}", folder, claim)


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Reports disk errors while a run's folder is written to.

    Raises:
      UserError: the disk can't be written to.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        # An error in the program, not of the disk.
        if disk_reason(e) is None:
            raise
        raise UserError(f"{folder} can't be written to: {first_line(e)}") from e


def _numbers(name: str) -> list[int]:
    matches = (re.fullmatch(rf"{re.escape(name)}-(\d+)", p.name) for p in RUNS.glob(f"{name}-*"))
    return [int(m[1]) for m in matches if m]


def _agree(number: int) -> int:
    """Returns process 0's number in all processes: another process may look after the folder was created."""
    return int(all_gather_text("the choice of the folder", str(number))[0])
