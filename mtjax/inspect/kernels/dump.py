"""What XLA writes about a program's kernels while it compiles: PTX files, and what the host launches."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtjax.errors import UserError
from mtjax.inspect.kernels import ptx
from mtjax.inspect.kernels.kernel import KernelLaunch

_LAUNCH = re.compile(
    r"(\d+): (?:kKernel|kCustomKernel)\s.*?\]\s*(\S+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
    r"(?:.*shared_memory: (\d+) bytes)?"
)
_NAME = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
"""An instruction, and the number of what is launched for it."""


@dataclass(frozen=True)
class Dump:
    """Kernels of a program."""

    launches: Mapping[str, KernelLaunch]
    """By the kernel's name."""
    ptx: Mapping[str, ptx.PtxEntry]
    files: tuple[Path, ...]
    """The PTX files of launched kernels."""
    of_instruction: Mapping[str, str]
    """Instruction -> kernel; XLA uses a kernel for all instructions that compute the same."""


def read(folder: Path, module: str) -> Dump:
    """Reads what XLA wrote about a module.

    Args:
      folder: that XLA was given.
      module: its name; others compiled at the same time are left out.

    Raises:
      UserError: the files are not those that this version knows.
    """
    lists = [path for path in folder.glob("*.thunk_sequence.txt") if f".{module}." in path.name]
    launches: dict[str, KernelLaunch] = {}
    of_instruction: dict[str, str] = {}
    for path in lists:
        metadata = path.with_name(path.name.replace("thunk_sequence", "thunk_metadata"))
        found = _NAME.findall(metadata.read_text()) if metadata.is_file() else []
        names = {int(number): name for name, number in found}
        for number, name, *sizes in _LAUNCH.findall(path.read_text()):
            x, y, z, *threads, shared = (int(size or 0) for size in sizes)
            # A kernel that is launched several times has the same sizes each time: XLA makes a kernel for each shape.
            launches[name] = KernelLaunch((x, y, z), (threads[0], threads[1], threads[2]), shared)
            of_instruction[names.get(int(number), name)] = name
    kernels: dict[str, ptx.PtxEntry] = {}
    files: list[Path] = []
    for path in sorted(folder.glob("*.ptx")):
        # Other programs that are compiled meanwhile write into the same folder.
        found = {name: k for name, k in ptx.parse(path.read_text()).items() if name in launches}
        if found:
            kernels |= found
            files.append(path)
    if not launches or not kernels:
        raise UserError(
            f"XLA wrote {len(lists)} lists of launches and {len(files)} PTX files that --kernels can read: this "
            "version of jax has another format; leave --kernels out"
        )
    return Dump(launches, kernels, tuple(files), of_instruction)
