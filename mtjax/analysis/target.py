"""Parser of `--target`: "h100x8" (GPU x GPUs per server), a GPU alone, or a TOML file that describes a server."""

import dataclasses
import re
from pathlib import Path
from typing import Any

from mtjax.analysis.hardware import SERVERS, Gpu, Server, find_gpu
from mtjax.config.toml import read_toml
from mtjax.errors import UserError, nearest


def parse(target: str) -> Server:
    """Parses a target.

    A GPU alone ("h100") means its usual server; a file is TOML with `gpu = "h100"` (a known GPU as the default of all
    fields), `gpus`, and optionally `link`, `network` (bytes/s per GPU and direction), `link_latency`, `network_latency`
    (seconds), `name`, and under `[gpu_facts]` any field of `hardware.Gpu`.

    Raises:
      UserError: an unknown GPU, no GPUs, a missing file, or an invalid key or value in it.
    """
    if target.endswith(".toml"):
        return _from_file(Path(target))
    match = re.fullmatch(r"(?P<kind>[A-Za-z]\w*(?:-\w+)?)(?:[x:](?P<gpus>\d+))?", target)
    if match is None:
        raise UserError(f"--target {target!r} is not KINDxGPUS-PER-SERVER, such as h100x8, nor a .toml file")
    kind, gpus = _split(match)
    server = SERVERS[find_gpu(kind).name]
    return _sized(server, gpus if gpus is not None else server.gpus, f"--target {target}")


def _split(match: re.Match[str]) -> tuple[str, int | None]:
    """Returns the GPU's name and the count; the name's pattern is greedy and may match all of "h100x8"."""
    kind, gpus = match["kind"], match["gpus"]
    if gpus is None and (inner := re.fullmatch(r"(.+\d)x(\d+)", kind)):
        kind, gpus = inner[1], inner[2]
    return kind, None if gpus is None else int(gpus)


def _sized(server: Server, gpus: int, where: str) -> Server:
    """Returns the server with another number of GPUs."""
    if not 1 <= gpus <= 1024:
        raise UserError(f"{where}: {gpus} GPUs in a server; give between 1 and 1024")
    name = server.name if gpus == server.gpus else f"{gpus} x {server.gpu.name} with the links of {server.name}"
    return dataclasses.replace(server, gpus=gpus, name=name)


def _from_file(path: Path) -> Server:
    if not path.exists():
        raise UserError(f"no target file {str(path)!r}; a built-in target looks like h100x8")
    table = read_toml(path)
    if not isinstance(table.get("gpu"), str):
        raise UserError(f'{path} has no gpu: add a known GPU, such as gpu = "h100", whose numbers are the defaults')
    gpu = find_gpu(table.pop("gpu"))
    facts = table.pop("gpu_facts", {})
    if not isinstance(facts, dict):
        raise UserError(f"{path}: gpu_facts is a table, not a value: write [gpu_facts] on a separate line")
    server = dataclasses.replace(SERVERS[gpu.name], gpu=_replaced(gpu, facts, f"{path}: [gpu_facts]"))
    gpus = table.pop("gpus", server.gpus)
    if type(gpus) is not int:
        raise UserError(f"{path}: gpus = {gpus!r} should be an integer")
    server = _sized(server, gpus, str(path))
    return _replaced(server, table, str(path))


def _replaced(what: Any, values: dict[str, Any], where: str) -> Any:
    """Returns `what` (a `Gpu` or `Server`) with checked `values` in place of its scalar fields."""
    known = {f.name for f in dataclasses.fields(what)} - {"gpu", "gpus"}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{where}: unknown key {name!r}{nearest(name, known)}")
        old = getattr(what, name)
        if isinstance(what, Gpu) and name == "peak":
            if not isinstance(value, dict) or not all(_positive(v) for v in value.values()):
                raise UserError(f"{where}: peak is a table of FLOP/s by type, such as peak = {{ bfloat16 = 989e12 }}")
            # Types that the file leaves out keep the known GPU's peak.
            value = {**old, **{k: float(v) for k, v in value.items()}}
        elif isinstance(old, str):
            if not isinstance(value, str):
                raise UserError(f"{where}: {name} = {value!r} should be text")
        elif isinstance(old, int | float):
            if not _positive(value):
                raise UserError(f"{where}: {name} = {value!r} should be a number above 0")
            # TOML has integers where the field is a float.
            value = type(old)(value)
        else:
            raise UserError(f"{where}: {name} can't be changed here; use another gpu")
        what = dataclasses.replace(what, **{name: value})
    return what


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
