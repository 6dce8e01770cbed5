"""Tiny configs to compile, and the mark of tests that compile for GPUs."""

import importlib.util

import pytest

from mtjax import config
from mtjax.analysis.anatomy import Anatomy, anatomy_of
from mtjax.analysis.communication import contract_of, symbols_of
from mtjax.analysis.contract import Contract, Requirement, requirements
from mtjax.config import Config
from mtjax.inspect.report import Report
from mtjax.layout.mesh import parse_mesh
from mtjax.layout.plan import Plan

needs_aot = pytest.mark.aot
"""Of tests that compile for GPUs: they need the extra aot."""

has_cudnn = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None


def theory_of(run: Config) -> tuple[Anatomy, Plan]:
    """What the contract of a run is made from."""
    return anatomy_of(run.model), Plan.of(run, parse_mesh(run.parallel.mesh))


def required_of(run: Config, contract: Contract | None = None) -> list[Requirement]:
    """What a run's contract asks of a step."""
    anatomy, plan = theory_of(run)
    symbols = symbols_of(anatomy, plan)
    return requirements(contract or contract_of(anatomy, plan), symbols, plan.mesh, run.training.compute_dtype)


def tiny(**values) -> Config:
    """A model small enough to compile in seconds, large enough that no activation counts as a scalar."""
    defaults = {
        "mesh": "2x4",
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "sequence_length": 64,
        "vocab_size": 250,
        "vocab_multiple": 256,
        "global_batch_size": 8,
        "microbatch_size": 2,
        "loss_chunk": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention": "auto" if has_cudnn else "xla",
        "recompute": "full",
        "unroll_layers": False,
        "compute_dtype": "bfloat16",
    }
    return config.replace(Config(), **(defaults | values))


def crossing_in_layers(report: Report, axis: str) -> dict[tuple[str, str, str], int]:
    """(phase, kind, array) -> how many cross an axis alone in the layers."""
    found: dict[tuple[str, str, str], int] = {}
    for c in report.collectives:
        if c.axes == (axis,) and c.phase.startswith("layer"):
            for array in c.arrays:
                key = (c.phase, c.kind, str(array))
                found[key] = found.get(key, 0) + c.count
    return found
