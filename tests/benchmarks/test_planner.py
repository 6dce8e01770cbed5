"""benchmarks/planner.py: the planner beside the compiled programs on record."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS = json.loads((BENCHMARKS / "results" / "planner.json").read_text())["rows"]


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("planner")


def test_each_program_is_on_record(planner: ModuleType) -> None:
    assert ROWS.keys() == planner.PROGRAMS.keys()
    assert len(ROWS) == 12


@pytest.mark.parametrize("program", ROWS)
def test_the_time_by_formula_is_within_5_percent_of_the_compiled_program(planner: ModuleType, program: str) -> None:
    """Programs for H100s, walked with the machine code of their kernels."""
    planned = planner.formula(planner.config_of(program)).total
    assert planned == pytest.approx(ROWS[program]["seconds"], rel=0.05)
