"""Atomic writes of the inspector's files."""

from pathlib import Path

from mtjax.errors import UserError
from mtjax.inspect.compiled import CompiledStep


def write(path: Path, content: str) -> None:
    """Writes a text file atomically, by renaming a temporary one.

    Raises:
      UserError: it can't be written there.
    """
    # Beside the file: a rename replaces it at once, but only within a file system.
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(content)
        temporary.replace(path)
    except OSError as e:
        raise UserError(f"can't write {path}: {e.strerror}") from e


def dump(step: CompiledStep, folder: Path, number: int = 1) -> Path:
    """Writes a program's HLO text, whose op_names contain the modules' names; returns the file.

    Args:
      step: any compiled step.
      folder: created if it does not exist.
      number: distinguishes programs of the same mesh.
    """
    name = f"step-{number}-{step.mesh}-{Path(step.target.name).stem}.hlo.txt"
    write(folder / name, step.text)
    return folder / name
