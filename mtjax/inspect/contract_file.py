"""Contracts in TOML files: `--contract FILE`.

name = "my model"
split = ["heads", "mlp", "vocab"]   # logical axes whose weights must be sharded over `model`

[[expect]]
phase = "layer forward"
kind = "all-reduce"
axis = "model"         # or several together: "data+context"
count = "2*layers*microbatches"      # arrays in a step: a number or a formula of the symbols in `sizes` (see --json)
elements = "batch*sequence*hidden"
dtype = "compute"      # or "float32", "bfloat16"
pooled = false         # true: only the total is checked
also = "loss backward" # another phase in which it is allowed
hoisted = false        # true: any total from `elements` to `count` times that, in any phase after the forward pass
"""

from pathlib import Path
from typing import Any, get_args, get_type_hints

from mtjax.analysis.contract import PHASES, Contract, Expectation
from mtjax.config.toml import read_toml
from mtjax.errors import UserError, nearest
from mtjax.inspect.collectives import KINDS
from mtjax.layout.rules import Rules

_REQUIRED = ("phase", "kind", "axis", "count", "elements")


def load_contract(path: Path) -> Contract:
    """Reads a contract.

    Raises:
      UserError: the file can't be read, or has an unknown key or an invalid value.
    """
    if not path.exists():
        raise UserError(f"no contract file {str(path)!r}")
    table = read_toml(path)
    _known(table, ("name", "split", "expect"), str(path))
    expected = table.get("expect", [])
    split = table.get("split", [])
    if not isinstance(expected, list) or not all(isinstance(line, dict) for line in expected):
        raise UserError(f"{path}: write each expectation under a line [[expect]]")
    if not isinstance(split, list):
        raise UserError(f'{path}: split is a list of logical axes, such as ["heads", "mlp"]')
    for axis in split:
        _one_of(axis, tuple(vars(Rules())), f"{path}: split")
    lines = tuple(_expectation(line, f"{path}: expectation {i}") for i, line in enumerate(expected, 1))
    return Contract(str(table.get("name", path.stem)), lines, tuple(split))


def _expectation(line: dict[str, Any], where: str) -> Expectation:
    """Returns one line of the contract, checked."""
    hints = get_type_hints(Expectation)
    del hints["sent"]  # no check reads it
    _known(line, tuple(hints), where)
    for name in _REQUIRED:
        if name not in line:
            raise UserError(f"{where} has no {name}; it needs {', '.join(_REQUIRED)}")
    _one_of(line["phase"], PHASES, f"{where}: phase")
    _one_of(line["kind"], KINDS, f"{where}: kind")
    _one_of(line.get("dtype", "compute"), get_args(hints["dtype"]), f"{where}: dtype")
    if line.get("also"):
        _one_of(line["also"], PHASES, f"{where}: also")
    for name in ("pooled", "hoisted"):
        if not isinstance(line.get(name, False), bool):
            raise UserError(f"{where}: {name} = {line[name]!r} should be true or false")
    formulas = {name: str(line[name]) for name in ("count", "elements")}
    return Expectation(**{**line, **formulas})


def _known(table: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    for name in table:
        if name not in names:
            raise UserError(f"{where}: unknown key {name!r}{nearest(name, names)}")


def _one_of(value: Any, values: tuple[str, ...], where: str) -> None:
    if value not in values:
        raise UserError(f"{where} = {value!r} is not one of {', '.join(values)}{nearest(str(value), values)}")
