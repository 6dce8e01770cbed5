"""Time of a hybrid model's layers by formula, beside compiled programs: the rows of `benchmarks/hybrid.py`.

The formula's kernels were read off two other programs; of these rows it has only sizes.
"""

import json
from pathlib import Path

import pytest

from mtjax import config
from mtjax.analysis.copies import copies_in_turn
from mtjax.analysis.families.registry import anatomy_of
from mtjax.analysis.hardware import DGX_H100
from mtjax.analysis.layer_time import layer_seconds
from mtjax.analysis.machine import Machine
from mtjax.analysis.software import MTJAX
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

# Over context parallel ranks Mamba-2 scans twice, which has no formula of time, and the ring's attention is in a loop.
RESULTS = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "hybrid.json").read_text())["results"]
ROWS = [row for row in RESULTS if "context" not in row["mesh"]]
PLAIN = {"sequence_parallel": False, "zero": 0, "recompute": "none", "global_batch_size": 1, "microbatch_size": 1}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['mesh']} {row['sequence_length']} {row['settings']}")
def test_layers_take_as_long_as_those_of_compiled_programs(row):
    settings = {"layer_pattern": "MM**--", "num_layers": 6, "vocab_size": 32768, **PLAIN, **row["settings"]}
    settings |= {"sequence_length": row["sequence_length"], "mesh": row["mesh"]}
    run = config.replace(config.load("nemotron-h-8b"), **settings)
    anatomy, plan, machine = anatomy_of(run.model), Plan.of(run, parse_mesh(row["mesh"])), Machine(DGX_H100)
    for stack in anatomy.stacks:
        copied = sum(copy.times * machine.kernel(copy.size) for copy in copies_in_turn(stack, anatomy.model, plan))
        seconds = sum(layer_seconds(stack, plan, machine, MTJAX)) + copied
        # Kernels of the shortest, 0.6 ms, are no longer than their launches, which the formulas of attention leave out.
        assert 1e3 * seconds == pytest.approx(row["milliseconds"][stack.letter], rel=0.11 if seconds < 1e-3 else 0.08)
