"""ptxas and nvdisasm: machine code of PTX files, and its listing."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtjax.errors import UserError, first_line, install_extra
from mtjax.inspect.kernels import sass
from mtjax.inspect.kernels.sass import Code

_HEAD = re.compile(r"\.address_size 64\s")
_DYNAMIC = re.compile(r"^\.extern \.shared [^;]*;", re.MULTILINE)
_DEFINED = re.compile(
    r"^(?!\.extern)(?:\.\w+ )*(?:"
    r"\.(?:global|const) [^;={]*?([\w$]+)(?:\[\d*\])?\s*[=;]|\.func\s+(?:\([^)]*\)\s*)?([\w$]+)\s*\()",
    re.MULTILINE,
)
"""Constants and functions of a file."""
_COMPILED = re.compile(r"Compiling entry function '(\w+)'(?:(?!Compiling entry function).)*", re.DOTALL)


@dataclass(frozen=True)
class Assembled:
    """What ptxas says about a kernel, and its machine code."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of a thread that it stores to local memory for lack of registers."""
    shared: int
    """Bytes of shared memory of a block, without what the launch adds."""
    code: Code


def find_tool(name: str) -> str:
    """Returns the path of a tool of the extra `aot`, or of one on the PATH.

    Raises:
      UserError: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / "cu13" / "bin" / name
        if path.is_file():
            return str(path)
    found = shutil.which(name)
    if found is None:
        raise UserError(f"--kernels needs CUDA's {name}, which is not installed: {install_extra('aot')}")
    return found


def assemble(files: Sequence[Path], architecture: str, folder: Path) -> dict[str, Assembled]:
    """Assembles PTX files as one, which takes a tenth of the time; kernel -> machine code.

    Args:
      files: of PTX, of one version and target.
      architecture: as of ptxas: sm_90a.
      folder: to which the machine code is written.

    Raises:
      UserError: a tool is missing, or refuses the code.
    """
    tools = find_tool("ptxas"), find_tool("nvdisasm")
    try:
        # In one process: one for each file takes ten times as long.
        return _assemble_one(_joined(path.read_text() for path in files), architecture, folder / "kernels", *tools)
    except UserError:
        # Names that `_joined` does not know may be defined twice.
        each = (_assemble_one(path.read_text(), architecture, folder / path.stem, *tools) for path in files)
        return {name: kernel for kernels in each for name, kernel in kernels.items()}


def _assemble_one(text: str, architecture: str, path: Path, ptxas: str, nvdisasm: str) -> dict[str, Assembled]:
    """Assembles a PTX file, with a path without suffix for it and for its machine code."""
    source, cubin = path.with_suffix(".joined.ptx"), path.with_suffix(".cubin")
    source.write_text(text)
    said = _run([ptxas, "-v", "--gpu-name", architecture, str(source), "-o", str(cubin)]).stderr
    about = {match[1]: said[match.start() : match.end()] for match in _COMPILED.finditer(said)}
    codes = sass.parse(_run([nvdisasm, "-c", str(cubin)]).stdout)
    return {name: _assembled(code, about.get(name, "")) for name, code in codes.items()}


def _joined(texts: Iterable[str]) -> str:
    """Joins PTX files; one head is kept, and one declaration of shared memory whose size the launch sets.

    Files may define constants and functions of the same name: later ones are renamed.
    """
    head, dynamic, bodies = "", set(), []
    defined: set[str] = set()
    for text in texts:
        start = _HEAD.search(text)
        if start is None:
            continue
        # Version and target are those of all files.
        head = head or text[: start.end()]
        body = text[start.end() :]
        dynamic.update(_DYNAMIC.findall(body))
        body = _DYNAMIC.sub("", body)
        for name in {variable or function for variable, function in _DEFINED.findall(body)}:
            if name in defined:
                body = re.sub(rf"(?<![\w$]){re.escape(name)}(?![\w$])", lambda m: f"{m[0]}_{len(bodies)}", body)
            defined.add(name)
        bodies.append(body)
    return "\n".join([head, *sorted(dynamic), *bodies])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = first_line(ValueError(done.stderr or "no message"), 300)
        raise UserError(f"{Path(command[0]).name} ended with code {done.returncode}: {problem}")
    return done


def _assembled(code: Code, said: str) -> Assembled:
    def number(pattern: str) -> int:
        match = re.search(pattern, said)
        return int(match[1]) if match else 0

    spilled = number(r"(\d+) bytes spill stores")
    return Assembled(number(r"Used (\d+) registers"), spilled, number(r"(\d+) bytes smem"), code)
